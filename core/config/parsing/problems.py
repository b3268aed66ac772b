"""How a problem in what the user gave is reported: all of them at once, one line each, with *** in the place of
secrets.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError

MASK = "***"
_SECRET = re.compile("KEY|TOKEN|SECRET|PASS|AUTH|CRED", re.IGNORECASE)
"""In the name of an environment variable: its value is not shown."""
_SECRET_KEY = re.compile("(?!(max|min|num|n)_).*(key|token|secret|pass|password|passwd|auth|cred|credentials?)")
"""A configuration key in lower case: max_new_token and max_tokens_per_mb are no secrets."""
_COLUMN_KEY = re.compile(r"(data|dataset|buffer)\..*_key")
"""A key that names a column in configurations of other systems."""
_USER_OF_URL = re.compile(r"(?P<scheme>\b[A-Za-z][\w+.-]*://)[^/@\s'\"]*@")


def is_secret(name: str) -> bool:
    """Return whether the value of the environment variable `name` is masked."""
    return bool(_SECRET.search(name))


def masked_urls(text: str) -> str:
    """Return the text with *** for user and password of the URLs in it."""
    return _USER_OF_URL.sub(rf"\g<scheme>{MASK}@", text)


def masked_override(word: str) -> str:
    """Return an override a.b.c=value, or another word of a command line, without the secrets in it."""
    key, equals, value = word.partition("=")
    name = key.strip().rpartition(".")[2]
    of_envs = key.strip().startswith("external_configs") and is_secret(name if ".envs." in key else value)
    is_secret_key = _SECRET_KEY.fullmatch(name) and not _COLUMN_KEY.fullmatch(key.strip())
    if equals and (of_envs or is_secret_key or (name.isupper() and is_secret(name))):
        return f"{key}={MASK}"
    return masked_urls(word)


MISSING = (": no such folder", ": no such file", ": No such file or directory")
"""Of a problem whose path is not there."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One thing wrong with what the user gave. `where` is file:line, the override, or empty for a default."""

    key: str
    message: str
    where: str = ""
    of_host: bool = False
    """A fact of this host: the recipe may be right elsewhere."""

    def __str__(self) -> str:
        return ": ".join(part for part in (self.where, self.key, self.message) if part)


def host_section(lacking: Sequence[Problem]) -> str:
    """Return the lines about what this host does not have for a run."""
    return "\n".join(["This host cannot start it:", *(f"  {problem}" for problem in lacking)])


class ConfigError(ValueError):
    """Bad input, all of it at once. One line per problem."""

    def __init__(self, problems: list[Problem], lacking: Sequence[Problem] = ()) -> None:
        """`lacking`: those that are facts of this host, to be listed apart."""
        self.problems = tuple(problems)
        lines = [str(p) for p in problems if p not in lacking]
        super().__init__("\n".join([*lines, *([host_section(lacking)] if lacking else ())]))


_BOUNDS = {
    "missing": "required; it has no default",
    "value_error": "{error}",
    "greater_than": "must be greater than {gt}, got {input}",
    "greater_than_equal": "must be at least {ge}, got {input}",
    "less_than": "must be less than {lt}, got {input}",
    "less_than_equal": "must be at most {le}, got {input}",
    "string_too_short": "must not be empty",
    "string_too_long": "must have at most {max_length} characters",
    "string_pattern_mismatch": "must be letters, digits and . _ + = -, a letter or digit first, got {input!r}",
}


def broken_bounds(error: ValidationError) -> Iterator[tuple[list[str], bool, str]]:
    """Yield the errors of pydantic about single fields: path, whether the field is missing, and a message."""
    for item in error.errors():
        # A bound of a float field is a float, 0.0 where the schema has 0; one of an integer field may have ten digits.
        bounds = {name: f"{b:g}" if isinstance(b, float) else b for name, b in item.get("ctx", {}).items()}
        message = _BOUNDS.get(item["type"], item["msg"]).format(**bounds, input=item["input"])
        yield [str(part) for part in item["loc"]], item["type"] == "missing", message
