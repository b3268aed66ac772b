"""Write a recipe of this system for one of another: Trinity-RFT, ROLL, verl, NeMo-RL, OpenRLHF, TRL, SkyRL or AReaL.

    slipstream migrate X.yaml                          # shows what becomes of every key, and the recipe
    slipstream migrate X.yaml -o Y.yaml
    slipstream migrate X.yaml trainer.n_gpus_per_node=4 -o Y.yaml    # with overrides of the other system

Keys are taken over, renamed, have no meaning here, or no equivalent; then the table has what to do. Check the result
with `slipstream dry-run ppo-math --config Y.yaml`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import yaml
from rich.console import Console
from rich.table import Table

from core.config.migrate.recipe import read, system_of
from core.config.migrate.table import Row, counts, systems, translate
from tools.arguments import data_file, program
from tools.migrate.recipe import completed, nested

_DROPPED = "without effect here: another key that it needs is not set"


def main(argv: Sequence[str] | None = None) -> int:
    """Translate one recipe; return the exit code."""
    parser = argparse.ArgumentParser(
        prog=program("tools.migrate"), description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", type=data_file, metavar="X.yaml", help="recipe of another system")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="its overrides, + and ++ before them or not")
    parser.add_argument("-o", "--output", type=Path, metavar="Y.yaml", help="write the recipe to this file")
    arguments = parser.parse_args(argv)
    try:
        given = read(arguments.recipe, arguments.overrides)
    except ValueError as error:
        parser.error(str(error))
    system = system_of(given)
    if system is None:
        names = ", ".join(one.name for one in systems())
        sys.stderr.write(f"error: {arguments.recipe}: its keys are those of none of {names}\n")
        return 2
    ours, rows = translate(system, given)
    recipe = completed(ours, source=arguments.recipe.stem, given=given)
    text = f"# From {arguments.recipe.name} of {system.name}\n" + yaml.safe_dump(nested(recipe), sort_keys=False)
    console = Console(markup=False, emoji=False, highlight=False)
    rows = [row if row.target in ("", *recipe) else replace(row, fate="no meaning here", note=_DROPPED) for row in rows]
    if arguments.output is not None:
        try:
            arguments.output.write_text(text, encoding="utf-8")
        except OSError as error:
            parser.error(f"-o {arguments.output}: cannot be written: {error.strerror}")
    console.print(_table(system.name, rows))
    console.print(", ".join(f"{count} {fate}" for fate, count in counts(rows)))
    if arguments.output is None:
        sys.stdout.write(text)
    else:
        console.print(
            f"Written to {arguments.output}; check it: slipstream dry-run ppo-math --config {arguments.output}"
        )
    return 0


def _table(name: str, rows: Sequence[Row]) -> Table:
    table = Table(title=f"A recipe of {name}", title_justify="left")
    for column in ("key", "value", "", "here, or what to do"):
        table.add_column(column)
    for row in sorted(rows, key=lambda row: row.fate):
        table.add_row(row.key, str(row.value)[:40], row.fate, row.note)
    return table


if __name__ == "__main__":
    sys.exit(main())
