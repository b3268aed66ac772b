"""Recipes of Data-Juicer as processors of rows: the YAML files that its own command reads, without the command.

    process:
      - text_length_filter: {text_key: question, min_len: 20}
      - document_deduplicator: {text_key: question, lowercase: true}

Of a recipe, `process`, `text_keys` and `np` count (default: 1 process). What filters have measured, such as `text_len`,
is a column of the rows that are left.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

Rows = Iterable[dict[str, object]]

_OWN = "__dj__"
"""What its columns begin with."""
_STATS = "__dj__stats__"


def is_recipe(spec: str) -> bool:
    """Return whether an entry of `processors` is a file in place of a function."""
    return spec.endswith((".yaml", ".yml"))


@dataclass(frozen=True)
class Recipe:
    """A processor that runs the operators of a recipe."""

    path: Path
    text: str

    def __call__(self, rows: Rows) -> Iterator[dict[str, object]]:
        """Yield the rows that the operators leave. Raises ImportError without Data-Juicer, ValueError for another file
        and for a column that what operators measure would overwrite, and what operators raise."""
        given, process = [*rows], _operators(self.path, self.text)
        try:
            from data_juicer.core.data import NestedDataset
            from data_juicer.ops import load_ops
        except ImportError as error:
            raise ImportError(f"{error}; recipes of Data-Juicer need pip install 'slipstream[data-juicer]'") from error
        if not given:
            return
        columns = dict.fromkeys(name for row in given for name in row)
        made = NestedDataset.from_list([{name: row.get(name) for name in columns} for row in given])
        for row in made.process(load_ops(process), open_monitor=False).to_list():
            left = {name: value for name, value in row.items() if not name.startswith(_OWN)}
            measured = row.get(_STATS) or {}
            for name in left.keys() & measured.keys():
                if left[name] != measured[name]:
                    raise ValueError(
                        f"the operators measure {name}={measured[name]!r:.40}, but the rows have a column {name} with "
                        f"{left[name]!r:.40}; rename that column"
                    )
            yield left | measured


def load_recipe(spec: str) -> Recipe:
    """Read a recipe. Raises OSError."""
    path = Path(spec).expanduser()
    return Recipe(path, path.read_text(encoding="utf-8"))


def _operators(path: Path, text: str) -> list[dict[str, dict[str, object]]]:
    """Return the operators of a recipe, by name with their arguments."""
    recipe = yaml.safe_load(text)
    process = recipe.get("process") if isinstance(recipe, Mapping) else None
    if not isinstance(process, list) or not all(isinstance(one, Mapping) and len(one) == 1 for one in process):
        raise ValueError(f"{path} has no list `process` of operators, as `- NAME: {{arguments}}`")
    keys = recipe.get("text_keys", "text")
    common = {"text_key": keys[0] if isinstance(keys, list) else keys, "num_proc": recipe.get("np", 1)}
    return [{name: {**common, **(arguments or {})} for name, arguments in one.items()} for one in process]
