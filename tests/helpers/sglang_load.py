"""Load weights into a model of SGLang, twice, in buckets, with the server's own interpreter and no GPU.

    python sglang_load.py MODEL OVERRIDE FIRST.safetensors SECOND.safetensors

MODEL has a config.json; OVERRIDE, as JSON, can make its weights FP8. Prints, as JSON on the last line, for each file
{parameter: checksum}, {parameter: format} and the number of its buckets that the model itself loaded. Nothing is
computed with the weights: a CPU without AMX has no kernels for FP8.
"""

import importlib
import json
import runpy
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[2]


def hooks() -> Any:
    """The server's hooks, which have to be installed before its modules load."""
    path = ROOT / "rollout/inference/sglang/hooks/main.py"
    runpy.run_path(str(path))["make_importable"]()
    return importlib.import_module("rollout.inference.sglang.hooks.table")


def build(folder: str, override: str) -> Any:
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.layers.moe import initialize_moe_config
    from sglang.srt.model_loader.loader import _get_quantization_config, _initialize_model
    from sglang.srt.model_loader.utils import set_default_torch_dtype
    from sglang.srt.server_args import prepare_server_args, set_global_server_args_for_scheduler

    args = prepare_server_args(
        ["--model-path", folder, "--device", "cpu", "--attention-backend", "torch_native", "--load-format", "dummy",
         "--dtype", "bfloat16", "--skip-tokenizer-init", "--json-model-override-args", override]
    )  # fmt: skip
    config = ModelConfig.from_server_args(args)
    set_global_server_args_for_scheduler(args)
    store = f"file://{folder}/rendezvous"
    init_distributed_environment(backend="gloo", world_size=1, rank=0, local_rank=0, distributed_init_method=store)
    initialize_model_parallel()
    initialize_dp_attention(server_args=args, model_config=config)
    initialize_moe_config(args)
    load = LoadConfig(load_format="dummy")
    with set_default_torch_dtype(torch.bfloat16):
        return _initialize_model(config, load, _get_quantization_config(config, load))


def main() -> None:
    folder, override, *files = sys.argv[1:]
    module = hooks()
    from sglang.srt.plugins import load_plugins

    module.install()
    load_plugins()
    from rollout.bucket import FlatBucket
    from rollout.inference.sglang.hooks.checksums import position_checksum
    from rollout.inference.sglang.hooks.recorded_copies import RecordedCopies

    model = build(folder, override)
    load_weights, copies = model.load_weights, RecordedCopies()
    results = []
    for file in files:
        loaded: list[Any] = []
        model.load_weights = lambda tensors, loaded=loaded: (loaded.append(tensors), load_weights(tensors))
        items = list(load_file(file).items())
        for part in range(2):  # a bucket may hold a weight without its factors
            copies.load(model, FlatBucket.of(dict(items[part::2])))
        named = dict(model.named_parameters())
        results.append(
            [
                {name: int(position_checksum(p)) for name, p in named.items()},
                {name: str(p.dtype).removeprefix("torch.") for name, p in named.items()},
                len(loaded),
            ]
        )
    print(json.dumps(results))


if __name__ == "__main__":
    main()
