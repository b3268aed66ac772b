"""Show the answers that a run sampled in training and in evaluations: filter and search them, or put two steps or two
runs side by side.

    python -m tools.samples RUN                                    # the last step that has samples
    python -m tools.samples RUN --step 10..20 --best --full
    python -m tools.samples RUN --reward '<=0' --finish length --search 'therefore|hence'
    python -m tools.samples RUN --of evaluation --reward '<=0'     # of the last step with an evaluation
    python -m tools.samples RUN --step 10 --against 200            # two steps side by side
    python -m tools.samples RUN --against OTHER_RUN                # two runs side by side
    python -m tools.samples RUN --step 1..100 --json > some.jsonl  # the rows that are left, for other programs
    python -m tools.samples RUN --store                            # every answer that its experience store still has
    python -m tools.samples experience.db --tokenizer MODEL        # a store by its path, also postgresql://...

RUN is the log folder of a run, {fileroot}/logs/<user>/<experiment>/<trial>, or any folder above it with one run. The
files are those of samples.share; see docs/configuration.md. A store has the answers of episodes that are ready, and of
trained steps while it keeps their tokens (docs/experience.md).
"""

import argparse
import json
import operator
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from core.monitoring.samples import Decode, Sample, choose_samples, headline, read_samples, shortened
from core.runs.record import CONFIG, settings_of
from rollout.data.source import printable
from rollout.experience import Episode, Experience, StoreError, Tags
from rollout.plugins import PluginError
from tools.arguments import BadRequest, integer, parser_of, refused, run_with, step_range
from tools.experience.ledger import open_store

Keep = Callable[[Sample], bool]


class _Source(NamedTuple):
    """Where samples are read."""

    title: str
    read: Callable[[range | None], Iterable[Sample]]
    """Yields them by step: at least those of a range of steps, or of the last one."""


_OPERATORS = {
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
    "=": operator.eq,
}
_SHORT, _FULL = 800, sys.maxsize


def main(argv: Sequence[str] | None = None) -> int:
    """Show what the arguments select; return the exit code."""
    arguments = _parser().parse_args(argv)
    console = Console()
    try:
        if arguments.against is None:
            _show(*_chosen(_source(arguments.run, arguments), arguments.step, arguments), arguments, console)
        else:
            _compare(arguments, console)
    except (BadRequest, PluginError, StoreError) as error:
        return refused(error)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("tools.samples", __doc__)
    add = parser.add_argument
    add("run", metavar="RUN", help="log folder of a run, or an experience store")
    add("--store", action="store_true", help="read the run's experience store, not samples.jsonl")
    add("--tokenizer", type=Path, metavar="MODEL", help="folder of the model; default: the run's")
    add("--step", type=step_range, metavar="N[..M]", help="steps to show; default: the last one")
    add("--against", metavar="N[..M] | RUN", help="show these steps, or another run, beside the first")
    add("--of", metavar="SET", help="training, evaluation, or the name of an evaluation set; default: all of them")
    add("--reward", type=_reward, metavar="'>0.5'", help="keep answers with such a reward")
    add("--finish", choices=("stop", "length"), help="keep answers that ended in this way")
    add("--query", metavar="ID", help="keep answers to this prompt (query_id)")
    add("--search", type=_pattern, metavar="REGEX", help="keep answers or prompts with a match")
    for name in ("best", "worst", "longest"):
        add(f"--{name}", action="store_true", help=f"keep the {name} answer of each step")
    add("--sort", choices=("step", "reward", "length"), default="step", help="order; default: step")
    add("--limit", type=integer(least=0), default=10, metavar="N", help="answers to show; 0: all; default: 10")
    add("--full", action="store_true", help="show whole texts instead of their start and end")
    add("--json", action="store_true", help="write rows instead of panels")
    return parser


def _reward(text: str) -> Callable[[float], bool]:
    found = re.fullmatch(r"\s*(<=|>=|==|!=|<|>|=)\s*(\S+)\s*", text)
    try:
        compare, limit = _OPERATORS[found[1]], float(found[2])  # type: ignore[index]
    except (TypeError, ValueError):
        raise argparse.ArgumentTypeError(f"{text!r} is no condition; write '>0.5', '<=0' or '=1'") from None
    return lambda reward: bool(compare(reward, limit))


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text, re.IGNORECASE)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression: {error}") from None


def _source(run: str, arguments: argparse.Namespace) -> _Source:
    """Return the samples of a run or a store. Raises BadRequest, and as open_store()."""
    path, kind = Path(run).expanduser(), ""
    if "://" in run:
        kind = "postgres"
    elif path.is_file():
        kind = "sqlite"
    elif any(path.glob("episodes-*.jsonl")):
        kind = "file"
    if kind:
        return _of_store(run, argparse.Namespace(run=None, store=kind, path=run), arguments.tokenizer)
    if arguments.store:
        folder = run_with(path, CONFIG, without="a run writes it at its start")
        model = arguments.tokenizer or Path(str(settings_of(folder).get("actor.path", "")))
        return _of_store(_name(folder), argparse.Namespace(run=folder, store="", path=""), model)
    folder = run_with(path, "samples.jsonl", without="samples.share=0 writes none; --store reads the run's store")
    return _Source(_name(folder), lambda steps: read_samples(folder))


def _name(folder: Path) -> str:
    return f"{folder.parent.name}/{folder.name}"


def _of_store(title: str, named: argparse.Namespace, model: Path | None) -> _Source:
    from rollout.data.tokenizer import load_tokenizer  # takes seconds

    if model is None:
        raise BadRequest(f"{title}: name the folder of the model that sampled it with --tokenizer")
    store, tokenizer = open_store(named), load_tokenizer(model)
    return _Source(title, partial(_stored, store, lambda tokens: str(tokenizer.decode(tokens))))


def _stored(store: Experience, decode: Decode, steps: range | None) -> Iterator[Sample]:
    """Yield every answer of a store that has its tokens. Its step is that of its lease, or the first one that may have
    it."""
    by_step: dict[int, list[Tags]] = {}
    for tags in store.tags():
        if tags.fate in ("ready", "leased", "trained"):
            by_step.setdefault(tags.due + 1, []).append(tags)
    for step in sorted(by_step.keys() & {*steps}) if steps else sorted(by_step, reverse=True):
        kept = [episode for tags in by_step[step] for episode in _values(store, tags)]
        groups, ids = [episode.trajectories for episode in kept], [episode.tags.id for episode in kept]
        if groups:
            yield from choose_samples(groups, ids, decode, step=step, share=1.0)
            if steps is None:
                return


def _values(store: Experience, tags: Tags) -> list[Episode]:
    try:
        return store.values([tags.id])
    except KeyError:  # its tokens are dropped
        return []


def _chosen(source: _Source, steps: range | None, arguments: argparse.Namespace) -> tuple[list[Sample], str]:
    """Return the samples of a run that the conditions keep, of its last step where no step is given, and among which
    they were searched."""
    keep = _conditions(arguments)
    samples: list[Sample] = []
    sets: set[str] = set()
    try:
        for sample in source.read(steps):
            sets |= {"training"} if not sample.evaluation else {"evaluation", sample.evaluation}
            if not _is_of(sample, arguments.of):
                continue
            if steps is None and samples and sample.step > samples[0].step:
                samples.clear()
            if steps is None or sample.step in steps:
                samples.append(sample)
    except (OSError, ValueError) as error:
        raise BadRequest(str(error)) from error
    if not samples:
        where = f" of steps {steps[0]} to {steps[-1]}" if steps else ""
        if arguments.of is not None:
            where += f" of --of {arguments.of}; there are some of {', '.join(sorted(sets)) or 'nothing'}"
        raise BadRequest(f"{source.title}: there are no samples{where}")
    kept = [s for s in samples if all(k(s) for k in keep)]
    order: dict[str, Callable[[Sample], float]] = {
        "step": lambda s: s.step,
        "reward": lambda s: -s.reward,
        "length": lambda s: -s.answer_tokens,
    }
    return sorted(kept, key=order[arguments.sort]), f"{len(samples)} of {_steps(samples)}"


def _is_of(sample: Sample, wanted: str | None) -> bool:
    if wanted == "training":
        return not sample.evaluation
    return wanted in (None, sample.evaluation) or (wanted == "evaluation" and bool(sample.evaluation))


def _conditions(arguments: argparse.Namespace) -> list[Keep]:
    keep: list[Keep] = []
    if arguments.reward is not None:
        keep.append(lambda s: arguments.reward(s.reward))
    if arguments.finish is not None:
        keep.append(lambda s: s.finish_reason == arguments.finish)
    if arguments.query is not None:
        keep.append(lambda s: s.query_id == arguments.query)
    if arguments.search is not None:
        keep.append(lambda s: any(arguments.search.search(text) for text in (s.prompt, s.answer)))
    wanted = {name for name in ("best", "worst", "longest") if getattr(arguments, name)}
    if wanted:
        keep.append(lambda s: bool(wanted & set(s.notable)))
    return keep


def _show(samples: Sequence[Sample], searched: str, arguments: argparse.Namespace, console: Console) -> None:
    shown = samples[: arguments.limit or None]
    if arguments.json:
        for sample in shown:
            sys.stdout.write(json.dumps({"step": sample.step, **sample.to_row()}) + "\n")
        return
    for sample in shown:
        console.print(_panel(sample, arguments))
    among = f", found among the {searched}" if _conditions(arguments) else ""
    console.print(f"{len(shown)} of {len(samples)} answers shown{among}" + _hint(shown, samples))


def _hint(shown: Sequence[Sample], samples: Sequence[Sample]) -> str:
    return "; --limit 0 shows all" if len(shown) < len(samples) else ""


def _panel(sample: Sample, arguments: argparse.Namespace) -> Panel:
    chars = _FULL if arguments.full else _SHORT
    notable = f" ({', '.join(sample.notable)})" if sample.notable else ""
    parts = [Text(printable(shortened(sample.prompt, chars)), style="dim")]
    if sample.turns:
        for turn in sample.turns:
            style = "" if turn.by == "model" else "italic cyan"
            parts.append(_marked(f"[{turn.by}] {shortened(turn.text, chars)}", arguments, style))
    else:
        parts.append(_marked(shortened(sample.answer, chars), arguments))
    if sample.reference:
        parts.append(Text(f"right answer: {printable(shortened(sample.reference, chars))}", style="green"))
    parts.append(Text(headline(sample), style="bold"))  # in the panel: a narrow terminal would cut a subtitle off
    return Panel(
        Group(*parts),
        title=Text(f"step {sample.step}{_of(sample)}{notable}"),
        title_align="left",
        border_style=_style(sample),
    )


def _style(sample: Sample) -> str:
    """Return the colour of an answer: green for the best of its step, red for the worst."""
    return "green" if "best" in sample.notable else "red" if "worst" in sample.notable else "default"


def _of(sample: Sample) -> str:
    return f", evaluation {sample.evaluation}" if sample.evaluation else ""


def _marked(text: str, arguments: argparse.Namespace, style: str = "") -> Text:
    marked = Text(printable(text), style=style)
    if arguments.search is not None:
        marked.highlight_regex(arguments.search, style="reverse")
    return marked


def _compare(arguments: argparse.Namespace, console: Console) -> None:
    """Show two steps of a run, or two runs, in two columns: the same answer to the same prompt in a row where both have
    it, otherwise in the order of each side."""
    run = _source(arguments.run, arguments)
    if re.fullmatch(r"\d+(\.\.\d+)?", arguments.against):
        if arguments.step is None:
            raise BadRequest(f"--against {arguments.against}: which steps beside these? Add --step N")
        sides = (run, arguments.step), (run, step_range(arguments.against))
    else:
        sides = (run, arguments.step), (_source(arguments.against, arguments), arguments.step)
    left, right = (_chosen(source, steps, arguments)[0] for source, steps in sides)
    rows, common = _pairs(left, right)
    table = Table(show_lines=True, expand=True)
    for (source, _), samples in zip(sides, (left, right), strict=True):
        table.add_column(Text(_title(source, samples)), ratio=1)
    for pair in rows[: arguments.limit or None]:
        table.add_row(*("" if sample is None else _cell(sample, arguments) for sample in pair))
    console.print(table)
    console.print(
        f"{min(len(rows), arguments.limit or len(rows))} of {len(rows)} rows shown, {common} of them with the same "
        "prompt on both sides"
    )


def _pairs(left: Sequence[Sample], right: Sequence[Sample]) -> tuple[list[tuple[Sample | None, Sample | None]], int]:
    """Return rows of two columns, those with the same prompt first, and the number of these."""
    waiting: dict[tuple[str, str, int], list[Sample]] = {}
    for sample in right:
        waiting.setdefault((sample.evaluation, sample.query_id, sample.index), []).append(sample)
    both: list[tuple[Sample | None, Sample | None]] = []
    alone: list[Sample] = []
    for sample in left:
        partners = waiting.get((sample.evaluation, sample.query_id, sample.index))
        if partners:
            both.append((sample, partners.pop(0)))
        else:
            alone.append(sample)
    taken = {id(b) for _, b in both}
    others = [sample for sample in right if id(sample) not in taken]
    longer = max(len(alone), len(others))
    rest = [(alone[i] if i < len(alone) else None, others[i] if i < len(others) else None) for i in range(longer)]
    return both + rest, len(both)


def _title(source: _Source, samples: Sequence[Sample]) -> str:
    mean = f", mean reward {sum(s.reward for s in samples) / len(samples):.3f}" if samples else ""
    return f"{source.title}: {_steps(samples)}, {len(samples)} answers{mean}"


def _steps(samples: Sequence[Sample]) -> str:
    steps = sorted({sample.step for sample in samples})
    return "no step" if not steps else f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"


def _cell(sample: Sample, arguments: argparse.Namespace) -> Group:
    chars = _FULL if arguments.full else _SHORT // 2
    return Group(
        Text(f"step {sample.step}{_of(sample)}: {headline(sample)}", style=_style(sample)),
        Text(printable(shortened(sample.prompt, chars)), style="dim"),
        _marked(shortened(sample.answer, chars), arguments),
    )


if __name__ == "__main__":
    sys.exit(main())
