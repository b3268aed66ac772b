"""The pages of the studio in a real browser."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from helpers.studio_runs import make_run

HOSTILE = "<img src=x onerror=\"document.title='broken'\"><script>document.title='broken'</script>"


@pytest.fixture(scope="module")
def base(start: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> str:
    root = tmp_path_factory.mktemp("runs")
    make_run(root, "sums/good")
    make_run(root, "sums/second", steps=20, config={"seed": 1, "staleness": {"max_staleness": 5}})
    make_run(root, "sums/bad", change=lambda step, steps: {"groups/equal": min(1.0, 0.3 + step / steps)})
    make_run(
        root, "sums/hostile", steps=3, answer=lambda step, index: HOSTILE,
        change=lambda step, steps: {HOSTILE: 1.0, "__proto__": 2.0},
    )  # fmt: skip
    return start(root)


def wait(page: Any, holds: Callable[[], bool]) -> None:
    """Wait until a condition holds. The content policy of the page forbids page.wait_for_function()."""
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline, "it did not come"
        page.wait_for_timeout(50)


def texts(page: Any, selector: str) -> list[str]:
    found: list[str] = page.locator(selector).all_inner_texts()
    return found


def compare(page: Any, base: str, first: str, second: str, *, by: str) -> None:
    """Choose two runs in the list, and press a button."""
    page.goto(base)
    for name in (first, second):
        page.get_by_label(f"choose {name}").check()
    page.get_by_role("button", name=by).click()


def test_from_the_list_to_the_curves_of_two_runs(page: Any, base: str) -> None:
    compare(page, base, "sums/second", "sums/good", by="Compare 2 runs")
    page.locator(".chart canvas").first.wait_for()
    assert sorted(text.rstrip("×") for text in texts(page, ".legend span")) == ["sums/good", "sums/second"]
    page.get_by_label("filter metrics").fill("reward/mean")
    wait(page, lambda: page.locator(".chart").count() == 1)
    assert page.evaluate("document.documentElement.scrollWidth") == 1280
    page.keyboard.press("Escape")
    page.locator("h1").click()
    before = page.evaluate("document.documentElement.dataset.theme")
    page.keyboard.press("d")
    assert page.evaluate("document.documentElement.dataset.theme") != before


def test_the_longest_answer_of_step_7_is_found_by_clicks_alone(page: Any, base: str) -> None:
    page.goto(base)
    page.get_by_role("link", name="sums/good").click()
    page.get_by_role("link", name="Samples").click()
    page.get_by_label("step from").fill("7")
    page.locator(".field", has_text="to").locator("input").first.fill("7")
    page.get_by_role("button", name="tokens").click()
    wait(page, lambda: texts(page, ".samples tbody tr:first-child td:nth-child(3)") == ["512"])
    page.locator(".samples tbody tr").first.click()
    page.locator(".group article").nth(3).wait_for()
    assert "cut off" in texts(page, ".group article.chosen")[0]
    page.locator("h1").click()
    page.keyboard.press("j")
    page.locator(".turn.environment").or_(page.locator(".answer")).first.wait_for()


def test_texts_and_names_are_never_markup(page: Any, base: str) -> None:
    page.goto(base)
    page.get_by_role("link", name="sums/hostile").click()
    page.locator(".chart canvas").first.wait_for()
    assert HOSTILE in texts(page, ".chart .name")
    page.get_by_role("link", name="Samples").click()
    page.locator(".samples tbody tr").first.click()
    page.locator(".group article").first.wait_for()
    assert HOSTILE in page.locator(".detail .text").nth(1).inner_text()
    assert page.locator("main img, main script").count() == 0
    assert page.title() != "broken"


def test_why_the_reward_stopped_rising_stands_in_the_list_of_runs(page: Any, base: str) -> None:
    page.goto(base)
    page.locator("tr", has_text="sums/bad").get_by_role("link", name="act").click()
    first = page.locator(".lights article.bad").first
    first.wait_for()
    assert "equal rewards" in first.inner_text()
    first.get_by_role("link", name="groups/equal").click()
    page.locator(".chart canvas").first.wait_for()
    assert texts(page, ".chart .name") == ["groups/equal"]


def test_a_star_and_a_note_stay_with_an_answer(page: Any, base: str) -> None:
    page.goto(base)
    page.get_by_role("link", name="sums/second").click()
    page.get_by_role("link", name="Samples").click()
    page.locator(".samples tbody tr").nth(2).click()
    page.locator(".marks").wait_for()
    page.keyboard.press("s")
    page.get_by_text("kept in notes.jsonl").wait_for()
    page.get_by_role("textbox", name="note").fill("<b>ünsure</b>")
    page.keyboard.press("Tab")
    page.reload()
    page.get_by_label("only").select_option("starred")
    wait(page, lambda: page.locator(".samples tbody tr").count() == 1)
    page.locator(".samples tbody tr").first.click()
    wait(page, lambda: page.get_by_role("textbox", name="note").input_value() == "<b>ünsure</b>")


def test_the_key_that_differs_between_two_runs_is_found_by_clicks_alone(page: Any, base: str) -> None:
    compare(page, base, "sums/good", "sums/second", by="Compare configurations")
    page.locator("dialog td code").first.wait_for()
    assert texts(page, "dialog tbody td") == ["staleness.max_staleness", "2", "5"]


def test_a_wrong_value_is_marked_at_its_field_and_boxes_follow_the_text(page: Any, base: str) -> None:
    page.goto(base + "#/configure")
    page.get_by_label("allocation_mode", exact=True).fill("sglang.d2m2p1+d4m1p1")
    page.keyboard.press("Tab")
    page.get_by_label("n_gpus_per_node", exact=True).fill("8")
    page.keyboard.press("Tab")
    wait(page, lambda: page.locator(".slot i").count() >= 8)
    page.get_by_label("search keys").fill("learning rate")
    rate = page.get_by_label("actor.optimizer.lr", exact=True)
    rate.fill("-1")
    page.keyboard.press("Tab")
    wait(page, lambda: "must be" in page.locator(".key.bad .wrong").first.inner_text())
    assert "lr: -1" in page.get_by_label("configuration as YAML").input_value()
    page.get_by_label("search keys").fill("")
    page.get_by_label("only changed").check()
    wait(page, lambda: page.locator(".key").count() == 3)
    assert page.evaluate("document.documentElement.scrollWidth") == 1280
