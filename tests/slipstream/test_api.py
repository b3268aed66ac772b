"""Configurations from Python: what is given arrives."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

import slipstream
from core.config.parsing.problems import ConfigError
from core.runs.paths import RunPaths
from helpers.config_inputs import SMALLEST_PPO, write_run
from slipstream.api import _arguments, _flags, _NewRows

CHANGES: dict[str, Any] = {
    "seed": 0, "ppo.adv_norm": False, "ppo.kl_ctl": 0.0, "shuffle_dataset": False, "actor.optimizer.weight_decay": 0.0,
    "actor.optimizer.lr": 1e-6, "exp_ctrl.total_train_steps": None, "wandb.tags": [], "ppo.gen.top_k": -1,
    "prompt.system": "", "recover_mode": "disabled",
}  # fmt: skip
"""Values that are easily taken for no value at all, and some others."""
BEFORE = {
    "seed": 7, "ppo.adv_norm": True, "ppo.kl_ctl": 0.5, "shuffle_dataset": True, "actor.optimizer.weight_decay": 0.3,
    "actor.optimizer.lr": 1.0, "exp_ctrl.total_train_steps": 3, "wandb.tags": ["a"], "ppo.gen.top_k": 4,
    "prompt.system": "Be brief.", "recover_mode": "auto",
}  # fmt: skip
"""What the file has under the same keys."""


def value_of(config: Any, dotted: str) -> Any:
    for name in dotted.split("."):
        config = getattr(config, name)
    return list(config) if isinstance(config, tuple) else config


def with_values(folder: Path) -> tuple[Path, dict[str, Any]]:
    """A configuration as a file and as a mapping of dotted and nested keys."""
    path = write_run(folder, SMALLEST_PPO)
    tree = yaml.safe_load(path.read_text())
    for dotted, value in BEFORE.items():
        *above, key = dotted.split(".")
        section = tree
        for name in above:
            section = section.setdefault(name, {})
        section[key] = value
    path.write_text(yaml.safe_dump(tree))
    return path, tree


@pytest.mark.parametrize("key", CHANGES)
def test_an_override_of_any_value_wins_over_the_file(key: str, tmp_path: Path) -> None:
    path, tree = with_values(tmp_path)
    for config in (path, tree):
        changed = slipstream.load_config(config, **{key: CHANGES[key]})
        assert value_of(changed, key) == CHANGES[key] != BEFORE[key]
        others = {other: value_of(changed, other) for other in BEFORE if other != key}
        assert others == {other: value for other, value in BEFORE.items() if other != key}


@pytest.mark.parametrize("text", [
    "{prompt}", " {prompt} ", "Q: {prompt}\nA:", "{prompt} # think", "- {prompt}", '"{prompt}"', "# {prompt}",
    "*{prompt}", "{prompt}: é 😀", "{prompt}\\n", "!{prompt}", "%d {prompt}", "@{prompt}", "{prompt},\ttab",
    "word " * 40 + "{prompt}",
])  # fmt: skip
def test_a_text_arrives_as_it_is(text: str, tmp_path: Path) -> None:
    path, tree = with_values(tmp_path)
    for config in (slipstream.load_config(path, **{"prompt.template": text}),
                   slipstream.load_config({**tree, "prompt.template": text})):  # fmt: skip
        assert value_of(config, "prompt.template") == text


def test_dotted_keys_of_a_mapping_are_overrides_too_and_arguments_win(tmp_path: Path) -> None:
    _, tree = with_values(tmp_path)
    config = slipstream.load_config({**tree, "ppo.kl_ctl": 0.0, "ppo.adv_norm": False}, **{"ppo.kl_ctl": 0.25})
    assert (value_of(config, "ppo.kl_ctl"), value_of(config, "ppo.adv_norm")) == (0.25, False)
    with _arguments({"ppo.kl_ctl": 0.0, "ppo.adv_norm": False}, {"ppo.kl_ctl": 0.25}) as (_, words):
        assert words == ["ppo.adv_norm=false", "ppo.kl_ctl=0.25"], "none that another one replaces"


def test_an_algorithm_is_no_experiment(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="experiment: must be one of ppo-math, sft, dpo, got 'grpo'"):
        slipstream.train(with_values(tmp_path)[1], experiment="grpo")


def test_problems_of_a_mapping_do_not_name_the_file_that_it_is_written_to(tmp_path: Path) -> None:
    path, tree = with_values(tmp_path)

    def problems(config: Any, **overrides: Any) -> list[str]:
        with pytest.raises(ConfigError) as caught:
            slipstream.load_config(config, **overrides)
        return [str(problem) for problem in caught.value.problems]

    unknown = "grup_size: unknown key; did you mean 'group_size'?"
    assert problems({**tree, "grup_size": 2}) == [f"config: {unknown}"]
    assert problems({**tree, "actor": {"path": "/none"}})[0].startswith("config: actor.path: /none: no such folder")
    assert problems(tree, **{"seed.x": 1}) == ["override 'seed.x=1': seed: is a value (config), not a section"]
    path.write_text(yaml.safe_dump({**tree, "grup_size": 2}))
    assert problems(path)[0].startswith(f"{path}:") and problems(path)[0].endswith(unknown)


def finished_run(folder: Path) -> slipstream.Run:
    """A run as its files would show it."""
    config = slipstream.load_config(write_run(folder, SMALLEST_PPO), trial_name="first")
    paths = RunPaths.for_trial(str(folder), config.experiment_name, "first")
    paths.logs.mkdir(parents=True)
    rows = [{"step": i, "reward/mean": i / 10, "time/step": 0.5} for i in (1, 2, 3)]
    (paths.logs / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return slipstream.Run(config=config, logs=paths.logs, checkpoints=paths.checkpoints, recover=paths.recover)


def test_a_run_has_its_newest_model_its_curve_and_a_short_text(tmp_path: Path) -> None:
    run = finished_run(tmp_path)
    assert run.model is None and run.samples() == []
    for step in (9, 10):
        folder = run.checkpoints / "actor" / f"epoch1epochstep{step}globalstep{step}"
        folder.mkdir(parents=True)
        (folder / "config.json").touch()
    assert run.model == folder
    assert run.plot(tmp_path / "curve.png").axes[0].lines[0].get_ydata().tolist() == [0.1, 0.2, 0.3]
    assert (tmp_path / "curve.png").stat().st_size > 1000
    assert repr(run) == f"<Run {run.config.experiment_name}/first: 3 steps, {run.logs}>"


def test_each_new_row_of_metrics_is_passed_on_once(tmp_path: Path) -> None:
    file, seen = tmp_path / "metrics.jsonl", []
    file.write_text('{"step": 1}\n')
    rows = _NewRows(file, seen.append)
    rows()
    with file.open("a") as metrics:
        metrics.write('{"step": 2}\n{"ste')
        metrics.flush()
        rows()
        metrics.write('p": 3}\n')
    rows()
    rows()
    assert seen == [{"step": 2}, {"step": 3}]


def test_a_failed_run_raises_the_cause_that_its_log_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_run(tmp_path, SMALLEST_PPO)
    (tmp_path / "fails.py").write_text("def score(prompt, text):\n    return 0.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    config = slipstream.load_config(path, trial_name="first")
    fileroot = config.external_configs.cluster_config.fileroot
    logs = RunPaths.for_trial(fileroot, config.experiment_name, "first").logs

    def fails(*arguments: object, **options: object) -> int:
        logs.mkdir(parents=True, exist_ok=True)
        (logs / "master_worker.log").write_text(
            "t quickstart INFO: x\nt quickstart ERROR: no such thing (a.py, line 5)\n"
        )
        return 1

    monkeypatch.setattr("slipstream.api._run", fails)
    with pytest.raises(slipstream.RunError, match=r"exit code 1 .*: no such thing \(a.py, line 5\)") as caught:
        slipstream.train(path, trial_name="first")
    assert (caught.value.code, caught.value.cause) == (1, "no such thing (a.py, line 5)")
    assert issubclass(slipstream.ConfigError, ValueError)


def test_texts_in_lists_paths_and_words_for_other_values_arrive(tmp_path: Path) -> None:
    path, _ = with_values(tmp_path)
    given = {
        "wandb.tags": ["é 😀", "a, b"],
        "actor.path": tmp_path / "model",
        "ppo.kl_ctl": "1e-3",
        "seed": "${group_size}",
    }
    config = slipstream.load_config(path, **given, **{"exp_ctrl.total_train_steps": "null"})
    assert value_of(config, "wandb.tags") == ["é 😀", "a, b"] and config.actor.path == str(tmp_path / "model")
    assert (value_of(config, "ppo.kl_ctl"), config.seed) == (1e-3, config.group_size)
    assert value_of(config, "exp_ctrl.total_train_steps") is None


def test_options_of_a_command_that_are_0_arrive() -> None:
    options = {"seed": 0, "n_sampling": 0, "temperature": 0.5, "overwrite": True, "ignore_run": False, "config": None}
    assert _flags(options) == ["--seed", "0", "--n_sampling", "0", "--temperature", "0.5", "--overwrite"]


def first_reward(prompt: slipstream.Prompt, text: str) -> float:
    return float(text in prompt.answers)


def staged(folder: Path) -> dict[str, Any]:
    """Fine-tuning and then GRPO, which have no trial name."""
    (folder / "pairs.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 8)
    shared = yaml.safe_load(write_run(folder, SMALLEST_PPO).read_text())
    tuning = {"path": str(folder / "pairs.jsonl"), "max_seqlen": 16, "train_bs_n_seqs": 4}
    prompts, ppo = shared.pop("dataset"), {**shared.pop("ppo"), "ppo_n_minibatches": 1}
    grpo = {"dataset": prompts, "ppo": ppo, "group_size": 4, "reward": {"function": first_reward}}
    del shared["trial_name"]
    return {**shared, "stages": [{"sft": {"dataset": tuning}}, {"grpo": grpo}]}


def test_stages_of_a_mapping_are_those_of_a_file_and_take_functions(tmp_path: Path) -> None:
    tree = staged(tmp_path)
    stages = tree.pop("stages")
    for config in (
        slipstream.load_config({**tree, "stages": stages}, trial_name="a", seed=5),
        slipstream.load_config(tree, stages=stages, trial_name="a", seed=5),
    ):
        assert (config.run_name, config.seed, config.NAME) == ("small/a.2-grpo", 5, "ppo-math")
        assert config.reward.function == "test_api:first_reward"


def test_problems_of_every_stage_of_a_mapping_name_it(tmp_path: Path) -> None:
    tree = staged(tmp_path)
    tree["stages"][0]["sft"]["dataset"]["path"] = "/none"  # found by the checks
    tree["stages"][1]["grpo"]["group_siz"] = 4  # found by the reader
    with pytest.raises(ConfigError) as caught:
        slipstream.load_config(tree)
    first, second = map(str, caught.value.problems)
    assert first.startswith("config: stage 1-sft: dataset.path: /none: cannot read the data set")
    assert second.startswith("config: stage 2-grpo: group_siz: unknown key; did you mean 'group_size'?")
    with pytest.raises(ConfigError, match="^config: stages.sftt: unknown stage; did you mean 'sft'"):
        slipstream.load_config({**tree, "stages": [{"sftt": {}}]})


@pytest.mark.nightly
def test_stages_run_one_after_the_other_and_the_run_is_the_last(tmp_path: Path) -> None:
    files = slipstream.make_demo_data(tmp_path, seed=1)
    tuning = {"dataset": {"path": str(files.sft), "max_seqlen": 16, "train_bs_n_seqs": 4}}
    stage = {"sft": {**tuning, "exp_ctrl": {"total_train_steps": 2}}}
    shared = {"experiment_name": "staged", "actor.path": str(files.model)}
    seen: list[dict[str, float]] = []
    root = {"external_configs.cluster_config.fileroot": str(tmp_path)}
    run = slipstream.train({**shared, **root, "stages": [stage, stage]}, on_step=seen.append)
    assert [row["step"] for row in seen] == [1, 2, 1, 2] and seen[2:] == run.metrics()
    first, second = sorted((tmp_path / "logs").glob("*/staged/*"))  # one default trial name, of both
    assert run.logs == second and second.name == first.name.replace("1-sft", "2-sft")
    assert run.model is not None and run.model.is_relative_to(run.checkpoints)
