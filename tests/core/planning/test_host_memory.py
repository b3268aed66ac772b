"""Host memory of a run: against what processes of measured updates took, and against bytes that a real engine keeps."""

import json
from dataclasses import replace
from pathlib import Path
from statistics import median

from core.planning.memory import host_of_rank, plan_memory
from core.planning.scene import GPUS, Scene
from tools.bench.gpu.plan import CASES, Case

MEASURED = Path(__file__).parents[3] / "benchmarks/predictions/memory-measured.json"


def scene_of_case(case: Case) -> Scene:
    return Scene(
        gpu=GPUS["H200"], on_gpu=True, engines=(replace(case.engine, is_drawn=True),), servers=None, shares_gpus=False,
        n_nodes=1, n_gpus_per_node=8, bucket_bytes=0, sequences=1, prompts=1, group_size=1, minibatches=1,
        prompt_tokens=case.length, answer_tokens=0, max_staleness=0, writes_checkpoints=False,
    )  # fmt: skip


def test_a_rank_takes_the_host_memory_that_was_measured() -> None:
    """Print each row, then the median and the largest error."""
    measured, errors = json.loads(MEASURED.read_text()), {}
    for case in CASES:
        scene = scene_of_case(case)
        for plan, row in zip(plan_memory(scene).ranks, measured[str(case)]["stages"], strict=True):
            found = host_of_rank(scene, plan)
            errors[case, plan.stage] = found / row["host"] - 1
            print(f"{case}, stage {plan.stage}: {found / 1e9:.2f} GB, {row['host'] / 1e9:.2f} measured")
    sizes = sorted(map(abs, errors.values()))
    print(f"median {median(sizes):.1%}, worst {sizes[-1]:.1%}")
    last = [error for (case, stage), error in errors.items() if case.layout.pp > 1 and stage]
    assert len(sizes) == 30 and sizes[-3] < 0.05 and median(sizes) < 0.01
    assert all(0 < error < 0.15 for error in last), "an upper bound"
