"""Print advantages, loss and gradients of an algorithm for given log-probabilities.

    python -m tools.loss CASE.json                        # or: ... < CASE.json
    python -m tools.loss --from-run FOLDER --step 7       # a step that a run saved under monitor.save_batches

CASE is {"algorithm": NAME, "settings": {KEY: VALUE}, "sequences": [SEQUENCE, ...]}. A SEQUENCE has one number per token
under "logprobs" and, as far as the algorithm needs them, under "old_logprobs", "rollout_logprobs", "ref_logprobs",
"values", "entropy" and "versions"; "mask" (true or 1: trained; default: all); "reward"; "group" (any name; default: a
group of its own); "truncated" (default false). "advantage", a number or one per token, replaces the computed one.
"turn_rewards" and "turn_states" (numbers) have one entry for each run of 1 in the mask.
Settings are keys of the section `algorithm`; keys of other sections are written with their path, as in "ppo.kl_ctl".
Without them, ppo.kl_ctl is 0, and ppo.adv_norm is false unless the algorithm sets it. Advantages and losses come from
the code that trains, in float64. The result is JSON: advantages (one per sequence, or a list per token), loss, grads (d
loss / d logprobs), metrics, weights (the factor that corrections multiply the loss of each token by) and token_weights
(its share in the loss). "version" beside "sequences" is that of the trainer's weights; default: that of the newest
token. Sequences of mix and chord with "demonstration": true come last; steps that a run saved have them
where it computed old_logprobs.

{"algorithm": "dpo", "settings": {"beta": 0.1, "loss": "ipo"}} takes pairs: groups of two sequences with "logprobs" and
"ref_logprobs", of which the one with the higher "reward" is the chosen one. Settings are keys of the section `dpo`.
"""

import gzip
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from core.runs.paths import step_file
from tools.arguments import parser_of

if TYPE_CHECKING:
    from tools.loss.compute import Case


def _read(path: Path | None, run: Path | None, step: int) -> str:
    """Return the text of a case: a file, standard input, or a saved step. Raises ValueError where there is no
    such step."""
    if run is not None:
        found = sorted(run.rglob(step_file(Path("batches"), step).as_posix()))
        if len(found) != 1:
            raise ValueError(
                f"--from-run {run}: {len(found)} files of step {step} below this folder, expected 1; name the logs of "
                "a run with monitor.save_batches"
            )
        return gzip.decompress(found[0].read_bytes()).decode()
    return path.read_text(encoding="utf-8") if path and str(path) != "-" else sys.stdin.read()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; 2 where the input is wrong."""
    parser = parser_of("tools.loss", __doc__)
    parser.add_argument("case", nargs="?", type=Path, help="JSON file; default: standard input")
    parser.add_argument("--from-run", type=Path, help="folder of a run: its logs, or one above them")
    parser.add_argument("--step", type=int, help="with --from-run: the step, counted from 1 as in the metrics")
    options = parser.parse_args(arguments)
    if (options.from_run is None) != (options.step is None) or (options.from_run and options.case):
        parser.error("--from-run and --step belong together, and take the place of a file")
    try:
        case: Case = json.loads(_read(options.case, options.from_run, options.step))
        if not isinstance(case, dict):
            raise ValueError("the input must be a JSON object with algorithm, settings and sequences")
        from tools.loss.compute import compute

        result = compute(case)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
