"""Account for every prompt of a run: what was drawn, what became of it, and whether what was trained is a fair sample.

    python -m tools.experience.ledger RUN                         # log folder of a job, {fileroot}/logs/...
    python -m tools.experience.ledger --store sqlite --path experience.db
    python -m tools.experience.ledger RUN --picture bias.svg      # length, reward and difficulty of what was trained

drawn = trained + leased + ready + in flight + dropped (by reason, late ones too) + skipped. Steps that replay an
episode are counted beside it. The exit code is 1 where the balance does not add up.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from core.runs.record import CONFIG, settings_of
from rollout.experience import Experience, StoreError, Tags
from rollout.experience import open_store as open_by_name
from rollout.experience.episode import length_bias
from rollout.experience.selection import no_spread
from rollout.experience.serial import SchemaError
from rollout.experience.stores.files import FileExperience
from rollout.plugins import PluginError
from tools.arguments import BadRequest, parser_of, refused, run_with

_FATES = {
    "trained": "trained", "leased": "leased by the trainer", "ready": "ready", "open": "in flight",
    "skipped": "skipped: the workflow kept failing", "late": "dropped: late",
}  # fmt: skip
_EXISTS = {"sqlite": Path.is_file, "file": Path.is_dir}
_REASONS = {"all_right": "dropped: every answer right", "all_wrong": "dropped: every answer wrong"}


def main(argv: Sequence[str] | None = None) -> int:
    """Print the balance; return the exit code."""
    parser = parser_of("tools.experience.ledger", __doc__)
    add_store(parser)
    parser.add_argument("--picture", type=Path, metavar="FILE.svg", help="draw the distributions into this file")
    arguments = parser.parse_args(argv)
    try:
        store = open_store(arguments)
        if isinstance(store, FileExperience):
            raise BadRequest("a store of files has finished episodes alone, not what was drawn; see experience stats")
        drawn = store.status().num_opened
        episodes = store.tags()[:drawn]  # a job may draw more meanwhile
        if arguments.picture is not None:
            finished, trained = _finished(episodes)
            draw(arguments.picture, _panels(finished, trained))
    except (BadRequest, PluginError, StoreError, OSError) as error:
        return refused(error)
    return report(episodes, drawn=drawn, console=Console())


def add_store(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that name a store."""
    parser.add_argument("run", type=Path, nargs="?", metavar="RUN", help="log folder of a job")
    parser.add_argument("--store", default="sqlite", help="experience.store of the run, without RUN")
    parser.add_argument("--path", help="experience.path of the run, without RUN")


def open_store(arguments: argparse.Namespace, *, new: bool = False) -> Experience:
    """Open the store that the arguments name. `new`: it may not exist yet. Raises BadRequest and PluginError."""
    store, path = arguments.store, arguments.path
    if arguments.run is not None:
        settings = settings_of(run_with(arguments.run, CONFIG, without="a run writes it at its start"))
        store, path = settings.get("experience.store", "memory"), settings.get("experience.path", "")
    if store == "memory":
        raise BadRequest("this run keeps its episodes in memory; write experience.store=sqlite to look into them")
    if not path:
        raise BadRequest("name a run, or the store with --path")
    if not new and store in _EXISTS and not _EXISTS[store](Path(path)):
        raise BadRequest(f"{path}: there is no such store")
    try:
        return open_by_name(store, path)
    except SchemaError as error:
        raise BadRequest(str(error)) from None


def report(episodes: Sequence[Tags], *, drawn: int, console: Console) -> int:
    """Print the balance and the bias of `episodes`, of which `drawn` were begun; return the exit code."""
    counts = Counter(label(tags) for tags in episodes)
    table = Table(title=f"{drawn} prompts drawn", title_justify="left")
    table.add_column("fate")
    table.add_column("prompts", justify="right")
    order = {name: place for place, name in enumerate((*_FATES.values(), *_REASONS.values()))}
    for name in sorted(counts, key=lambda name: (order.get(name, len(order)), name)):
        table.add_row(name, str(counts[name]))
    console.print(table)
    if replays := sum(max(tags.uses - 1, 0) for tags in episodes):
        of_uses = Counter(tags.uses for tags in episodes if tags.uses)
        uses = ", ".join(f"{number} of {count}" for count, number in sorted(of_uses.items()))
        console.print(f"{replays} replayed uses. Episodes by uses: {uses}")
    finished, trained = _finished(episodes)
    if trained:
        console.print(_bias(finished, trained))
    late = [tags for tags in episodes if tags.fate == "late"]
    if trained and late:
        console.print(
            f"{len(late)} late prompts are not among the finished ones. With them, the mean length of what is trained "
            f"is {length_bias(trained, late):.3f} times that of all, or less."
        )
    missing = drawn - len(episodes)
    console.print("The balance adds up." if not missing else f"The balance does not add up: {missing} are missing.")
    return int(bool(missing))


def label(tags: Tags) -> str:
    """Return what became of an episode, in words."""
    if tags.fate in ("dropped", "late") and tags.reason:
        return f"dropped: {tags.reason}"
    return _REASONS[no_spread(tags) or "all_wrong"] if tags.fate == "dropped" else _FATES[tags.fate]


def _bias(finished: Sequence[Tags], trained: Sequence[Tags]) -> Table:
    table = Table(title="Trained against finished", title_justify="left")
    for name in ("of a trajectory", "mean finished", "mean trained", "Kolmogorov-Smirnov distance"):
        table.add_column(name, justify="left" if name.startswith("of") else "right")
    for name, (drawn, kept) in _distributions(finished, trained).items():
        table.add_row(name, f"{drawn.mean():.3f}", f"{kept.mean():.3f}", f"{distance(drawn, kept):.3f}")
    return table


def _finished(episodes: Sequence[Tags]) -> tuple[list[Tags], list[Tags]]:
    """Return the finished episodes, and those of them that were trained."""
    finished = [tags for tags in episodes if tags.rewards]
    return finished, [tags for tags in finished if tags.fate == "trained"]


def _distributions(finished: Sequence[Tags], trained: Sequence[Tags]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return what is compared, of all finished episodes and of the trained ones. Difficulty: 1 - the mean reward of a
    prompt over all its episodes."""
    of_prompt: dict[tuple[str, str], list[float]] = {}
    for tags in finished:
        of_prompt.setdefault((tags.task_set, tags.row), []).extend(tags.rewards)

    def values(name: str, of: Sequence[Tags]) -> np.ndarray:
        if name == "difficulty":
            return np.array([1.0 - np.mean(of_prompt[tags.task_set, tags.row]) for tags in of])
        return np.array([value for tags in of for value in getattr(tags, name)])

    return {name: (values(name, finished), values(name, trained)) for name in ("lengths", "rewards", "difficulty")}


def draw(path: Path, panels: Mapping[str, Mapping[str, tuple[np.ndarray, np.ndarray]]]) -> None:
    """Write an SVG picture of shares: title of a panel -> name of a curve -> (x [N], share [N]). Raises OSError."""
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.5 * len(panels), 3.6), layout="constrained")
    for axes, (title, curves) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        for name, (x, share) in curves.items():
            axes.plot(x, share, label=name)
        axes.set(title=title, ylim=(0, 1.05))
        axes.legend(frameon=False)
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        figure.savefig(path, format="svg")


def _panels(finished: Sequence[Tags], trained: Sequence[Tags]) -> dict[str, dict[str, tuple[np.ndarray, np.ndarray]]]:
    """Return the distribution functions for draw()."""
    panels = {}
    for name, (drawn, kept) in _distributions(finished, trained).items():
        title = f"{name}, KS {distance(drawn, kept):.3f}" if len(kept) else f"{name}, nothing is trained"
        both = {"finished": np.sort(drawn), "trained": np.sort(kept)}
        panels[title] = {of: (x, np.arange(1, len(x) + 1) / max(len(x), 1)) for of, x in both.items()}
    return panels


def distance(first: np.ndarray, second: np.ndarray) -> float:
    """Return the largest difference of the two empirical distribution functions, in [0, 1]."""
    at = np.concatenate((first, second))
    below = [np.searchsorted(np.sort(of), at, side="right") / len(of) for of in (first, second)]
    return float(np.abs(below[0] - below[1]).max())


if __name__ == "__main__":
    sys.exit(main())
