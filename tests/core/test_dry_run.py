"""Dry runs on a host that is not the cluster: problems of the recipe, and apart from them facts of this host."""

import json
import re
import shutil
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from core.checks import host, run_checks
from core.checks.rules import load_config
from core.quickstart import main
from core.runs.paths import RunPaths
from core.train.recover import write_state
from helpers.config_inputs import write_prompts, write_run
from rollout.data.encoder import Encoder
from rollout.data.prompts import PromptDataset
from rollout.data.tokenizer import load_tokenizer
from rollout.experience import make_rules
from rollout.inference.backend import FlagValue
from rollout.inference.sglang import arguments
from tools.demo.data import save_model

SERVERS = ["allocation_mode=sglang.d1m1p1+d1m1p1", "n_gpus_per_node=2", "actor.sglang={}"]


@pytest.fixture(autouse=True)
def laptop(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(indices: list[int]) -> None:
        raise ValueError(f"GPU {indices[0]}: nvidia-smi shows none")

    monkeypatch.setattr(host, "check_gpus", none)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


SMALLEST_SFT = """\
experiment_name: small
trial_name: one
model: {path: MODEL}
dataset: {train_path: DATA, train_bs_n_seqs: 4}
"""


def dry_run(path: Path, *words: str, flag: str = "--dry-run") -> int:
    return main(["ppo-math", "--config", str(path), flag, *words])


def test_a_recipe_for_gpus_is_right_on_a_host_without(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_run(tmp_path)
    assert dry_run(path, *SERVERS) == 0
    shown = capsys.readouterr()
    assert re.search(r"This host cannot start it:\n  .*allocation_mode: GPU 0: nvidia-smi shows none", shown.out)
    assert "Dry run: every check of the recipe passed" in shown.out and shown.err == ""


def test_preflight_fails_where_the_host_lacks_anything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_run(tmp_path)
    assert dry_run(path, *SERVERS, flag="--preflight") == 2
    assert "This host cannot start it:\n  " in capsys.readouterr().err
    assert dry_run(path, flag="--preflight") == 0
    assert "Dry run: every check passed" in capsys.readouterr().out


def test_a_problem_of_the_recipe_counts_anywhere_and_stands_apart(tmp_path, capsys) -> None:
    assert dry_run(write_run(tmp_path), *SERVERS, "reward.function=no_such_module:f") == 2
    recipe, _, of_host = capsys.readouterr().err.partition("This host cannot start it:\n")
    assert "no_such_module" in recipe and "nvidia-smi" not in recipe
    assert "nvidia-smi" in of_host and "no_such_module" not in of_host


def test_paths_of_a_cluster_are_facts_of_this_host_and_those_of_a_run_here_are_not(tmp_path: Path) -> None:
    path = write_run(tmp_path)
    assert dry_run(path, *SERVERS, "actor.path=/storage/models/none") == 0
    assert dry_run(path, "actor.path=/storage/models/none") == 2


def test_a_ray_cluster_that_does_not_respond_is_a_fact_of_this_host(tmp_path, capsys) -> None:
    path, closed = write_run(tmp_path), "launch.ray_address=127.0.0.1:9"
    assert dry_run(path, closed) == 0
    assert "launch.ray_address=127.0.0.1:9: nothing listens there" in capsys.readouterr().out
    assert dry_run(path, closed, flag="--preflight") == 2


def test_sglang_that_is_not_installed_is_a_fact_of_this_host(tmp_path, monkeypatch, capsys) -> None:
    path, servers = write_run(tmp_path), [*SERVERS, "generator.device=cpu", "launch.trainer_device=cpu"]
    monkeypatch.setattr(arguments, "is_installed", lambda: False)
    assert dry_run(path, *servers) == 0
    said = f"generator.python: SGLang is not installed for {sys.executable}; pip install -e '.[gpu]'"
    assert f"This host cannot start it:\n  {said}" in capsys.readouterr().out
    assert dry_run(path, *servers, flag="--preflight") == 2
    assert said in capsys.readouterr().err
    assert dry_run(path, *servers, "launch.ray_address=127.0.0.1:9") == 0
    assert "SGLang" not in capsys.readouterr().out, "the servers run on machines of the cluster"


def test_the_interpreter_of_the_servers_is_looked_at_and_not_this_one(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(arguments, "is_installed", lambda: False)
    python = tmp_path / "python"

    def problems(script: str, flags: dict[str, FlagValue]) -> list[tuple[str, str]]:
        python.write_text(f"#!/bin/sh\n{script}\n")
        python.chmod(0o755)
        return list(arguments.host_problems(str(python), flags))

    assert problems("exit 0", {}) == []
    ((key, message),) = problems("echo No module named sglang >&2; exit 1", {"x": 1})
    assert key == "generator.python" and message.startswith(f"{python} cannot import SGLang (No module named sglang); ")
    assert message.endswith("actor.sglang and generator.flags were not checked")
    refused = "cat > /dev/null; echo a warning >&2; echo actor.sglang.x: no such argument >&2; exit 64"
    assert problems(refused, {"x": 1}) == [("actor.sglang.x", "no such argument")]
    ((_, message),) = arguments.host_problems("/no/python", {})
    assert message.startswith("/no/python: No such file or directory; ") and "not checked" not in message


def test_a_start_still_refuses_all_of_it(tmp_path: Path) -> None:
    loaded = load_config("ppo-math", write_run(tmp_path), SERVERS)
    (problem,) = run_checks(loaded)
    assert problem.of_host and problem.key == "allocation_mode"


@pytest.mark.parametrize(
    ("key", "field"),
    [("group_size", "group_size"), ("dataset.train_bs_n_seqs", "train_bs_n_seqs"), ("algorithm.name", "algorithm")],
)
def test_a_size_that_the_newest_checkpoint_cannot_follow_is_seen_before_the_start(tmp_path, capsys, key, field) -> None:
    path = write_run(tmp_path)
    words = ["recover_mode=auto", "group_size=4", "dataset.train_bs_n_seqs=8"]
    config = load_config("ppo-math", path, words).config
    fileroot = config.external_configs.cluster_config.fileroot
    recover = RunPaths.for_trial(fileroot, config.experiment_name, config.trial_name).recover / "globalstep10"
    recover.mkdir(parents=True)
    same = asdict(config.identity)
    other = {"identity": {**same, field: 6}, "state": {}}
    (recover / "run.json").write_text(json.dumps(other))
    earlier = recover.with_name("globalstep9")
    earlier.mkdir()
    (earlier / "run.json").write_text(json.dumps({"identity": same, "state": {}}))  # newer by its time, not its step
    assert dry_run(path, *words) == 2
    assert f"{key}: {field}={same[field]} (the checkpoint has 6): {recover} cannot be" in capsys.readouterr().err
    assert dry_run(path, *words, "recover_ignore_changes=true") == 0
    for damaged in ("damaged", json.dumps({**other, "state": []}), json.dumps({**other, "state": None})):
        (recover / "run.json").write_text(damaged)
        assert dry_run(path, *words) == (2 if "[]" in damaged else 0)
    shutil.rmtree(recover)
    shutil.rmtree(earlier)
    elsewhere = tmp_path / "globalstep3"
    elsewhere.mkdir()
    (elsewhere / "run.json").write_text(json.dumps(other))
    capsys.readouterr()
    assert dry_run(path, *words, f"resume_from={elsewhere}") == 2
    assert f"{elsewhere} cannot be continued exactly" in capsys.readouterr().err


def test_fewer_steps_than_the_newest_checkpoint_has_are_seen_before_the_start(tmp_path, capsys) -> None:
    path = write_run(tmp_path)
    words = ["recover_mode=auto", "dataset.train_bs_n_seqs=8"]
    config = load_config("ppo-math", path, words).config
    fileroot = config.external_configs.cluster_config.fileroot
    newest = RunPaths.for_trial(fileroot, config.experiment_name, config.trial_name).recover / "globalstep10"
    newest.mkdir(parents=True)
    (newest / "run.json").write_text(json.dumps({"identity": asdict(config.identity), "state": {"step": 10}}))
    assert dry_run(path, *words, "exp_ctrl.total_train_steps=10") == 0
    capsys.readouterr()
    assert dry_run(path, *words, "exp_ctrl.total_train_steps=9") == 2
    said = (
        f"exp_ctrl.total_train_steps: 9 must be at least 10, the step that the run continues from ({newest}). Set it to"
    )
    assert said in capsys.readouterr().err
    assert main(["ppo-math", "--config", str(path), *words, "exp_ctrl.total_train_steps=9"]) == 2
    capsys.readouterr()
    other = ["dataset.train_bs_n_seqs=4", "exp_ctrl.total_train_steps=9"]  # its steps cannot be compared
    assert dry_run(path, *words, *other) == 2 and "total_train_steps" not in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--dry-run"], []])
def test_a_checkpoint_to_continue_from_must_be_there(tmp_path, capsys, words: list[str]) -> None:
    path, other = write_run(tmp_path), tmp_path / "other"

    def refused(*overrides: str) -> str:
        assert main(["ppo-math", "--config", str(path), *words, *overrides]) == 2
        assert not (tmp_path / "out" / "logs").exists(), "nothing was started"
        return capsys.readouterr().err

    recover = RunPaths.for_trial(str(tmp_path / "out"), "small", "one").recover
    way_out = "write a folder globalstepN of another trial, or null to begin at step 0"
    given = f"override 'resume_from={other}': resume_from: {other}"
    assert refused(f"resume_from={other}") == f"error: {given}: no such folder; {way_out}\n"
    none = f"recover_mode: resume needs a recover checkpoint of this trial; {recover}"
    assert f"{none}: no such folder; check experiment_name and trial_name, or" in refused("recover_mode=resume")
    recover.mkdir(parents=True)
    assert f"{none} has none; check experiment_name and trial_name, or" in refused("recover_mode=resume")
    other.mkdir()
    assert refused(f"resume_from={other}") == f"error: {given} is no recover checkpoint; {way_out}\n"
    (other / "globalstep3").mkdir()
    (other / "globalstep3" / "COMMITTED").touch()
    assert refused(f"resume_from={other}").endswith(f"did you mean {other}/globalstep3?\n")
    (other / "globalstep12").mkdir()
    assert refused(f"resume_from={other}").endswith(f"did you mean {other}/globalstep3?\n"), "12 is not complete"
    (other / "globalstep12" / "COMMITTED").touch()
    assert refused(f"resume_from={other}").endswith(f"did you mean {other}/globalstep12?\n")


def test_a_checkpoint_that_is_there_or_is_not_needed_is_no_problem(tmp_path: Path) -> None:
    path = write_run(tmp_path)
    other = tmp_path / "other" / "globalstep3"
    other.mkdir(parents=True)
    (other / "COMMITTED").touch()
    absent = f"resume_from={tmp_path / 'absent'}"
    assert dry_run(path, f"resume_from={other}", "recover_mode=resume") == 0
    assert dry_run(path, absent, "recover_mode=disabled") == 0
    assert dry_run(path, "exp_ctrl.benchmark_steps=1", absent) == 0
    assert dry_run(path, absent, *SERVERS) == 0, "a path of the cluster"
    own = RunPaths.for_trial(str(tmp_path / "out"), "small", "one").recover / "globalstep1"
    own.mkdir(parents=True)
    (own / "COMMITTED").touch()
    assert dry_run(path, "recover_mode=resume") == dry_run(path, absent) == 0


@pytest.mark.parametrize(
    ("experiment", "words", "key"),
    [
        ("ppo-math", ["dataset.prompt_field=promt"], "dataset.prompt_field"),
        ("ppo-math", ["evaluation.path=DATA", "evaluation.prompt_field=promt"], "evaluation.prompt_field"),
        ("sft", ["dataset.prompt_field=promt"], "dataset.prompt_field"),
    ],
)
def test_a_column_that_does_not_exist_is_a_problem_of_the_key_that_names_it(tmp_path, experiment, words, key) -> None:
    path = write_run(tmp_path) if experiment == "ppo-math" else write_run(tmp_path, SMALLEST_SFT)
    data = tmp_path / "prompts.jsonl"
    loaded = load_config(experiment, path, [word.replace("DATA", str(data)) for word in words])
    (problem,) = run_checks(loaded)
    assert str(problem).startswith(f"override '{key}=promt': {key}: {data}:1: prompt_field='promt' is not among the ")
    assert str(problem).endswith("; did you mean 'prompt'?")


def test_prompts_that_are_too_long_are_counted_and_none_that_fits_is_an_error(assets, tmp_path, capsys) -> None:
    path, data = write_run(tmp_path), tmp_path / "prompts.jsonl"
    model = f"actor.path={assets.model}"
    rows = [{"prompt": "9" * (4 if i < 8 else 60), "solutions": ["1"]} for i in range(64)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert dry_run(path, model, "dataset.max_prompt_len=4", "dataset.train_bs_n_seqs=8") == 0
    said = "56 of 64 prompts are left out: 56 with more than dataset.max_prompt_len=4 tokens (the longest has 60)"
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "left out" in line]
    assert "WARNING" in line and line.endswith(f"{data}: {said}")
    assert dry_run(path, model, "dataset.max_prompt_len=60", "dataset.train_bs_n_seqs=8") == 0
    assert "left out" not in capsys.readouterr().out
    assert dry_run(path, model, "dataset.max_prompt_len=3", "dataset.train_bs_n_seqs=8") == 2
    assert f"dataset.path: {data}: max_prompt_len=3 leaves none of 64 prompts" in capsys.readouterr().err


def test_every_model_that_a_job_loads_must_be_one_of_the_architecture_of_the_actor(assets, tmp_path) -> None:
    path = write_run(tmp_path)
    save_model(tmp_path / "other", seed=1, hidden_size=48)
    (tmp_path / "empty").mkdir()
    (tmp_path / "bare").mkdir()
    shutil.copy(assets.model / "config.json", tmp_path / "bare")
    evaluates = ["mode=bench", f"evaluation.path={tmp_path / 'prompts.jsonl'}", f"actor.path={assets.model}"]
    assert dry_run(path, *evaluates, f"bench.models=[{assets.model}]") == 0
    models = [assets.model, *(tmp_path / name for name in ("none", "empty", "bare", "other"))]
    loaded = load_config("ppo-math", path, [*evaluates, f"bench.models=[{', '.join(map(str, models))}]"])
    said = [problem.message for problem in run_checks(loaded) if problem.key == "bench.models"]
    for text, reason in zip(said, ("no such folder", "config.json", "no .*safetensors", "other shapes"), strict=True):
        assert re.search(reason, text), text
    serves = ["mode=serve", f"serve.model={tmp_path / 'none'}", f"actor.path={assets.model}"]
    assert dry_run(path, *serves) == 2 and dry_run(path, *serves, "serve.follow=true") == 0


def saved_with(path: Path, data: Path, *words: str, max_prompt_len: int = 16) -> None:
    """A recover checkpoint of a run of `path` with the prompts of `data`."""
    config = load_config("ppo-math", path, words).config
    encoder = Encoder(load_tokenizer(config.actor.path))
    dataset = PromptDataset.load(data, encoder, max_prompt_len=max_prompt_len, seed=config.seed)
    staleness = config.staleness.max_staleness
    rules = make_rules(num_prompts=len(dataset), batch_size=4, max_staleness=staleness)
    fileroot = config.external_configs.cluster_config.fileroot
    recover = RunPaths.for_trial(fileroot, config.experiment_name, config.trial_name).recover / "globalstep10"
    recover.mkdir(parents=True, exist_ok=True)
    (recover / "run.json").write_text(json.dumps({"identity": asdict(config.identity), "state": {}}))
    write_state(
        recover,
        "rollout",
        {"group_size": 1, "producer": {"dataset": {**dataset.identity(), "position": 0}, "settings": rules.settings}},
    )


def test_another_data_set_than_that_of_the_newest_checkpoint_is_seen_before_the_start(assets, tmp_path, capsys) -> None:
    path, data = write_run(tmp_path), tmp_path / "prompts.jsonl"
    auto = ("recover_mode=auto", f"actor.path={assets.model}")
    saved_with(path, data, *auto)

    def refused(*words: str) -> str:
        assert dry_run(path, *auto, *words) == 2
        err = capsys.readouterr().err
        assert "globalstep10 cannot be continued exactly" in err
        assert main(["ppo-math", "--config", str(path), *auto, *words]) == 2, "a start, without a dry run"
        assert capsys.readouterr().err == err
        assert dry_run(path, *auto, *words, "recover_ignore_changes=true") == 0
        capsys.readouterr()
        return err

    assert dry_run(path, *auto) == 0
    fewer = f"dataset.path={write_prompts(tmp_path / 'fewer.jsonl', num_rows=3)}"
    assert "dataset.path: the data set of the checkpoint has num_prompts=4, this one 3: " in refused(
        fewer, "dataset.train_bs_n_seqs=4"
    )
    more = f"dataset.path={write_prompts(tmp_path / 'more.jsonl', num_rows=5)}"
    assert "has num_prompts=4, this one 5: " in refused(more)
    other = tmp_path / "other.jsonl"
    other.write_text(data.read_text().replace("0 + 1", "1 + 1").replace("boxed{1}", "boxed{2}"))
    assert "its rows are not those of the checkpoint's data set: " in refused(f"dataset.path={other}")
    assert "seed: 7 (the checkpoint has 1): " in refused("seed=7")
    assert "shuffle_dataset: false (the checkpoint has true): " in refused("shuffle_dataset=false")
    assert "staleness.max_staleness: 9 (the checkpoint has " in refused("staleness.max_staleness=9")
    assert "staleness.over_age: mask (the checkpoint has wait): " in refused("staleness.over_age=mask")
    assert "staleness.in_order: true (the checkpoint has false): " in refused("staleness.in_order=true")
    sampled = refused("algorithm.dynamic_sampling=true", "group_size=4", "recover_ignore_changes=false")
    assert "algorithm.dynamic_sampling: true (the checkpoint has false): " in sampled
