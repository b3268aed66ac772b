"""A run that is started, watched and asked in the studio alone."""

import gzip
import json
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from helpers.commands import PATIENCE_SECONDS
from tools.demo.data import make_demo_data

pytestmark = [pytest.mark.nightly, pytest.mark.slow, pytest.mark.timeout(900)]

CONFIG = """\
# sums, as small as it gets
experiment_name: studio  # the folder
trial_name: tiny
allocation_mode: embedded.d1m1p1+d1m1p1
n_gpus_per_node: 2
group_size: 4
group_adv_norm: true
actor: {{path: {model}, optimizer: {{lr: 1e-3}}}}
dataset: {{path: {prompts}, train_bs_n_seqs: 4, max_prompt_len: 8}}
ppo: {{gen: {{max_new_tokens: 6}}, ppo_n_minibatches: 1, kl_ctl: 0.0, disable_value: true}}
reward: {{num_workers: 1}}
samples: {{share: 1}}
monitor: {{tensorboard: false, questions: true, save_batches: 1}}
external_configs: {{cluster_config: {{fileroot: {root}}}}}
"""


def wait(page: Any, holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        assert time.monotonic() < deadline, "it did not come"
        page.wait_for_timeout(100)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with configs/tiny.yaml and the empty fileroot runs/."""
    root = tmp_path_factory.mktemp("studio")
    files = make_demo_data(root / "data")
    for name in ("configs", "runs"):
        (root / name).mkdir()
    text = CONFIG.format(model=files.model, prompts=files.train, root=root / "runs")
    (root / "configs" / "tiny.yaml").write_text(text, encoding="utf-8")
    return root


@pytest.fixture(scope="module")
def address(start: Callable[..., str], root: Path) -> str:
    return start(root / "runs", "--allow-run", "--configs", root / "configs")


@pytest.fixture
def opened(page: Any, address: str) -> Any:
    """The page *Configure* with the file tiny.yaml."""
    page.goto(address)
    page.get_by_role("link", name="Configure").click()
    page.get_by_label("open").select_option("file\ntiny.yaml")
    page.get_by_text("All rules of the configuration hold.").wait_for()
    return page


@pytest.fixture
def started(page: Any, opened: Any) -> Iterator[psutil.Process]:
    """The run that the button *Start* begins; it ends with the test."""
    opened.get_by_role("button", name="Start").click()
    said = page.get_by_text("started as process")
    said.wait_for()
    process = psutil.Process(int(re.findall(r"\d+", said.inner_text())[0]))
    yield process
    process.send_signal(signal.SIGINT)
    wait(page, lambda: has_ended(process))


def has_ended(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.status() == psutil.STATUS_ZOMBIE
    return True


def test_a_file_is_changed_compared_saved_tried_and_its_command_copied(opened: Any, root: Path) -> None:
    file = root / "configs" / "tiny.yaml"
    before = file.read_text(encoding="utf-8")
    rate = opened.get_by_label("actor.optimizer.lr", exact=True)
    rate.fill("2e-3")
    opened.keyboard.press("Tab")
    wait(opened, lambda: "lr: 2e-3" in opened.get_by_label("configuration as YAML").input_value())
    opened.get_by_label("compare with").select_option("file\ntiny.yaml")
    opened.locator("dialog td code").first.wait_for()
    assert opened.locator("dialog tbody td").all_inner_texts() == ["actor.optimizer.lr", "2e-3", "1e-3"]
    opened.get_by_role("button", name="Close").click()

    opened.get_by_role("button", name="Save").click()
    opened.get_by_text(f"saved {file}").wait_for()
    assert file.read_text(encoding="utf-8") == before.replace("1e-3", "2e-3"), "comments and order stay"

    opened.context.grant_permissions(["clipboard-read", "clipboard-write"])
    opened.get_by_role("button", name="Copy command").click()
    opened.get_by_text("copied: ").wait_for()
    assert opened.evaluate("navigator.clipboard.readText()") == "slipstream train --config tiny.yaml"
    opened.get_by_role("button", name="Dry run").click()
    wait(opened, lambda: "exit code" in opened.locator("pre.log").inner_text())
    said = opened.locator("pre.log").inner_text()
    assert "exit code 0" in said, said


def test_a_run_that_start_begins_answers_questions_and_its_steps_can_be_explained(page, started, root) -> None:
    navigation = page.get_by_role("navigation")
    navigation.get_by_role("link", name="Runs").click()
    page.get_by_role("link", name="studio/tiny").click(timeout=1000 * PATIENCE_SECONDS)
    (logs,) = (root / "runs" / "logs").glob("*/studio/tiny")
    wait(page, (logs / "batches" / "step-1.json.gz").exists)
    navigation.get_by_role("link", name="Ask").click()
    page.get_by_label("question").fill("12+34=")
    page.get_by_role("button", name="Ask", exact=True).click()
    answer = page.locator(".turn.model .by")
    answer.wait_for()
    assert re.match(r"[1-6] tokens?, weights of version", answer.inner_text())
    metrics = logs / "metrics.jsonl"
    wait(page, lambda: '"rollout/num_questions":1' in metrics.read_text().replace(" ", ""))
    navigation.get_by_role("link", name="Processes").click()
    page.locator("tr", has_text="rollout").get_by_role("button", name="stacks").click()
    wait(page, lambda: 'File "' in page.locator("pre.log").first.inner_text())
    case = json.loads(gzip.decompress((logs / "batches" / "step-1.json.gz").read_bytes()))
    for tokens, sequence in zip(case["tokens"], case["sequences"], strict=True):
        sampled = [value for value, trained in zip(sequence["entropy"], sequence["mask"], strict=True) if trained]
        assert all(1.0 < value < 2.78 for value in sampled), "of weights that are random, over 16 tokens"
        assert len(tokens["ids"]) == len(tokens["advantages"]) == len(sequence["logprobs"])
