"""Configurations: every key with its documentation, the problems of a text, its allocation, memory and seconds.

A change of a key edits the text, of which comments and order stay. Invariant: a text is checked by the rules that
`slipstream dry-run` applies before it looks at this host; nothing is downloaded and no code of users runs.
"""

import io
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import yaml
from pydantic.fields import FieldInfo
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap
from ruamel.yaml.error import YAMLError

from allocation import Allocation, AllocationError, parse
from config_schema.needs import as_yaml
from config_schema.section import Section, default_of, fields_by_key, named_section, needs_of, sub_section
from core.checks.rules import check_rules, config_warnings
from core.config.experiments import EXPERIMENTS, ExperimentConfig
from core.config.load import LoadedConfig, load
from core.config.migrate import leaves, read, system_of
from core.config.parsing.problems import ConfigError, Problem
from core.config.presets import PRESETS
from core.config.reference import choices_of, python_type
from core.placement import resolve_allocation
from core.planning.memory import plan_memory
from core.planning.rates import usual_calibration
from core.planning.scene import GPUS, PlanError, find_gpu, scene_of
from core.planning.search import usual_lengths
from core.planning.simulation import forecast
from rollout.plugins import ROOT
from tools.arguments import BadRequest
from tools.migrate.__main__ import migrated
from tools.plan import as_json
from tools.studio.folders import NotFound

_RECIPES = ROOT / "examples" / "configs"
_NAME = re.compile(r"[\w][\w.-]*\.ya?ml")
_BOUNDS = ("ge", "gt", "le", "lt")
_MOST_CHARS = 1 << 20
_DRY_SECONDS = 120
_TOP = "general"


def schema(query: Mapping[str, str]) -> dict[str, object]:
    """Return every key of an experiment in groups, the presets of algorithms, and the GPUs of the planner. Raises
    NotFound."""
    name = query.get("experiment", "ppo-math")
    if name not in EXPERIMENTS:
        raise NotFound(f"there is no experiment {name}; there are {', '.join(EXPERIMENTS)}")
    groups: dict[str, tuple[str, list[dict[str, object]]]] = {}
    for group, about, key in _keys(EXPERIMENTS[name], None, ""):
        groups.setdefault(group, (about, []))[1].append(key)
    presets = {name: {"about": one.about, "source": one.source, "values": one.values} for name, one in PRESETS.items()}
    return {
        "experiment": name,
        "groups": [{"name": group, "about": about, "keys": keys} for group, (about, keys) in groups.items()],
        "presets": presets if "algorithm" in EXPERIMENTS[name].model_fields else {},
        "gpus": list(GPUS),
    }


def _keys(
    model: type[Section], defaults: object, prefix: str, about: str = ""
) -> Iterator[tuple[str, str, dict[str, object]]]:
    """Yield (group, what the group is, key) of every plain value."""
    for name, (attribute, info) in fields_by_key(model).items():
        below, default = sub_section(info), default_of(defaults, attribute, info)
        if below is not None:
            yield from _keys(below, default, f"{prefix}{name}.", info.description or "")
        else:
            yield prefix.rstrip(".") or _TOP, about, _key(prefix + name, info, default)


def _key(path: str, info: FieldInfo, default: object) -> dict[str, object]:
    needs, choices = needs_of(info), choices_of(info.annotation)
    bounds = {name: getattr(m, name) for m in info.metadata for name in _BOUNDS if getattr(m, name, None) is not None}
    return {
        "key": path,
        "help": info.description or "",
        "type": "sections by name" if named_section(info) else python_type(info.annotation),
        "choices": choices.split(", ") if choices else [],
        "bounds": bounds,
        "default": None if info.is_required() else as_yaml(default),
        "required": info.is_required(),
        "needs": needs.text if needs else "",
    }


def values_of(text: str) -> dict[str, str]:
    """Return the values of a text by dotted key, as YAML spells them; empty where it is no YAML."""
    try:
        tree = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError):
        return {}
    return {key: _shown(value) for key, value in leaves(tree)} if isinstance(tree, dict) else {}


def _shown(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, default=str) if isinstance(value, list | dict) else as_yaml(value)


def check(body: Mapping[str, object]) -> dict[str, object]:
    """Return the problems of a text with key and line, its warnings, its values, what it places where, and the other
    system that it is a recipe of. Memory and seconds per step are those of the GPU `gpu`. Raises NotFound and
    ValueError."""
    experiment, text = _experiment(body), _text(body)
    values = values_of(text)
    answer: dict[str, object] = {
        "problems": [],
        "warnings": [],
        "values": values,
        "allocation": None,
        "plan": None,
        "system": None,
    }
    try:
        loaded = _loaded(experiment, text)
    except ConfigError as error:
        answer["problems"] = [_problem(problem) for problem in error.problems]
        answer["allocation"] = _drawn_alone(experiment, values)
        with _as_file(text) as file:
            system = system_of(read(file))
        answer["system"] = system.name if system else None
        return answer
    answer["warnings"] = [*config_warnings(loaded.config), *(f"{p.key}: {p.message}" for p in loaded.ignored)]
    try:
        answer["allocation"] = _drawn(resolve_allocation(loaded.config), loaded.config)
        answer["plan"] = _plan(loaded.config, str(body.get("gpu") or "H100"))
    except (AllocationError, PlanError, OSError) as error:
        answer["plan"] = {"error": str(error)}
    return answer


def migrate(body: Mapping[str, object]) -> dict[str, object]:
    """Return the recipe of this system for one of another, and what becomes of each key. Raises ValueError."""
    with _as_file(_text(body)) as file:
        given = read(file)
    try:
        name, experiment, rows, text = migrated(given, str(body.get("name") or "recipe.yaml"))
    except BadRequest as error:
        raise ValueError(f"the text is no recipe that can be migrated: {error}") from None
    if experiment not in EXPERIMENTS:
        raise ValueError("the recipe has several stages; translate it with `slipstream migrate`")
    table = [{"key": row.key, "value": str(row.value), "fate": row.fate, "note": row.note} for row in rows]
    return {"system": name, "text": text, "experiment": experiment, "rows": sorted(table, key=lambda row: row["fate"])}


def _experiment(body: Mapping[str, object]) -> str:
    if body.get("experiment") not in EXPERIMENTS:
        raise NotFound(f"experiment: one of {', '.join(EXPERIMENTS)}")
    return str(body["experiment"])


def _text(body: Mapping[str, object], name: str = "text") -> str:
    text = str(body[name])
    if len(text) > _MOST_CHARS:
        raise ValueError(f"{name} has {len(text):,} characters, at most {_MOST_CHARS:,}")
    return text


@contextmanager
def _as_file(text: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.yaml"
        file.write_text(text, encoding="utf-8")
        yield file


def _loaded(experiment: str, text: str) -> LoadedConfig:
    with _as_file(text) as file:
        return load(experiment, file, (), check_rules)


def _problem(problem: Problem) -> dict[str, object]:
    line = problem.where.rpartition(":")[2]
    return {"key": problem.key, "message": problem.message, "line": int(line) if line.isdigit() else None}


def _drawn_alone(experiment: str, values: Mapping[str, str]) -> dict[str, object] | None:
    """Return the allocation of a text that has problems elsewhere."""
    try:
        found = parse(
            values.get("allocation_mode", ""), n_nodes=int(values.get("n_nodes", 1)),
            n_gpus_per_node=int(values.get("n_gpus_per_node", 8)),
            trainer_only=EXPERIMENTS[experiment].TRAINER_ONLY,
        )  # fmt: skip
    except (AllocationError, ValueError):
        return None
    return _drawn(found, None)


def _drawn(allocation: Allocation, config: ExperimentConfig | None) -> dict[str, object]:
    """Return the boxes: for each node and slot the roles with their rank."""
    roles = [one for name, one in allocation.roles.items() if config is None or name in config.placed_roles]
    slots: dict[str, list[str]] = {}
    for role in roles:
        for rank, slot in enumerate(role.slots):
            slots.setdefault(f"{slot.node}/{slot.gpu}", []).append(f"{role.role} {rank}")
    return {
        "text": str(allocation),
        "nodes": allocation.n_nodes,
        "per_node": allocation.n_gpus_per_node,
        "roles": [
            {"role": r.role, "layout": f"{r.backend}.{r.layout}", "device": r.device if config else ""} for r in roles
        ],
        "slots": slots,
    }


def _plan(config: ExperimentConfig, gpu: str) -> dict[str, object]:
    scene = scene_of(config, find_gpu(gpu))
    answers = usual_lengths(scene)
    calibration = usual_calibration(scene)
    time = None if calibration is None else forecast(scene, calibration, answers)
    plan = as_json(scene, plan_memory(scene), time)
    return {**plan, "mean_tokens": answers.mean, "on_gpu": scene.on_gpu}


def set_key(body: Mapping[str, object]) -> dict[str, object]:
    """Return the text with one key set, or removed where the value is null. Raises ValueError."""
    text, key, value = _text(body), str(body["key"]), body.get("value")
    round_trip = YAML()
    round_trip.preserve_quotes = True
    round_trip.width = 4096
    round_trip.indent(mapping=2, sequence=4, offset=2)
    try:
        tree = round_trip.load(text)
        given = None if value is None else YAML(typ="rt").load(str(value)) if str(value).strip() else ""
    except YAMLError as error:
        raise ValueError(f"{key}: not YAML: {str(error).splitlines()[0]}") from None
    if tree is None:
        tree = CommentedMap()
    if not isinstance(tree, CommentedMap):
        raise ValueError("the text must be a mapping of keys to values")
    *above, last = key.split(".")
    section = tree
    for name in above:
        if value is None and name not in section:
            return {"text": text}
        if not isinstance(section.get(name), CommentedMap):
            section[name] = CommentedMap()
        section = section[name]
    if value is None:
        section.pop(last, None)
        _drop_empty(tree, above)
    else:
        section[last] = given
    out = io.StringIO()
    if tree:
        round_trip.dump(tree, out)
    return {"text": out.getvalue()}


def _drop_empty(tree: CommentedMap, above: list[str]) -> None:
    for depth in range(len(above), 0, -1):
        parent = tree
        for name in above[: depth - 1]:
            parent = parent[name]
        if len(parent[above[depth - 1]]) == 0:
            del parent[above[depth - 1]]


def compare(body: Mapping[str, object]) -> dict[str, object]:
    """Return the keys in which two texts differ."""
    first, second = (values_of(_text(body, name)) for name in ("first", "second"))
    keys = [key for key in dict.fromkeys([*first, *second]) if first.get(key) != second.get(key)]
    return {"rows": [{"key": key, "first": first.get(key), "second": second.get(key)} for key in keys]}


class Files:
    """The configuration files of one folder, and the recipes of the installation."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()

    def sources(self, query: Mapping[str, str]) -> dict[str, object]:
        """Return the names of what can be opened."""
        return {
            "folder": str(self._folder),
            "files": sorted(self._found(self._folder)),
            "recipes": sorted(self._recipes()),
        }

    def _found(self, folder: Path) -> dict[str, Path]:
        return {
            p.name: p for p in folder.glob("*.y*ml") if p.is_file() and not p.is_symlink() and _NAME.fullmatch(p.name)
        }

    def _recipes(self) -> dict[str, Path]:
        return {path.relative_to(_RECIPES).as_posix(): path for path in _RECIPES.glob("**/*.yaml")}

    def text(self, query: Mapping[str, str]) -> dict[str, object]:
        """Return the text of a file or recipe, and its experiment as far as it shows. Raises NotFound."""
        of, name = query["of"], query["name"]
        path = (self._found(self._folder) if of == "file" else self._recipes()).get(name)
        if path is None:
            raise NotFound(f"there is no {of} {name}")
        text = path.read_text(encoding="utf-8", errors="replace")
        return {"text": text, "experiment": experiment_of(text), "name": path.name}

    def save(self, body: Mapping[str, object]) -> dict[str, object]:
        """Write a text as a new file of the folder, or over one where `replace` is true. Raises ValueError, OSError."""
        name, text = str(body["name"]), _text(body)
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name}: a file name ends in .yaml and has letters, digits and . _ - alone")
        path = self._folder / name
        kind = os.O_TRUNC if body.get("replace") else os.O_EXCL
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | kind, 0o600)
        except FileExistsError:
            raise ValueError(f"{path} is there already") from None
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        return {"path": str(path)}

    def dry_run(self, body: Mapping[str, object]) -> dict[str, object]:
        """Return what `--dry-run` prints of a text. Raises NotFound and ValueError."""
        experiment, text = _experiment(body), _text(body)
        with _as_file(text) as file:
            command = [sys.executable, "-m", "core.quickstart", experiment, "--config", str(file), "--dry-run"]
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_DRY_SECONDS, cwd=self._folder, check=False
            )
        return {"code": done.returncode, "output": (done.stdout + done.stderr).replace(str(file), "config.yaml")}

    def start(self, body: Mapping[str, object]) -> dict[str, object]:
        """Start a run of a saved file in a session of its own; it goes on when the studio ends. Raises NotFound."""
        experiment, name = _experiment(body), str(body["name"])
        path = self._found(self._folder).get(name)
        if path is None:
            raise NotFound(f"there is no file {name} in {self._folder}; save it first")
        command = [sys.executable, "-m", "core.quickstart", experiment, "--config", name]
        output = self._folder / f"{path.stem}.out"
        with open(output, "ab") as file:
            process = subprocess.Popen(
                command, cwd=self._folder, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                start_new_session=True,
            )  # fmt: skip
        return {"pid": process.pid, "output": str(output)}


def experiment_of(text: str) -> str:
    """Return the experiment that a text is of: the comment that runs write on their first line, or its sections."""
    first = re.match(r"# ([\w-]+): every key", text)
    if first and first[1] in EXPERIMENTS:
        return first[1]
    sections = {key.partition(".")[0] for key in values_of(text)}
    return "dpo" if "dpo" in sections else "sft" if "model" in sections and "actor" not in sections else "ppo-math"
