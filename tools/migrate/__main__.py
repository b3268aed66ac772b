"""Write a recipe of this system for one of another: Trinity-RFT, ROLL, verl, NeMo-RL, OpenRLHF, TRL, SkyRL or AReaL.

    slipstream migrate X.yaml                          # shows what becomes of every key, and the recipe
    slipstream migrate X.yaml -o Y.yaml
    slipstream migrate X.yaml trainer.n_gpus_per_node=4 -o Y.yaml    # with overrides of the other system

Keys are taken over, renamed, have no meaning here, or no equivalent; then the table has what to do. Check the result
with `slipstream dry-run ppo-math --config Y.yaml`.
"""

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import yaml
from rich.console import Console
from rich.table import Table

from config_schema.section import all_keys
from core.config.experiments import EXPERIMENTS
from core.config.migrate import Recipe, Row, System, counts, nested, read, stages_of, system_of, systems, translate
from core.config.runtime import APART
from tools.arguments import BadRequest, data_file, parser_of, refused

_MODELS = ("actor.path", "model.path")
_DROPPED = "without effect here: another key that it needs is not set"
_LONGEST = "raised to the tokens of the longest sequence"
_NAME = re.compile(r"[^A-Za-z0-9._+=-]+")
_LAYOUT = re.compile(r"([dptm])(\d+)")


def main(argv: Sequence[str] | None = None) -> int:
    """Translate one recipe; return the exit code."""
    parser = parser_of("tools.migrate", __doc__)
    parser.add_argument("recipe", type=data_file, metavar="X.yaml", help="recipe of another system")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="its overrides, + and ++ before them or not")
    parser.add_argument("-o", "--output", type=Path, metavar="Y.yaml", help="write the recipe to this file")
    arguments = parser.parse_args(argv)
    try:
        given = read(arguments.recipe, arguments.overrides)
    except ValueError as error:
        parser.error(str(error))
    try:
        name, experiment, rows, text = migrated(given, arguments.recipe.name)
    except BadRequest as error:
        return refused(f"{arguments.recipe}: {error}")
    console = Console(markup=False, emoji=False, highlight=False)
    if arguments.output is not None:
        try:
            arguments.output.write_text(text, encoding="utf-8")
        except OSError as error:
            parser.error(f"-o {arguments.output}: cannot be written: {error.strerror}")
    console.print(_table(name, rows))
    console.print(", ".join(f"{count} {fate}" for fate, count in counts(rows)))
    if arguments.output is None:
        sys.stdout.write(text)
    else:
        console.print(
            f"Written to {arguments.output}; check it: slipstream dry-run {experiment} --config {arguments.output}"
        )
    return 0


def migrated(given: Recipe, file: str) -> tuple[str, str, list[Row], str]:
    """Return the system that the values of a file are of, what our recipe is started with, what becomes of each key,
    and the text of our recipe. Raises BadRequest where they are of no known system."""
    system = system_of(given)
    if system is None:
        names = ", ".join(one.name for one in systems())
        raise BadRequest(f"its keys are those of none of {names}")
    experiment, tree, rows = translated(system, given, source=Path(file).stem)
    return system.name, experiment, rows, f"# From {file} of {system.name}\n" + yaml.safe_dump(tree, sort_keys=False)


def _table(name: str, rows: Sequence[Row]) -> Table:
    table = Table(title=f"A recipe of {name}", title_justify="left")
    for column in ("key", "value", "", "here, or what to do"):
        table.add_column(column)
    for row in sorted(rows, key=lambda row: row.fate):
        table.add_row(row.key, str(row.value)[:40], row.fate, row.note)
    return table


def translated(system: System, given: Recipe, *, source: str) -> tuple[str, dict[str, object], list[Row]]:
    """Return what the recipe is started with, the recipe, and what became of each key. `source`: name for an experiment
    without one."""
    stages = stages_of(system, given)
    if not stages:
        values, rows = _run(system, given, source)
        return system.experiment_of(given), nested(values), rows
    known = {key: value for key, value in given.items() if key != system.stages}
    _, rows = translate(system, known)
    tree: dict[str, object] = {}
    listed = []
    for number, (own, recipe) in enumerate(stages, start=1):
        values, of_stage = _run(system, recipe, source)
        kind = system.experiment_of(recipe)
        if kind == "ppo-math":
            kind = str(values.pop("algorithm.name", "ppo"))
        if number > 1 and not any(row.target in _MODELS and row.key in own for row in of_stage):
            values = {key: value for key, value in values.items() if key not in _MODELS}
        tree |= {key: values.pop(key) for key in ("experiment_name", "trial_name") if key in values}
        listed.append({kind: nested(values)})
        rows += [replace(row, key=f"stages[{number}].{row.key}") for row in of_stage if row.key in own]
    return "train", {**tree, "stages": listed}, rows


def _run(system: System, given: Recipe, source: str) -> tuple[dict[str, object], list[Row]]:
    """Return the values of one run by dotted key, and what became of each key of theirs."""
    ours, rows = translate(system, given)
    experiment = system.experiment_of(given)
    values = completed(ours, source=source, given=given, experiment=experiment)
    return values, [_final(row, ours, values, experiment) for row in rows]


def _final(row: Row, ours: Mapping[str, object], values: Mapping[str, object], experiment: str) -> Row:
    """Return what became of a key in the recipe as it is written."""
    target = row.target if row.target in values else _of_experiment(row.target, experiment)
    if row.target and target not in values:
        return replace(row, fate="no meaning here", note=_DROPPED)
    if row.target == "experience.store" and values[target] != ours[row.target]:
        return replace(row, note=f"{target}={values[target]}, which several jobs share")
    if row.target and row.target.endswith("max_tokens_per_mb") and values[target] != ours[row.target]:
        return replace(row, note=f"{target}={values[target]}, {_LONGEST}")
    return row


def _of_experiment(key: str, experiment: str) -> str:
    """Return the name that a key of ppo-math has in an experiment."""
    section, _, rest = key.partition(".")
    return key if experiment == "ppo-math" or section != "actor" else f"model.{rest}"


def completed(
    ours: Mapping[str, object], *, source: str, given: Mapping[str, object], experiment: str = "ppo-math"
) -> dict[str, object]:
    """Return what passes a dry run, but for paths that this host lacks: translated values without those that have no
    effect here, and with what a run needs. `source`: name for an experiment without one."""
    values: dict[str, object] = {"ppo.kl_ctl": 0.0, "experiment_name": source, **ours}
    for key in ("experiment_name", "trial_name"):
        if key in values:
            values[key] = _NAME.sub("-", str(values[key])).strip("-.") or source
    for key in [key for key in values if "_freq_" in key or key in ("recover_keep", "exp_ctrl.total_train_steps")]:
        value = values[key]
        if not isinstance(value, int | float) or value <= 0:
            del values[key]  # -1: never
    if "evaluation.path" not in values:
        values = {key: v for key, v in values.items() if "eval_" not in key and not key.startswith("evaluation.")}
    if values.get("mode", "both") == "both":
        values = {key: v for key, v in values.items() if not key.startswith("synchronizer.")}
    elif values["mode"] in APART and values.get("experience.store", "memory") == "memory":
        values["experience.store"] = "sqlite"  # their queue is shared
    if values.get("experience.store", "memory") == "memory":
        values.pop("experience.path", None)
    else:
        values.setdefault("experience.path", "experience")
    if values.get("algorithm.name", "ppo") == "ppo" and "critic.path" not in values:
        values["critic.init_critic_from_actor"] = True
    longest = _count(values, "dataset.max_prompt_len") + _count(values, "ppo.gen.max_new_tokens")
    for key in values:
        if key.endswith("mb_spec.max_tokens_per_mb"):
            values[key] = max(_count(values, key), longest)
    values["allocation_mode"] = _allocation(values, given)
    if experiment != "ppo-math":
        known = set(all_keys(EXPERIMENTS[experiment]))
        values = {_of_experiment(key, experiment): value for key, value in values.items()}
        values = {key: value for key, value in values.items() if key in known}
        values["allocation_mode"] = f"d{_gpus(values, default=1)}m1p1"
        values.pop("mode", None)
    return values


def _count(values: Mapping[str, object], key: str) -> int:
    value = values.get(key)
    return value if isinstance(value, int) else 0


def _allocation(values: Mapping[str, object], given: Mapping[str, object]) -> str:
    """Return half of the GPUs for generators and half for the trainer, or the layout that was given."""
    if isinstance(written := given.get("allocation_mode"), str):
        parts = [dict(_LAYOUT.findall(part.rpartition(".")[2])) for part in written.split("+")]
        sides = [f"d{p.get('d', 1)}m{p.get('t', p.get('m', 1))}p{p.get('p', 1)}" for p in parts]
        return f"sglang.{sides[0]}" + "".join(f"+{side}" for side in sides[1:2])
    gpus = _gpus(values, default=2)
    return f"sglang.d{gpus // 2}m1p1+d{gpus - gpus // 2}m1p1" if gpus > 1 else "sglang.d1m1p1"


def _gpus(values: Mapping[str, object], *, default: int) -> int:
    """Return the GPUs of a run; `default`: of a node, where the recipe has no number."""
    nodes, each = values.get("n_nodes", 1), values.get("n_gpus_per_node", default)
    return int(float(str(nodes))) * int(float(str(each)))


if __name__ == "__main__":
    sys.exit(main())
