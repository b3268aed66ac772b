"""A recipe to plan, of a model that has nothing but config.json."""

import json
from pathlib import Path
from typing import Any

from core.checks.rules import load_config
from core.planning.scene import Scene, find_gpu, scene_of
from tools.bench import SHAPES

RECIPE = """\
experiment_name: planned
trial_name: one
allocation_mode: sglang.d8m1p1+d4m2p1
n_nodes: 2
n_gpus_per_node: 8
actor: {path: MODEL}
actor_train: {mb_spec: {max_tokens_per_mb: 16384}}
dataset: {path: prompts.jsonl, max_prompt_len: 1024, train_bs_n_seqs: 16}
group_size: 8
ppo:
  gen: {max_new_tokens: 7168}
  kl_ctl: 0.0
  disable_value: true
"""


def write_recipe(folder: Path, raw: dict[str, Any]) -> Path:
    (folder / "model").mkdir(exist_ok=True)
    (folder / "model/config.json").write_text(json.dumps(raw))
    path = folder / "recipe.yaml"
    path.write_text(RECIPE.replace("MODEL", str(folder / "model")))
    return path


def make_scene(folder: Path, *words: str, raw: dict[str, Any] | None = None, gpu: str = "H100") -> Scene:
    path = write_recipe(folder, raw or SHAPES["7B"])
    return scene_of(load_config("ppo-math", path, words).config, find_gpu(gpu))
