"""The console script: `slipstream COMMAND ...`, with the commands of COMMANDS.

Every command is one of the module commands under a shorter name, with the same arguments. Invariant: the code that runs
is that of this installation, also where the working folder has packages named core or tools, unless PYTHONPATH names
that folder.
"""

import os
import runpy
import sys
from collections.abc import Sequence

from rollout.plugins import ROOT, python_path
from slipstream import __version__

COMMANDS: dict[str, tuple[str, tuple[str, ...], str]] = {
    "train": ("core.quickstart", ("ppo-math",), "train by reinforcement learning"),
    "sft": ("core.quickstart", ("sft",), "train on given answers"),
    "dpo": ("core.quickstart", ("dpo",), "train on pairs of answers"),
    "dry-run": ("core.quickstart", ("--dry-run",), "check a configuration: slipstream dry-run {ppo-math,sft,dpo} ..."),
    "plan": ("tools.plan", (), "compute whether a configuration fits in memory, before it starts"),
    "eval": ("tools.eval", (), "evaluate a model on benchmarks"),
    "compare": ("tools.eval", ("compare",), "compare two evaluations"),
    "runs": ("tools.runs", (), "list runs with state, step and reward"),
    "watch": ("tools.watch", (), "watch a run: reward curve, last steps, answers"),
    "studio": ("tools.studio", (), "configure, watch and understand runs in a browser"),
    "samples": ("tools.samples", (), "show what a run sampled in training"),
    "experience": ("tools.experience", (), "look into a store of episodes, copy it, drop tokens"),
    "ledger": ("tools.experience.ledger", (), "account for every prompt of a run"),
    "migrate": ("tools.migrate", (), "write a recipe for one of another system"),
    "timeline": ("tools.timeline", (), "write a trace and a picture of what each process did when"),
    "convert": ("tools.convert", (), "convert between Megatron checkpoints and Hugging Face folders"),
    "check-template": ("tools.check_template", (), "show how a chat template continues conversations"),
    "fetch": ("tools.fetch", (), "write a small chat model as a folder, without a hub"),
    "demo": ("tools.demo", (), "train a small model on CPU"),
    "chaos": ("tools.chaos", (), "kill a run again and again, and compare it with an undisturbed one"),
    "bench": ("tools.bench", (), "measure, each figure beside its baseline"),
}
"""Command -> (module, its first arguments, description)."""
BAD_INPUT, INTERRUPTED = 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] in (["--version"], ["-V"]):
        print(f"slipstream {__version__}")
        return 0
    if not words or words[0] in ("-h", "--help"):
        print(usage())
        return 0 if words else BAD_INPUT
    if words[0] not in COMMANDS:
        from core.config.presets import PRESETS

        hint = f"; for an algorithm: slipstream train algorithm={words[0]} ..." if words[0].lower() in PRESETS else ""
        print(f"error: unknown command {words[0]!r}; one of {', '.join(COMMANDS)}{hint}", file=sys.stderr)
        return BAD_INPUT
    module, first, _ = COMMANDS[words[0]]
    try:
        folder = os.getcwd()
    except FileNotFoundError:
        print("error: the working folder was removed; change to one that exists", file=sys.stderr)
        return BAD_INPUT
    os.environ["PYTHONPATH"] = python_path()  # for the processes that the command starts
    # Rewards and workflows of the working folder come behind this installation. An editable one is found behind all
    # folders of the path.
    if folder not in sys.path:
        sys.path.append(folder)
    sys.path.insert(sys.path.index(folder), str(ROOT))
    sys.argv = [f"slipstream {words[0]}", *first, *words[1:]]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return INTERRUPTED
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
            return 1
        return end.code or 0
    return 0


def usage() -> str:
    """Return the help text: every command with its description."""
    lines = [f"  {name:<15}{description}" for name, (_, _, description) in COMMANDS.items()]
    return "\n".join(
        ["usage: slipstream COMMAND [arguments]", "", *lines, "", "slipstream COMMAND --help explains one."]
    )


if __name__ == "__main__":
    sys.exit(main())
