"""The pages of the studio in a real browser."""

import time
from collections.abc import Callable
from typing import Any

import pytest

from helpers.studio_runs import make_agent_run, make_run, without_signal

HOSTILE = "<img src=x onerror=\"document.title='broken'\"><script>document.title='broken'</script>"


@pytest.fixture(scope="module")
def base(start: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> str:
    root = tmp_path_factory.mktemp("runs")
    make_run(root, "sums/good")
    make_run(root, "sums/second", steps=20, config={"seed": 1, "staleness": {"max_staleness": 5}})
    make_run(root, "sums/bad", change=without_signal)
    make_run(
        root, "sums/<img src=x>", steps=3, answer=lambda step, index: HOSTILE,
        change=lambda step, steps: {HOSTILE: 1.0, "__proto__": 2.0},
    )  # fmt: skip
    make_agent_run(root)
    return start(root)


@pytest.fixture(scope="module")
def allowed(start: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> str:
    """A studio that may start processes, with a token."""
    root = tmp_path_factory.mktemp("allowed")
    make_agent_run(root)
    return start(root, "--allow-run", "--configs", root)


def wait(page: Any, holds: Callable[[], bool]) -> None:
    """Wait until a condition holds. The content policy of the page forbids page.wait_for_function()."""
    deadline = time.monotonic() + 240
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
    compare(page, base, "sums/second", "sums/good", by="Compare curves")
    page.locator(".chart canvas").first.wait_for()
    assert sorted(text.rstrip("×") for text in texts(page, ".legend span")) == ["sums/good", "sums/second"]
    page.get_by_label("filter metrics").fill("reward/mean")
    wait(page, lambda: page.locator(".chart").count() == 1)
    page.get_by_label("over").select_option("tokens")
    page.get_by_label("smoothing").fill("0.1")
    wait(page, lambda: "x=tokens" in page.url and "smooth=0.1" in page.url)
    page.get_by_label("filter metrics").fill("staleness/ages")
    page.get_by_role("img", name="histogram by step").hover(position={"x": 60, "y": 100})
    assert texts(page, ".chart .value") == ["step 1, 1: 20"]
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
    page.get_by_label("step", exact=True).fill("7")
    wait(page, lambda: page.locator(".samples tbody tr").count() == 8)
    page.get_by_role("button", name="tokens").click()
    wait(page, lambda: texts(page, ".samples tbody tr:first-child td:nth-child(3)") == ["512 cut off"])
    page.locator(".samples tbody tr").first.click()
    page.locator(".group article").nth(3).wait_for()
    assert "cut off" in texts(page, ".group article.chosen")[0]
    shown = texts(page, ".detail .facts div")
    assert {"answer\n3 of 4", "weights version\n5 to 6"} <= set(shown), shown
    assert texts(page, ".samples tr.chosen td:nth-child(4)") == ["5 to 6"]
    page.locator("h1").click()
    page.keyboard.press("j")
    page.locator(".turn.environment").or_(page.locator(".answer")).first.wait_for()


def test_texts_and_names_are_never_markup(page: Any, base: str) -> None:
    page.goto(base)
    page.get_by_role("link", name="sums/<img src=x>").click()
    page.locator(".chart canvas").first.wait_for()
    assert HOSTILE in texts(page, ".chart .name")
    page.get_by_role("link", name="Samples").click()
    page.locator(".samples tbody tr").first.click()
    page.locator(".group article").first.wait_for()
    assert HOSTILE in page.locator(".detail .text").nth(1).inner_text()
    page.get_by_role("link", name="Side by side").click()
    page.locator(".pairs tbody tr").first.wait_for()
    assert HOSTILE in texts(page, ".pairs .text")[0]
    assert page.locator("main img, main script").count() == 0
    assert page.title() != "broken"


def test_why_the_reward_stopped_rising_stands_in_the_list_of_runs(page: Any, base: str) -> None:
    page.goto(base)
    page.locator("tr", has_text="sums/bad").get_by_role("link", name="bad", exact=True).click()
    first = page.locator(".lights article.bad").first
    first.wait_for()
    assert "equal rewards" in first.inner_text()
    assert "since step" in first.inner_text()
    assert texts(page, ".lights article.bad .actions li") == ["set algorithm.dynamic_sampling=true", "raise group_size"]
    first.get_by_role("button", name="documentation").click()
    assert page.locator("dialog .document h2").inner_text() == "Dynamic sampling"
    page.get_by_role("button", name="Close").click()
    first.get_by_role("link", name="groups/equal").click()
    page.locator(".chart canvas").first.wait_for()
    assert texts(page, ".chart .name") == ["groups/equal"]
    page.get_by_label("filter metrics").fill("")
    wait(page, lambda: page.locator("section:first-child .chart.problem").count() == 2)
    assert sorted(texts(page, "section:first-child .chart .name")) == ["groups/equal", "reward/mean"]
    marks = ["Nearly all groups have equal rewards", "The reward does not rise"]
    assert sorted(texts(page, "section:first-child .chart .mark")) == marks


@pytest.mark.nightly
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


@pytest.mark.nightly
def test_the_key_that_differs_between_two_runs_is_found_by_clicks_alone(page: Any, base: str) -> None:
    compare(page, base, "sums/good", "sums/second", by="Compare configurations")
    page.locator("dialog td code").first.wait_for()
    assert texts(page, "dialog tbody td") == ["staleness.max_staleness", "2", "5"]
    assert texts(page, "dialog th") == ["key", "sums/good", "sums/second"]
    page.get_by_role("button", name="Close").click()
    assert page.get_by_label("choose sums/second").is_checked(), "the list is as it was"


@pytest.mark.nightly
def test_the_configuration_of_a_run_is_checked_from_its_first_change_on(page: Any, base: str) -> None:
    page.goto(base + "#/configure")
    page.get_by_label("open").select_option(label="run: sums/good")
    page.get_by_text("A run was started with this configuration.").wait_for()
    assert page.locator(".problem").count() == 0
    page.get_by_label("configuration as YAML").fill("seed: -1\n")
    page.locator(".problem", has_text="seed").wait_for()


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
    page.get_by_label("preset").select_option("dapo")
    wait(page, lambda: "algorithm:\n  name: dapo" in page.get_by_label("configuration as YAML").input_value())


def open_page(page: Any, base: str, run: str, title: str) -> None:
    page.goto(base)
    page.get_by_role("link", name=run).click()
    page.get_by_role("navigation").get_by_role("link", name=title, exact=True).click()


def test_an_agent_has_a_tree_of_turns_and_each_token_its_figures(page: Any, base: str) -> None:
    open_page(page, base, "sums/agent", "Samples")
    page.locator(".samples tbody tr", has_text="tool_call").first.click()
    page.locator(".branch.chosen").wait_for()
    assert [text.split() for text in texts(page, ".tool")] == [["calls", "add", '{"a":1,"b":2}'], ["result", "3"]]
    assert texts(page, ".branch .answer:visible") == ["it is 4"], "the other branch is closed"
    page.get_by_role("button", name="Token by token").click()
    colour = page.get_by_label("colour")
    colour.wait_for()
    names = ["logprobs", "ratios", "advantages", "entropy", "versions", "mask"]
    assert [option.get_attribute("value") for option in colour.locator("option").all()] == names
    colour.select_option("advantages")
    last = page.locator(".tokens .text span").last
    assert last.inner_text() == "4"
    assert "log-probability -3, ratio 1.029" in last.get_attribute("title")
    assert "advantage -1, entropy" in last.get_attribute("title")
    assert page.locator(".tokens .given").count() == 4


@pytest.mark.nightly
def test_two_checkpoints_stand_side_by_side_on_the_same_prompts(page: Any, base: str) -> None:
    open_page(page, base, "sums/good", "Side by side")
    page.locator(".pairs tbody tr").nth(7).wait_for()
    assert page.get_by_label("step of the right side").input_value() == "40"
    page.get_by_role("button", name="checkpoint before, right").click()
    wait(page, lambda: page.get_by_label("step of the right side").input_value() == "39")
    assert texts(page, ".pairs tbody tr:first-child .text") == ["The sum is 1.", "The sum is 39."]
    page.get_by_label("against").select_option(label="sums/second")
    wait(page, lambda: texts(page, ".pairs th b") == ["sums/good", "sums/second"])
    assert page.get_by_label("step of the right side").input_value() == "20"
    assert page.evaluate("document.documentElement.scrollWidth") == 1280


def test_a_step_is_explained_by_the_tokens_that_moved_its_loss_most(page: Any, base: str, allowed: str) -> None:
    open_page(page, base, "sums/good", "Explain")
    page.get_by_text("This run saved no batch.").wait_for()
    titles = {text for text in texts(page, "nav a.dim")}
    assert titles == {"Explain", "Ask"}
    assert "save_batches" in page.locator("nav a.dim").first.get_attribute("title")
    open_page(page, allowed, "sums/agent", "Explain")
    first = page.locator("tbody tr").first
    first.wait_for()
    effects = {tuple(row.split("\t")[i] for i in (2, 5)) for row in texts(page, "table:first-of-type tbody tr")}
    assert effects == {("less likely", "0"), ("more likely", "1")}, "of the wrong and of the right answer"
    assert first.locator("mark").inner_text() in ("3", "4")
    assert first.locator("code").inner_text().startswith("2=it is ")
    first.get_by_role("link").click()
    wait(page, lambda: page.locator(".samples tbody tr").count() == 2)


@pytest.mark.nightly
def test_slots_of_prompts_are_a_chart_and_logs_and_stacks_of_processes_text(page: Any, allowed: str) -> None:
    open_page(page, allowed, "sums/agent", "Timeline")

    def pointed_at() -> str:
        page.get_by_role("img", name="timeline of the processes").hover(position={"x": 300, "y": 50})
        return page.locator(".what").inner_text()

    wait(page, lambda: "rollout · generator-0: request" in pointed_at())
    page.get_by_role("navigation").get_by_role("link", name="Processes").click()
    page.get_by_label("filter lines").fill("slow")
    wait(page, lambda: texts(page, ".log div") == ["2 WARNING: <b>slow</b>"])
    wait(page, lambda: texts(page, "tbody td:first-child") == ["driver"])
    page.get_by_role("navigation").get_by_role("link", name="Ask").click()
    page.get_by_text("monitor.questions=true is under way").wait_for()


@pytest.mark.nightly
def test_a_recipe_of_another_system_is_migrated_and_its_keys_are_listed(page: Any, base: str) -> None:
    page.goto(base + "#/configure")
    page.get_by_label("configuration as YAML").fill(
        "data: {train_batch_size: 8, train_files: a.parquet}\nactor_rollout_ref: {model: {path: m}, rollout: {n: 4}}\n"
    )
    page.get_by_role("button", name="Migrate it").click()
    page.locator("dialog tbody tr").nth(3).wait_for()
    assert "group_size: 4" in page.get_by_label("configuration as YAML").input_value()
    page.get_by_role("button", name="Close").click()
    assert page.get_by_role("button", name="Migrate it").count() == 0
