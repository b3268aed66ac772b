"""What an error suggests in place of an allocation or a batch passes every check itself."""

import re
from itertools import product
from pathlib import Path

import pytest

from core.checks import run_checks
from core.checks.rules import load_config
from core.config.parsing.problems import ConfigError
from helpers.config_inputs import PPO_7B_128_GPUS, SMALLEST_PPO, write_run


def _problems(path: Path, *overrides: str) -> list[str]:
    """Problems of a recipe, of its rules or else of its models; not those of this host."""
    try:
        loaded = load_config("ppo-math", path, overrides)
    except ConfigError as error:
        return str(error).splitlines()
    return [str(problem) for problem in run_checks(loaded) if not problem.of_host]


def _suggestions(problem: str) -> list[list[str]]:
    """The overrides that a problem suggests, each way out by itself."""
    found = problem.partition("; nearest: ")[2].rpartition(", as in ")[2]
    ways = [way.split() for way in found.split(", or ") if way]
    return [[word if "=" in word else f"allocation_mode={word}" for word in way] for way in ways]


def test_the_layout_that_the_tutorials_file_is_given_for_other_degrees_suits_its_batch(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(PPO_7B_128_GPUS)
    (problem,) = _problems(path, "allocation_mode=sglang.d64p1m1+d32p2m2")
    assert problem.endswith("nearest: sglang.d64m1p1+d16m2p2, or n_nodes=24")


TEXTS = (
    "mock.d4m2p1+d3m2p1", "mock.d3", "mock.d6m1p1|d3m2p1", "manual", "mock.d3m1p1+actor_train:d2m1p1,ref_inf:d1m3p1",
    "d3m4p1",
)  # fmt: skip
CLUSTERS = ((1, 4), (1, 7), (2, 6), (3, 4))


@pytest.mark.parametrize("text", TEXTS)
def test_every_suggested_allocation_is_accepted(tmp_path: Path, text: str) -> None:
    # 4 heads in 2 groups, 2 layers; with the reference of kl_ctl.
    path = write_run(tmp_path, SMALLEST_PPO.replace("kl_ctl: 0.0", "kl_ctl: 0.1") + "group_size: 2\n")
    tried = 0
    for (nodes, gpus), prompts in product(CLUSTERS, (4, 6, 20)):
        fixed = [f"dataset.train_bs_n_seqs={prompts}", "ppo.ppo_n_minibatches=2", "launch.trainer_device=cpu"]
        size = [f"n_nodes={nodes}", f"n_gpus_per_node={gpus}"]
        found = _problems(path, *fixed, *size, f"allocation_mode={text}")
        for way in (way for problem in found for way in _suggestions(problem)):
            if not re.match(r"allocation_mode=(mock|embedded)\.|n_", way[0]):
                continue  # a number of the batch, or a degree where no allocation of this cluster has it
            assert _problems(path, *fixed, *size, f"allocation_mode={text}", *way) == [], (size, prompts, found, way)
            tried += 1
    assert tried >= 4


def test_numbers_that_are_suggested_for_the_batch_work_for_every_role(tmp_path: Path) -> None:
    path = write_run(tmp_path, SMALLEST_PPO.replace("kl_ctl: 0.0", "kl_ctl: 0.1"))
    tried = 0
    layouts = (("d2m1p1", "d1m2p1"), ("d3m2p1", "d6m1p1"), ("d6m1p1", "d3m2p1"), ("d6m1p1", "d6m1p1"))
    for (train, ref), group, prompts, minibatches in product(layouts, (1, 4), (4, 6, 15), (1, 3, 6)):
        text = f"allocation_mode=mock.d1+actor_train:{train},ref_inf:{ref}"
        slots = 3 if train == "d2m1p1" else 7
        fixed = [text, f"n_gpus_per_node={slots}", f"group_size={group}", "launch.trainer_device=cpu"]
        batch = [f"dataset.train_bs_n_seqs={prompts}", f"ppo.ppo_n_minibatches={minibatches}"]
        for problem in _problems(path, *fixed, *batch):
            key = "ppo.ppo_n_minibatches" if ": ppo.ppo_n_minibatches: " in problem else "dataset.train_bs_n_seqs"
            suggested = problem.partition("; nearest: ")[2]
            key = "dataset.train_bs_n_seqs" if suggested.startswith("dataset.train_bs_n_seqs=") else key
            for number in re.findall(r"\d+", suggested):
                assert _problems(path, *fixed, *batch, f"{key}={number}") == [], (problem, number)
                tried += 1
    assert tried >= 8


@pytest.mark.parametrize("text", ["mock.d6", "mock.d2|d3", "mock.d3|actor_train:d3m1p1,ref_inf:d1m2p1"])
def test_where_no_layout_fits_none_is_suggested_and_what_to_change_is(tmp_path: Path, text: str) -> None:
    # Three slots: a batch of four is no multiple of three, three divides neither heads nor layers.
    path = write_run(tmp_path, SMALLEST_PPO.replace("kl_ctl: 0.0", "kl_ctl: 0.1"))
    (problem,) = _problems(path, "mode=local", "n_gpus_per_node=3", f"allocation_mode={text}")
    assert problem.endswith("change the batch, n_nodes or n_gpus_per_node"), problem
