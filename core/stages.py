"""Several runs in one file, each from the weights of the one before: `stages: [{sft: {...}}, {grpo: {...}}]`.

A stage is a run like any other: the keys of its section over the other keys of the file, as trial `TRIAL.1-sft`,
`TRIAL.2-grpo` and so on. Invariant: what a stage begins from and where it writes follow from the file and the folders
alone, so the same command continues where the last one ended.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from config_schema import nearest_names
from core.config.experiments import EXPERIMENTS, PPOMATHConfig
from core.config.load import apply_overrides, default_trial, tree_of
from core.config.parsing.problems import ConfigError, Problem
from core.config.parsing.yaml_tree import Items, Node, Scalar, Table, find, merge
from core.config.parsing.yaml_tree import replace as put
from core.config.presets import PRESETS, plain_name
from core.runs.paths import RunPaths
from core.runs.record import newest_model

_MODEL = ("actor.path", "model.path")
"""Keys of the model to train, which experiments take from each other."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One run of several."""

    name: str
    experiment: str
    """A key of EXPERIMENTS."""
    tree: Table
    """Its configuration, with the overrides."""
    follows: bool
    """It begins from the model of the stage before. Until there is one, its tree names what that stage begins from,
    which has the same architecture and tokenizer."""

    def begins_from(self, model: Path) -> None:
        """Begin from the model that the stage before has saved."""
        _name_model(self.tree, Scalar(str(model), self.tree.where, quoted=True))

    def named(self, problem: Problem) -> Problem:
        """Return a problem of this stage; it names the stage where its place in the file does not."""
        has_place = re.search(r":\d+$|^override ", problem.where)
        return problem if has_place else replace(problem, key=f"stage {self.name}: {problem.key}")


def stages_of(file: str | Path, overrides: Sequence[str]) -> list[Stage]:
    """Return the stages of a file, to each of which the overrides apply; none without the key `stages`. Raises
    ConfigError with every problem of the list itself."""
    shared = tree_of(file)
    listed = shared.children.pop("stages", None)
    if listed is None:
        return []
    items = listed.items if isinstance(listed, Items) else ()
    if not items:
        message = "must be a list such as [{sft: {...}}, {grpo: {...}}]"
        raise ConfigError([Problem(key="stages", message=message, where=listed.where)])
    if wrong := [problem for item in items if (problem := _wrong(item))]:
        raise ConfigError(wrong)
    shared.where = str(file)
    shared.children.setdefault("trial_name", default_trial())
    stages: list[Stage] = []
    for item in items:
        assert isinstance(item, Table), "anything else is wrong"
        ((kind, section),) = item.children.items()
        stages.append(_stage(kind, section, shared, overrides, stages))
    return stages


def _wrong(item: Node) -> Problem | None:
    if not isinstance(item, Table) or len(item.children) != 1:
        message = "a stage is one key with its section, such as {sft: {dataset: {...}}}"
        return Problem(key="stages", message=message, where=item.where)
    ((kind, section),) = item.children.items()
    known = [*EXPERIMENTS, *PRESETS]
    if kind not in EXPERIMENTS and plain_name(kind) not in PRESETS:
        near = nearest_names(kind, known)
        way_out = f"did you mean {near[0]!r}?" if near else f"one of {', '.join(known)}"
        return Problem(key=f"stages.{kind}", message=f"unknown stage; {way_out}", where=section.where)
    if not isinstance(section, Table) and not (isinstance(section, Scalar) and section.is_null):
        return Problem(key=f"stages.{kind}", message="must be a section", where=section.where)
    return None


def _stage(kind: str, own: Node, shared: Table, overrides: Sequence[str], before: Sequence[Stage]) -> Stage:
    """Return the stage of one section. Raises ConfigError for overrides."""
    tree = tree_of(shared)
    if isinstance(own, Table):
        merge(tree, own)
    if kind not in EXPERIMENTS:
        put(tree, "algorithm.name", Scalar(kind, own.where))
    if problems := apply_overrides(tree, overrides):
        raise ConfigError(problems)
    follows = bool(before) and _model_of(own) is None
    if follows:
        _name_model(tree, _model_of(before[-1].tree))
        mode = tree.children.get("recover_mode")
        if isinstance(mode, Scalar) and mode.text == "resume":  # a stage that has not begun has nothing to resume
            tree.children["recover_mode"] = Scalar("auto", mode.where)
    name = f"{len(before) + 1}-{kind if kind in EXPERIMENTS else plain_name(kind)}"
    trial = tree.children["trial_name"]
    if isinstance(trial, Scalar):
        tree.children["trial_name"] = Scalar(f"{trial.text}.{name}", trial.where, quoted=True)
    experiment = kind if kind in EXPERIMENTS else PPOMATHConfig.NAME
    return Stage(name=name, experiment=experiment, tree=tree, follows=follows)


def _model_of(tree: Node) -> Node | None:
    return next((node for key in _MODEL if (node := find(tree, key)) is not None), None)


def _name_model(tree: Table, model: Node | None) -> None:
    """Put the model of a stage into its tree, under the name that the tree has for its section."""
    if model is not None:
        put(tree, _MODEL["model" in tree.children], model)


def result_lines(stages: Sequence[tuple[Stage, RunPaths]]) -> Iterator[str]:
    """Yield what each stage has reached: reward, or loss, of its first and last step, and its model."""
    from core.monitoring.metrics import read_rows

    for stage, paths in stages:
        rows = []
        with suppress(OSError, ValueError):
            rows = read_rows(paths.logs / "metrics.jsonl")
        reached = ""
        for name, title in (("reward/mean", "reward"), ("loss", "loss")):
            values = [row[name] for row in rows if name in row]
            if values and not reached:
                reached = f"{title} {values[0]:.3f} → {values[-1]:.3f}"
        yield f"{stage.name:<10}  {reached or 'no step':<24}  slipstream watch {paths.logs}"
    yield f"model       {newest_model(stages[-1][1])}"
