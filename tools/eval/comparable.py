"""Whether the settings of two evaluations allow a comparison of their results.

Three kinds of settings: those that change what a measure means or measures, which must be the same; those that change
rounding or the end of a completion, which are reported; and the seed, which only selects among equally likely samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tools.eval.model import DEFAULT_DTYPES

_ALL_COMPLETIONS = {
    "reward": "--reward",
    "workflow": "--workflow",
    "prompt_format.template": "--prompt_template",
    "prompt_format.system": "--system",
    "prompt_format.instruction": "--instruction",
    "prompt_format.chat_template": "--config",
    "prompt_format.chat_options": "--config",
    "max_gen_tokens": "--max_gen_tokens",
}
"""Settings that must be the same -> the option of tools.eval that sets each."""
_SAMPLED_COMPLETIONS = {"temperature": "--temperature", "top_p": "--top_p"}
"""The same, only where sampled completions are compared: greedy ones do not depend on these."""
_REPORTED = ("generator", "dtype", "sglang", "stop_token_ids")
"""Settings that leave the measures comparable."""


@dataclass(frozen=True)
class SettingDifferences:
    """How the settings of two evaluations differ."""

    refused: Mapping[str, str]
    """Difference, with both values -> the option that sets it: the measures are not comparable."""
    reported: tuple[str, ...]
    """Differences, with both values, and settings that cannot be checked: the measures are comparable."""


def setting_differences(a: Mapping[str, Any], b: Mapping[str, Any], *, sampled: bool) -> SettingDifferences:
    """Compare the contents of two settings.json; sampled: also what changes only sampled completions."""
    must_agree = _ALL_COMPLETIONS | (_SAMPLED_COMPLETIONS if sampled else {})
    left, right = (dict(_flat(settings)) for settings in (a, b))
    refused, reported = {}, []
    for key in (*must_agree, *_REPORTED):
        if key in left and key in right and left[key] != right[key]:
            difference = f"{key}={left[key]!r} in A and {right[key]!r} in B"
            if key in must_agree:
                refused[difference] = must_agree[key]
            else:
                reported.append(difference)
    for side, known in (("A", left), ("B", right)):
        unknown = [key for key in must_agree if key not in known]
        if unknown:
            reported.append(f"settings.json of {side} lacks {', '.join(unknown)}, which cannot be checked")
    return SettingDifferences(refused, tuple(reported))


def _flat(settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the settings with the parts of the prompt format as settings of their own, the default data type as its
    value, and a file of a chat template as the hash of its content where that is known."""
    for key, value in settings.items():
        if key == "prompt_format":
            yield from ((f"{key}.{part}", of_part) for part, of_part in value.items())
        elif key == "chat_template_hash":
            if value is not None:
                yield "prompt_format.chat_template", f"hash {value}"
        elif key == "dtype":
            yield key, value or DEFAULT_DTYPES.get(settings.get("generator", ""))
        else:
            yield key, value
