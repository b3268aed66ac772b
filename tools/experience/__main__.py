"""Look into a store of episodes, copy it as text, and drop what is no longer needed.

    python -m tools.experience stats RUN                     # log folder of a job, {fileroot}/logs/...
    python -m tools.experience stats --path experience.db
    python -m tools.experience export RUN episodes.jsonl     # tags, and trajectories where they are kept
    python -m tools.experience to-sft RUN answers.jsonl --tokenizer MODEL --min-reward 1    # rejection sampling
    python -m tools.experience import --path new.db episodes.jsonl
    python -m tools.experience prune RUN --keep 10           # tokens of trained steps but the last ten

A row of `export` is {"tags": {...}, "trajectories": [...]}. `import` puts the episodes with trajectories into a
store, as ready ones of their versions. A job may run meanwhile.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from rollout.data.tokenizer import load_tokenizer
from rollout.experience import Episode, EveryEpisode, Experience, StoreError, Tags
from rollout.experience.stores.files import from_row, to_row
from rollout.plugins import PluginError
from tools.arguments import BadRequest, data_file, integer, parser_of, refused
from tools.experience.ledger import add_store, open_store


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code."""
    arguments = _parser().parse_args(argv)
    try:
        store = open_store(arguments, new=arguments.command == "import")
        arguments.call(store, arguments)
    except (BadRequest, PluginError, StoreError, OSError) as error:
        return refused(error)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("tools.experience", __doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    calls = {"stats": stats, "export": export, "to-sft": to_sft, "import": import_rows, "prune": prune}
    for name, call in calls.items():
        command = commands.add_parser(name, help=(call.__doc__ or "").partition(".")[0])
        command.set_defaults(call=call)
        add_store(command)
        if name in ("export", "to-sft", "import"):
            command.add_argument("file", type=data_file if name == "import" else Path, help="jsonl file")
        if name == "to-sft":
            command.add_argument("--tokenizer", type=Path, required=True, metavar="MODEL", help="folder of the model")
            command.add_argument("--min-reward", type=float, default=1.0, help="least reward of an answer (default: 1)")
            command.add_argument(
                "--best", type=integer(least=1), default=1, metavar="N", help="most answers of a prompt (default: 1)"
            )
        if name == "prune":
            command.add_argument(
                "--keep",
                type=integer(least=0),
                default=0,
                help="number of the last steps whose tokens stay (default: none)",
            )
    return parser


def stats(store: Experience, arguments: argparse.Namespace) -> None:
    """Show the numbers of episodes by fate and by task."""
    status, episodes = store.status(), store.tags()
    counts = Counter((tags.task, tags.fate) for tags in episodes)
    table = Table(title=f"{status.num_opened} episodes; next step {status.next_step}", title_justify="left")
    for column in ("task", "fate", "episodes", "mean reward", "mean tokens"):
        table.add_column(column)
    for (task, fate), count in sorted(counts.items()):
        own = [tags for tags in episodes if (tags.task, tags.fate) == (task, fate)]
        means = [_mean([value for tags in own for value in getattr(tags, of)]) for of in ("rewards", "lengths")]
        table.add_row(task, fate, str(count), *means)
    Console().print(table)


def _mean(values: Sequence[float]) -> str:
    return f"{sum(values) / len(values):.4g}" if values else ""


def export(store: Experience, arguments: argparse.Namespace) -> None:
    """Write every episode as a row of a jsonl file. Raises OSError."""
    with arguments.file.open("w", encoding="utf-8") as file:
        for tags in store.tags():
            episode = _episode(store, tags)
            row = to_row(episode.tags, episode.trajectories)
            file.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")


def _episode(store: Experience, tags: Tags) -> Episode:
    """Return an episode with its tokens and the tags of now, as a job may have finished it since `tags`; without tokens
    where there are none."""
    try:
        (episode,) = store.values([tags.id])
    except KeyError:  # it is sampled, or its tokens are dropped
        return Episode(tags=tags, trajectories=())
    return episode


def to_sft(store: Experience, arguments: argparse.Namespace) -> None:
    """Write the best answers as rows of prompt and answer, for fine-tuning. Raises OSError."""
    tokenizer = load_tokenizer(arguments.tokenizer)
    count = left_out = 0
    with arguments.file.open("w", encoding="utf-8") as file:
        for tags in store.tags():
            good = [t for t in _episode(store, tags).trajectories if t.reward >= arguments.min_reward]
            best = sorted(good, key=lambda t: -t.reward)[: arguments.best]
            for trajectory in best:
                sampled = np.flatnonzero(trajectory.loss_mask)
                if not len(sampled) or not trajectory.loss_mask[sampled[0] :].all():
                    left_out += 1  # something stands between two answers
                    continue
                prompt, answer = trajectory.token_ids[: sampled[0]], trajectory.token_ids[sampled[0] :]
                text = tokenizer.decode(answer, skip_special_tokens=True)
                row = {
                    "id": tags.id,
                    "prompt": tokenizer.decode(prompt, skip_special_tokens=False),
                    "answer": text,
                    "reward": float(trajectory.reward),
                }
                if text.strip():
                    file.write(json.dumps(row, ensure_ascii=False) + "\n")
                    count += 1
    print(f"{count} answers written, {left_out} of several turns left out")


def import_rows(store: Experience, arguments: argparse.Namespace) -> None:
    """Put the episodes of a jsonl file into a store. Raises BadRequest for a row that export does not write."""
    count = without_tokens = known = 0
    for number, line in enumerate(arguments.file.read_text(encoding="utf-8").splitlines(), 1):
        try:
            tags, trajectories = from_row(json.loads(line))
        except (ValueError, TypeError, LookupError) as error:
            raise BadRequest(f"{arguments.file}, line {number}: not a row of export ({error!r})") from None
        if not trajectories:
            without_tokens += 1
        elif store.open(replace(tags, fate="open", uses=0), EveryEpisode()) == "open":
            store.put(Episode(tags=tags, trajectories=trajectories))
            count += 1
        else:
            known += 1
    print(f"{count} episodes imported")
    if without_tokens:
        print(
            f"{without_tokens} left out, as the export has no tokens of them: not finished, dropped, or trained before "
            "the last experience.keep_steps steps"
        )
    if known:
        print(f"{known} left out, as the store has episodes of the same ids")


def prune(store: Experience, arguments: argparse.Namespace) -> None:
    """Drop the tokens of trained episodes, but those of the last steps."""
    print(f"{store.prune(arguments.keep)} values dropped")


if __name__ == "__main__":
    sys.exit(main())
