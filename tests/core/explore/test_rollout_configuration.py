"""What the rollout process gets of the configuration."""

from contextlib import closing
from pathlib import Path

from core.checks.rules import load_config
from core.config.experiments import PPOMATHConfig
from core.explore.batches import open_experience
from helpers.config_inputs import SMALLEST_PPO, write_run
from rollout.experience import MemoryExperience, SQLiteExperience

TRAINING = ["ppo.gen.temperature=0.7", "ppo.gen.top_p=0.9", "ppo.gen.top_k=5", "ppo.gen.max_new_tokens=6"]


def config_of(folder: Path, *overrides: str) -> PPOMATHConfig:
    config = load_config("ppo-math", write_run(folder, SMALLEST_PPO), list(overrides)).config
    assert isinstance(config, PPOMATHConfig)
    return config


def test_training_and_evaluation_sample_with_their_own_keys(tmp_path: Path) -> None:
    own = ["evaluation.temperature=0.3", "evaluation.max_new_tokens=4", "evaluation.path=prompts.jsonl"]
    config = config_of(tmp_path, *TRAINING, *own)
    (one,), (held_out,) = config.sets.values(), config.evaluation_sets.values()
    training, evaluation = config.set_sampling(one, (1,), (2,)), config.set_sampling(held_out, (1,), (2,))
    assert training.stop_token_ids == evaluation.stop_token_ids == (1,)
    assert (training.temperature, training.top_p, training.top_k, training.max_new_tokens) == (0.7, 0.9, 5, 6)
    assert (evaluation.temperature, evaluation.max_new_tokens) == (0.3, 4)
    assert (evaluation.top_p, evaluation.top_k) != (0.9, 5), "nothing of the answers is cut off in evaluation"


def test_evaluation_is_greedy_and_as_long_as_training_by_default(tmp_path: Path) -> None:
    config = config_of(tmp_path, *TRAINING, "evaluation.path=prompts.jsonl")
    (one,) = config.evaluation_sets.values()
    evaluation = config.set_sampling(one, (), ())
    assert (evaluation.temperature, evaluation.max_new_tokens) == (0.0, 6)


def test_a_bench_job_does_not_open_the_store_of_a_run(tmp_path: Path) -> None:
    shared = ["experience.store=sqlite", f"experience.path={tmp_path / 'store.db'}"]
    models = ["mode=bench", f"bench.models=[{tmp_path}]", "evaluation.path=prompts.jsonl"]
    for overrides, kind in ((shared, SQLiteExperience), ([*shared, *models], MemoryExperience)):
        with closing(open_experience(config_of(tmp_path, *overrides))) as store:
            assert isinstance(store, kind)
