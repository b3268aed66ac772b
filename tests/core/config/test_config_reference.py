"""docs/configuration.md is what the generator writes, and has every key of the schema with its meaning."""

import re
from pathlib import Path

import pytest

from config_schema.section import all_keys
from core.config.experiments import EXPERIMENTS
from core.config.reference import page

PAGE = Path(__file__).resolve().parents[3] / "docs" / "configuration.md"
ROWS = dict(re.findall(r"^\| `([\w.*/]+)` \| (.*) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE))
"""First cell -> the rest of the row; keys that several sections have are there once."""


def test_the_page_is_what_the_generator_writes() -> None:
    generated = page()
    command = "python -m core.config.reference > docs/configuration.md"
    assert generated == PAGE.read_text(encoding="utf-8"), f"the schema has changed; run: {command}"


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_key_of_an_experiment_has_a_row_below_a_heading_of_its_section(experiment: str) -> None:
    text = PAGE.read_text(encoding="utf-8")
    tables = [part.partition("\n") for part in text.split("\n## ")[1:]]
    for key in all_keys(EXPERIMENTS[experiment]):
        section, _, name = key.rpartition(".")
        headings = [f"`{section}`", f"`*.{section.rpartition('.')[2]}`"] if section else ["Top level"]
        found = [rest for heading, _, rest in tables if any(h in heading for h in headings)]
        assert any(f"\n| `{name}` | " in rest for rest in found), f"{key} has no row"


def test_a_row_has_type_bounds_default_meaning_and_condition() -> None:
    assert ROWS["gae_lambda"].startswith("float ≥ 0, ≤ 1 | `1.0` | Lambda of generalized advantage estimation")
    assert ROWS["over_age"].startswith("`wait`, `mask` | `wait` | ") and ROWS["over_age"].endswith("max_staleness > 0")
    assert ROWS["is_critic"].startswith("bool | `false`; `critic.type.is_critic`: `true` | ")
    assert ROWS["ckpt_freq_secs"].startswith("float > 0 or null | `600.0` | ")
    assert ROWS["recover_retries"].endswith(" | recover_mode=auto")


def test_a_key_of_an_algorithm_has_the_settings_that_read_it() -> None:
    condition = " | algorithm.loss=clip, cispo or tv and algorithm.clip_low=null or algorithm.clip_high=null"
    assert ROWS["eps_clip"].endswith(condition)
    assert ROWS["sapo_tau_positive"].endswith(" | algorithm.loss=sapo")
