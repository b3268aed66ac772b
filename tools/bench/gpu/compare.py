"""Compare the planner with other estimators of memory and servers, on the cases that were measured.

    pip download megatron-core==0.19.0 --no-deps --python-version 3.12 --only-binary :all:
    pip install --target FOLDER aiconfigurator-core==0.12.0
    python -m tools.bench.gpu.compare --megatron megatron_core-0.19.0-*.whl --aiconfigurator FOLDER

Prints the error of the planner and that of the other for each case of benchmarks/predictions/*-measured.json, and the
median and the worst. Megatron's theoretical_memory_usage is read out of its wheel; it needs no torch. The rows of
SimuMax need nothing: those that it publishes are here, with its own predictions.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import tempfile
import types
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from allocation import ParallelLayout
from core.planning.memory import engine_peak
from core.planning.rates import calibration_of, wave_seconds
from model_specs.families import parse_config
from tools.bench import SHAPES
from tools.bench.gpu.plan import CASES, Case
from tools.bench.gpu.servers import planned_server

MEASURED = Path(__file__).parents[3] / "benchmarks/predictions"
_GPU = "H200"
Row = tuple[str, float, float, float]
"""Case, what was measured, our prediction, that of the other."""


def memory(wheel: Path) -> Iterator[Row]:
    """Yield the peak in bytes of the first pipeline stage of each case."""
    files = zipfile.ZipFile(wheel)
    (name,) = (name for name in files.namelist() if "/theoretical_memory_usage." in name)
    other = types.ModuleType("theoretical_memory_usage")
    other.__dict__.update(is_hybrid_model=lambda given: False, print_rank_0=print)
    exec(re.sub(r"from \.utils import .*", "", files.read(name).decode()), other.__dict__)
    measured = json.loads((MEASURED / "memory-measured.json").read_text())
    for case in CASES:
        given = _megatron_arguments(case)
        guess = other.compute_weight_and_optimizer_memory(given)
        guess += other.compute_activation_memory(given, case.microbatches)
        ours = engine_peak(case.engine, 0, longest=max(case.lengths))
        yield str(case), measured[str(case)]["stages"][0]["peak"], ours, guess


def _megatron_arguments(case: Case) -> types.SimpleNamespace:
    """Return a case in the words of Megatron, which has selective and full recomputation alone."""
    config, layout, moe = case.engine.config, case.layout, case.engine.config.moe
    return types.SimpleNamespace(
        num_layers=config.num_layers, hidden_size=config.hidden_size, kv_channels=config.head_dim, swiglu=True,
        ffn_hidden_size=config.intermediate_size, num_attention_heads=config.num_heads, group_query_attention=True,
        num_query_groups=config.num_kv_heads, padded_vocab_size=config.vocab_size, normalization="RMSNorm",
        untie_embeddings_and_output_weights=not config.tied, add_bias_linear=False, multi_latent_attention=False,
        mtp_num_layers=None, num_experts=moe and moe.num_experts, moe_layer_freq=1, moe_latent_size=None,
        moe_router_topk=moe and moe.top_k, moe_ffn_hidden_size=moe and moe.intermediate_size,
        moe_shared_expert_intermediate_size=(moe.shared_intermediate_size or None) if moe else None,
        expert_model_parallel_size=layout.ep, expert_tensor_parallel_size=1, world_size=layout.world_size,
        pipeline_model_parallel_size=layout.pp, virtual_pipeline_model_parallel_size=None,
        tensor_model_parallel_size=layout.tp, data_parallel_size=layout.dp * layout.cp, sequence_parallel=True,
        use_distributed_optimizer=True, micro_batch_size=1, seq_length=case.tokens // layout.cp,
        recompute_granularity="full" if case.recompute == "full" else "selective",
    )  # fmt: skip


def servers(folder: Path) -> Iterator[Row]:
    """Yield the new tokens/s of each wave of requests."""
    sys.path.append(str(folder))
    from aiconfigurator_core.sdk.backends.factory import get_backend
    from aiconfigurator_core.sdk.config import ModelConfig, RuntimeConfig
    from aiconfigurator_core.sdk.models import get_model
    from aiconfigurator_core.sdk.perf_database import get_database

    database, backend = get_database("h200_sxm", "sglang", "0.5.14"), get_backend("sglang")
    calibration = calibration_of(_GPU)
    assert calibration is not None, "it is part of this package"
    for shape, rows in json.loads((MEASURED / "servers-measured.json").read_text()).items():
        with tempfile.TemporaryDirectory() as model:
            Path(model, "config.json").write_text(json.dumps(SHAPES[shape]))
            built = get_model(model, ModelConfig(), "sglang")
        for load, measured in rows[_GPU].items():
            if load == "cache":
                continue
            count, prompt, answer = map(int, re.findall(r"\d+", load))
            one = RuntimeConfig(batch_size=count, isl=prompt, osl=answer)
            milliseconds = backend.run_static(built, database, one, mode="static").get_summary_df().iloc[0]
            guess = 1e3 * count * answer / milliseconds["request_latency"]
            seconds = wave_seconds(planned_server(shape), calibration, running=count, prompt=prompt, answer=answer)
            yield f"{shape}, {load}", measured, count * answer / seconds, guess


_LLAMA = dict(
    architectures=["LlamaForCausalLM"], model_type="llama", vocab_size=128256, max_position_embeddings=131072,
    rms_norm_eps=1e-5, rope_theta=500000.0, hidden_act="silu", tie_word_embeddings=False, num_key_value_heads=8,
)  # fmt: skip
_SIZES = {
    "12 layers of 70B": dict(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=12, num_attention_heads=64
    ),
    "4 layers of 405B": dict(
        hidden_size=16384, intermediate_size=53248, num_hidden_layers=4, num_attention_heads=128
    ),
}  # fmt: skip
_SIMUMAX: dict[tuple[str, int], tuple[tuple[ParallelLayout, float, float], ...]] = {
    ("12 layers of 70B", 4096): (
        (ParallelLayout(pp=2, dp=4), 66.55, 66.44), (ParallelLayout(tp=2, dp=4), 60.68, 60.51),
        (ParallelLayout(tp=4, dp=2), 39.07, 38.94), (ParallelLayout(tp=8), 28.29, 28.17),
    ),
    ("4 layers of 405B", 4096): (
        (ParallelLayout(pp=2, dp=4), 87.08, 86.88), (ParallelLayout(tp=2, dp=4), 81.59, 81.31),
        (ParallelLayout(tp=4, dp=2), 52.89, 52.68), (ParallelLayout(tp=8), 38.57, 38.38),
    ),
    ("12 layers of 70B", 32768): (
        (ParallelLayout(tp=2, cp=4), 68.43, 68.16), (ParallelLayout(cp=8), 104.51, 104.43),
    ),
    ("4 layers of 405B", 32768): (
        (ParallelLayout(tp=2, cp=4), 87.03, 86.55), (ParallelLayout(cp=8), 139.22, 139.13),
    ),
    ("12 layers of 70B", 131072): (
        (ParallelLayout(tp=2, cp=4), 112.67, 111.80), (ParallelLayout(cp=8), 147.99, 147.89),
    ),
    ("4 layers of 405B", 131072): ((ParallelLayout(tp=2, cp=4), 118.13, 116.50),),
}  # fmt: skip
"""(model, length): layout, GiB allocated at the peak on B200, and SimuMax's prediction; dense rows of the release v1.2
(https://github.com/MooreThreads/SimuMax), Megatron without recomputation."""


def simumax() -> Iterator[Row]:
    """Yield the peaks in GiB that SimuMax publishes, of the largest stage."""
    for (model, length), rows in _SIMUMAX.items():
        for layout, measured, guess in rows:
            engine = replace(
                CASES[0].engine, config=parse_config(_LLAMA | _SIZES[model]), layout=layout, tokens=length,
                recompute="none",
            )  # fmt: skip
            ours = max(engine_peak(engine, stage, longest=length) for stage in range(layout.pp)) / 2**30
            yield f"{model} {length} {layout}", measured, ours, guess


def show(title: str, rows: Iterator[Row]) -> None:
    """Print a table of errors."""
    print(f"\n| {title} | measured | planner | other |\n|---|---|---|---|")
    errors: list[tuple[float, float]] = []
    for name, measured, *guesses in rows:
        ours, others = (guess / measured - 1 for guess in guesses)
        errors.append((ours, others))
        print(f"| {name} | {measured:,.0f} | {ours:+.1%} | {others:+.1%} |", flush=True)
    columns = [[own for own, _ in errors], [other for _, other in errors]]
    for word, of in (("median", statistics.median), ("worst", max)):
        print(f"| {word} | | {' | '.join(f'{of(map(abs, column)):.1%}' for column in columns)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megatron", type=Path, metavar="WHEEL", help="of megatron-core 0.19")
    parser.add_argument("--aiconfigurator", type=Path, metavar="FOLDER", help="with aiconfigurator-core 0.12")
    given = parser.parse_args()
    show("peak in GiB; other: SimuMax", simumax())
    if given.megatron is not None:
        show("peak in bytes; other: Megatron's theoretical_memory_usage", memory(given.megatron))
    if given.aiconfigurator is not None:
        show("new tokens/s; other: aiconfigurator", servers(given.aiconfigurator))


if __name__ == "__main__":
    main()
