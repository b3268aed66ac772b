"""The measurements of `python -m tools.bench cpu`. Each yields figures; what is compared runs alternately."""

import asyncio
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import psutil
import torch
from safetensors.torch import load_file, save_file

from allocation import ParallelLayout
from core.algorithms.offline import SFT
from core.monitoring.metrics import read_rows
from mcore_adapter.data.batch import PackedBatch
from mcore_adapter.device import get_device
from mcore_adapter.hf.safetensors_folder import ShardWriter
from mcore_adapter.settings import EngineConfig, EngineModel, OptimizerConfig
from model_specs.families import parse_config
from model_specs.tensors import hf_shapes
from rollout.experience import Episode, EveryEpisode, Experience, MemoryExperience, SQLiteExperience, Tags
from rollout.experience.episode import summary
from rollout.inference.embedded.generator import EmbeddedGenerator
from rollout.types import PROMPT_VERSION, GenerateRequest, SamplingParams, Trajectory
from tools import convert
from tools.bench import Figure, Scene
from tools.bench.workload import additions
from tools.demo.data import save_model

ROUNDS = 5
WARM_UP_STEPS = 5


def small_model(folder: Path, name: str, *, hidden_size: int, num_layers: int) -> Path:
    """Return a random Qwen2-shaped model with the demo's tokenizer, made where it does not exist."""
    path = folder / name
    if not path.exists():
        save_model(
            path,
            seed=0,
            hidden_size=hidden_size,
            intermediate_size=3 * hidden_size,
            num_hidden_layers=num_layers,
            num_attention_heads=hidden_size // 32,
            num_key_value_heads=hidden_size // 64,
            max_position_embeddings=1024,
        )
    return path


def alternate(first: Callable[[], float], second: Callable[[], float]) -> tuple[float, float]:
    """Return the medians of two rates measured in turn, after one round of warm-up."""
    pairs = [(first(), second()) for _ in range(ROUNDS + 1)][1:]
    return float(np.median([a for a, _ in pairs])), float(np.median([b for _, b in pairs]))


def train_step(scene: Scene) -> Iterator[Figure]:
    """Run one optimizer update against the plain Hugging Face step on the same padded-free batch."""
    from mcore_adapter.engine import MegatronEngine
    from mcore_adapter.parallel import destroy_parallel, initialize_parallel

    device = get_device("cpu")
    with device.activate():
        rendezvous = f"file://{scene.folder / 'rendezvous'}"
        parallel = initialize_parallel(
            ParallelLayout(), rank=0, world_size=1, init_method=rendezvous, device=device, seed=1
        )
        for name, hidden, layers, count, length in (("0.8M", 128, 4, 256, 26), ("8M", 384, 5, 16, 256)):
            path = small_model(scene.folder, name, hidden_size=hidden, num_layers=layers)
            tokens = torch.randint(2, 16, (count, length), generator=torch.Generator().manual_seed(0))
            mask = torch.ones(count, length, dtype=torch.bool)
            mask[:, 0] = False
            batch = PackedBatch(
                token_ids=tokens.flatten(), cu_seqlens=torch.arange(count + 1) * length, loss_mask=mask.flatten()
            )
            engine = MegatronEngine(trained_model(path), parallel=parallel, device=device)
            plain = plain_step(path, tokens)

            def ours(engine: MegatronEngine = engine, batch: PackedBatch = batch) -> float:
                start = time.perf_counter()
                engine.train_step(batch, SFT().loss, max_tokens_per_mb=16384)
                return batch.num_tokens / (time.perf_counter() - start)

            value, baseline = alternate(ours, plain)
            yield Figure(f"update.train_step_{name}", value, "tokens/s", baseline, ">= 0.9x")
        destroy_parallel()


def trained_model(path: Path) -> EngineModel:
    """Return what an engine of these rows loads and trains."""
    optimizer = OptimizerConfig(lr=1e-4, weight_decay=0.0, warmup_steps_proportion=0.0)
    return EngineModel(config=EngineConfig(optimizer=optimizer), path=str(path), total_updates=1000)


def plain_step(path: Path, tokens: torch.Tensor) -> Callable[[], float]:
    """Return a function that runs forward, cross entropy, backward, clip and AdamW with transformers and torch alone:
    tokens/s."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> float:
        start = time.perf_counter()
        logits = model(tokens, use_cache=False).logits[:, :-1].float()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return tokens.numel() / (time.perf_counter() - start)

    return step


def generator(scene: Scene) -> Iterator[Figure]:
    """Yield the tokens/s for 64 prompts with mixed output lengths, against transformers' generate(), which runs until
    the longest is done."""
    for name, hidden, layers in (("0.8M", 128, 4), ("8M", 384, 5)):
        path = small_model(scene.folder, name, hidden_size=hidden, num_layers=layers)
        value, baseline = asyncio.run(compare_generators(path))
        yield Figure(f"rollout.embedded_generator_{name}", value, "tokens/s", baseline, ">= 2.5x")


async def compare_generators(path: Path) -> tuple[float, float]:
    """Return the medians of the tokens/s of both, measured in turn; only requested tokens count."""
    from transformers import AutoModelForCausalLM

    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, 16, n).tolist() for n in rng.integers(8, 65, 64)]
    lengths = rng.integers(16, 257, 64)
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    width = max(map(len, prompts))
    padded = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    longest = int(lengths.max())
    rates: list[tuple[float, float]] = []
    engine, threads = EmbeddedGenerator(path, max_running=64), torch.get_num_threads()
    for round_ in range(ROUNDS + 1):
        requests = [
            GenerateRequest(
                request_id=f"{round_}-{i}",
                prompt_ids=prompt,
                seed=64 * round_ + i,
                sampling=SamplingParams(max_new_tokens=int(n), min_new_tokens=int(n), stop_token_ids=(1,)),
            )
            for i, (prompt, n) in enumerate(zip(prompts, lengths, strict=True))
        ]
        start = time.perf_counter()
        await engine.generate_many(requests)
        torch.set_num_threads(threads)  # of this thread; the engine chooses its own
        middle = time.perf_counter()
        with torch.inference_mode():
            model.generate(
                padded,
                attention_mask=(padded != 0).long(),
                do_sample=True,
                top_k=0,
                min_new_tokens=longest,
                max_new_tokens=longest,
            )
        rates.append((lengths.sum() / (middle - start), lengths.sum() / (time.perf_counter() - middle)))
    await engine.close()
    ours, theirs = np.median(rates[1:], axis=0)
    return float(ours), float(theirs)


PRECISIONS = ("float32", "bfloat16")


def dry_run(scene: Scene) -> Iterator[Figure]:
    """Yield the time from the command to the end of every check."""
    config = ppo_config(scene, small_model(scene.folder, "0.8M", hidden_size=128, num_layers=4), new_tokens=16)
    start = time.perf_counter()
    run_ppo(scene.folder, "dry", config, "--dry-run")
    yield Figure("config.dry_run", time.perf_counter() - start, "s", target="< 3")


def ppo_config(scene: Scene, model: Path, *, new_tokens: int, **changes: object) -> dict[str, object]:
    """Return a configuration with 32 prompts x 8 answers a step, as dotted keys."""
    return {
        "experiment_name": "bench",
        "allocation_mode": "embedded.d1m1p1+d1m1p1",
        "n_gpus_per_node": 2,
        "external_configs.cluster_config.fileroot": scene.folder / "runs",
        "actor.path": model,
        "actor.optimizer.lr": 1e-5,
        "dataset.path": additions(scene.folder),
        "dataset.train_bs_n_seqs": 32,
        "dataset.max_prompt_len": 16,
        "group_size": 8,
        "group_adv_norm": True,
        "ppo.gen.max_new_tokens": new_tokens,
        "ppo.ppo_n_minibatches": 1,
        "ppo.kl_ctl": 0.0,
        "ppo.disable_value": True,
        "staleness.max_staleness": 2,
        "generator.max_running": 256,
        "monitor.tensorboard": False,
        "reward.function": "tools.bench.workload:coin_reward",
        **changes,
    }


def run_ppo(
    folder: Path, trial: str, config: Mapping[str, object], *flags: str, sample_memory: bool = False, devices: str = ""
) -> list[float]:
    """Run the real command; return samples of the memory of all its processes in MiB, one a second, if requested.

    `devices`: the GPUs that it sees, as in CUDA_VISIBLE_DEVICES; empty: those that this process sees. Raises
    RuntimeError with the end of its output.
    """
    base, log_file = folder / "empty.yaml", folder / f"{trial}.log"
    base.write_text("{}\n")
    words = [f"{key}={value}" for key, value in {**config, "trial_name": trial}.items()]
    memory = []
    with log_file.open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "core.quickstart", "ppo-math", "--config", str(base), *words, *flags],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | ({"CUDA_VISIBLE_DEVICES": devices} if devices else {}),
        )
        while process.poll() is None:
            if sample_memory:
                memory.append(family_mib(process.pid))
            time.sleep(1.0 if sample_memory else 0.05)
    if process.returncode:
        raise RuntimeError(f"{trial} ended with {process.returncode}:\n{log_file.read_text()[-6000:]}")
    return memory


def family_mib(pid: int) -> float:
    """Return the proportional memory of a process and all below it, MiB."""
    total = 0
    for process in (family := [psutil.Process(pid)]) + family[0].children(recursive=True):
        try:
            total += process.memory_full_info().pss
        except psutil.Error:
            continue
    return total / 2**20


def samples_per_second(scene: Scene, trial: str, config: dict[str, object], *, steps: int) -> float:
    """Return the rate of the whole loop: all samples of the steps after the warm-up over their time."""
    run_ppo(scene.folder, trial, {**config, "exp_ctrl.benchmark_steps": steps})
    rows = metrics_of(scene.folder, trial)[WARM_UP_STEPS:]
    return sum(r["n_seqs"] for r in rows) / sum(r["time/step"] for r in rows)


def metrics_of(folder: Path, trial: str) -> list[dict[str, float]]:
    """Return the rows of the metrics of a run."""
    (path,) = (folder / "runs" / "logs").glob(f"*/bench/{trial}/metrics.jsonl")
    return read_rows(path)


def sync_and_async(scene: Scene) -> Iterator[Figure]:
    """Yield runs with max_staleness 0 (both sides use all cores in turn) and 2."""
    model = small_model(scene.folder, "0.8M", hidden_size=128, num_layers=4)
    config = ppo_config(scene, model, new_tokens=64)
    rates: dict[int, list[float]] = {0: [], 2: []}
    for round_ in range(2):
        for staleness in rates:
            changed = {**config, "staleness.max_staleness": staleness}
            rates[staleness].append(samples_per_second(scene, f"staleness{staleness}-{round_}", changed, steps=25))
    synchronous, asynchronous = (float(np.mean(rates[staleness])) for staleness in (0, 2))
    yield Figure("async.samples_per_second", asynchronous, "samples/s", synchronous, ">= 1.25x")


def loop(scene: Scene) -> Iterator[Figure]:
    """Yield samples/s of the whole loop, against TRL's GRPOTrainer on the same model, prompts and lengths.

    Both sides run in both precisions, in turn; the row with the target sets the faster of ours against the faster of
    theirs.
    """
    model = small_model(scene.folder, "0.8M", hidden_size=128, num_layers=4)
    for new_tokens, steps, target in ((16, 60, ">= 1.5x"), (128, 15, ">= 1.9x")):
        ours: dict[str, list[float]] = {precision: [] for precision in PRECISIONS}
        theirs: dict[str, list[float]] = {precision: [] for precision in PRECISIONS}
        for round_, precision in itertools.product(range(2), PRECISIONS):
            changes = {"ppo.gen.min_new_tokens": new_tokens, "actor.bf16": precision == "bfloat16"}
            config = ppo_config(scene, model, new_tokens=new_tokens, **changes)
            # Three single-threaded processes on two cores: a process that waits leaves its core to the others.
            config |= {"allocation_mode": "embedded.d1m1p1+d2m1p1", "n_gpus_per_node": 3}
            config |= {"launch.threads_per_process": 1, "generator.interrupt": "in_place"}
            trial = f"loop{new_tokens}-{precision}-{round_}"
            ours[precision].append(samples_per_second(scene, trial, config, steps=steps))
            if scene.trl_python is not None:
                options = {"new-tokens": new_tokens, "steps": steps // 3, "precision": precision}
                theirs[precision].append(trl_samples_per_second(scene, model, options))
        rates, baselines = ({p: float(np.mean(v)) for p, v in side.items() if v} for side in (ours, theirs))
        name = f"loop.samples_per_second_{new_tokens}"
        for precision in PRECISIONS:
            yield Figure(f"{name}_{precision}", rates[precision], "samples/s", baselines.get(precision))
        yield Figure(name, max(rates.values()), "samples/s", max(baselines.values(), default=None), target)


def trl_samples_per_second(
    scene: Scene, model: Path, options: Mapping[str, object], *flags: str, timeout: float | None = None
) -> float:
    """Run trl_script.py on the additions, in TRL's environment; its log goes to standard error.

    Raises subprocess.CalledProcessError, subprocess.TimeoutExpired.
    """
    given = {"model": model, "prompts": additions(scene.folder), **options}
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    command = [str(scene.trl_python), str(Path(__file__).with_name("trl_script.py")), *words, *flags]
    # With LOCAL_RANK, which benchmarks on a GPU set for their engine, accelerate expects a distributed run.
    env = {name: value for name, value in os.environ.items() if name != "LOCAL_RANK"}
    done = subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE, text=True, timeout=timeout)
    return float(json.loads(done.stdout.splitlines()[-1])["samples_per_second"])


def memory(scene: Scene) -> Iterator[Figure]:
    """Yield the memory at the end over the memory at a third of 10,000 steps of a null run (tiny model, tokens made up
    at once), with a checkpoint every 100."""
    model = small_model(scene.folder, "tiny", hidden_size=64, num_layers=1)
    config = ppo_config(scene, model, new_tokens=4, **{"allocation_mode": "mock.d1m1p1+d1m1p1"})
    config |= {"dataset.train_bs_n_seqs": 4, "group_size": 2, "exp_ctrl.total_train_epochs": 10}
    config |= {"exp_ctrl.total_train_steps": 10_000, "recover_mode": "auto", "exp_ctrl.ckpt_freq_steps": 100}
    samples = run_ppo(scene.folder, "nothing", config, sample_memory=True)
    # Start-up and shut-down are no part of the run: what counts lies between the first and the last quiet second.
    running = samples[int(0.3 * len(samples)) : -3]
    quarter = len(running) // 4 or 1
    end, begin = float(np.median(running[-quarter:])), float(np.median(running[:quarter]))
    yield Figure("memory.null_run", end, "MiB", begin, "< 1.05x")


_CONVERTED = dict(
    model_type="llama",
    vocab_size=32_000,
    hidden_size=1024,
    intermediate_size=4096,
    num_hidden_layers=8,
    num_attention_heads=16,
    num_key_value_heads=4,
    max_position_embeddings=1024,
)


def convert_both_ways(scene: Scene) -> Iterator[Figure]:
    """Yield MiB/s of converting a model of 0.9 GB in float32 both ways, without checks, against a plain copy by
    safetensors on the same disk. All sides read files that lie in the page cache, and write a new folder every time,
    which the kernel may keep in memory."""
    source, checkpoint, target = (scene.folder / f"convert-{part}" for part in ("hf", "megatron", "target"))
    num_bytes = _write_random(source, _CONVERTED, torch.float32)
    _convert("--checkpoint_path", source, "--output_path", checkpoint, "--to-megatron")

    def rate_of(write: Callable[[], object]) -> float:
        shutil.rmtree(target, ignore_errors=True)
        start = time.perf_counter()
        write()
        return num_bytes / 2**20 / (time.perf_counter() - start)

    def plain() -> None:
        target.mkdir()
        for file in source.glob("*.safetensors"):
            save_file(load_file(file), target / file.name, metadata={"format": "pt"})

    for way, arguments in (
        ("to_hugging_face", ("--checkpoint_path", checkpoint)),
        ("to_megatron", ("--checkpoint_path", source, "--to-megatron")),
    ):
        ours = partial(_convert, *arguments, "--output_path", target)
        value, baseline = alternate(partial(rate_of, ours), partial(rate_of, plain))
        yield Figure(f"convert.{way}", value, "MiB/s", baseline, ">= 0.7x")
    shutil.rmtree(target)


def _convert(*arguments: object) -> None:
    status = convert.main([str(argument) for argument in arguments])
    assert status == 0, f"convert {arguments} ended with {status}"


def _write_random(folder: Path, shape: Mapping[str, object], dtype: torch.dtype) -> int:
    """Write a folder of random weights; return its size in bytes."""
    from mcore_adapter.hf.weights import tensor_specs, write_config

    config = parse_config(shape)
    folder.mkdir()
    write_config(folder, config, dtype=dtype, is_critic=False)
    specs = tensor_specs(hf_shapes(config, is_critic=False), dtype)
    writer = ShardWriter(folder, specs)
    for name, spec in specs.items():
        writer.add(name, (torch.randn(spec.shape) / 50).to(dtype))
    writer.finish()
    return sum(spec.nbytes for spec in specs.values())


_GROUPS, _GROUP_SIZE, _NEW_TOKENS, _PROMPT_TOKENS = 512, 16, 8000, 200
_STEPS, _EVALUATED_EVERY = 40, 4


def store(scene: Scene) -> Iterator[Figure]:
    """Yield the rate of the loop with a SQLite store against one in memory, and the time in which a step of 512 prompts
    with 16 answers of 8,000 tokens is stored."""
    model = small_model(scene.folder, "0.8M", hidden_size=128, num_layers=4)
    rates: dict[str, list[float]] = {"memory": [], "sqlite": []}
    for round_, kind in product(range(2), rates):
        path = str(scene.folder / f"loop-{round_}.db") if kind == "sqlite" else ""
        changes = {"experience.store": kind, **({"experience.path": path} if path else {})}
        config = ppo_config(scene, model, new_tokens=64, **changes)
        rates[kind].append(samples_per_second(scene, f"{kind}-{round_}", config, steps=25))
    memory, sqlite = (float(np.mean(of)) for of in rates.values())
    yield Figure("experience.loop_samples_per_second_sqlite", sqlite, "samples/s", memory, ">= 0.97x")
    in_memory = _seconds_to_put(MemoryExperience())
    durable = SQLiteExperience(scene.folder / "large.db")
    seconds = _seconds_to_put(durable)
    durable.close()
    yield Figure("experience.seconds_to_put_512x16x8000_sqlite", seconds, "s", in_memory)


def _seconds_to_put(made: Experience) -> float:
    """Store the episodes of a step."""
    length = _PROMPT_TOKENS + _NEW_TOKENS
    versions = np.full(length, 3, np.int32)
    versions[:_PROMPT_TOKENS] = PROMPT_VERSION
    rng = np.random.default_rng(0)
    group = [
        Trajectory(
            query_id="q",
            token_ids=rng.integers(0, 150_000, length, dtype=np.int32),
            loss_mask=versions != PROMPT_VERSION,
            rollout_logprobs=-rng.random(length, dtype=np.float32),
            versions=versions,
            reward=float(i % 2),
            finish_reason="length",
        )
        for i in range(_GROUP_SIZE)
    ]
    known, seconds = summary(group), 0.0
    for number in range(_GROUPS):
        id = f"q{number}/0"
        tags = Tags(id=id, group_id=id, task="math", row=id, epoch=0, version=3)
        made.open(tags, EveryEpisode())
        episode = Episode(tags=replace(tags, **known), trajectories=group)
        begin = time.perf_counter()
        made.put(episode)
        seconds += time.perf_counter() - begin
    return seconds


def evaluation(scene: Scene) -> Iterator[Figure]:
    """Yield the median time of a step beside which held-out problems are evaluated against one of a run without
    evaluations, and the longest time for which the trainer has waited for one. Generators sample without computing."""
    model = small_model(scene.folder, "8M", hidden_size=384, num_layers=5)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    waited = 0.0
    for round_, evaluates in product(range(2), (False, True)):
        config = ppo_config(
            scene, model, new_tokens=16, allocation_mode="mock.d2m1p1+d1m1p1", n_gpus_per_node=3,
            **{"generator.mock_seconds_per_token": 0.001, "launch.threads_per_process": 1},
        )  # fmt: skip
        config["exp_ctrl.total_train_steps"] = _STEPS
        if evaluates:
            config |= {"evaluation.path": config["dataset.path"], "evaluation.num_prompts": 256}
            config |= {"exp_ctrl.eval_freq_steps": _EVALUATED_EVERY}
        trial = f"evaluation-{evaluates}-{round_}"
        run_ppo(scene.folder, trial, config)
        rows = [row for row in metrics_of(scene.folder, trial) if "time/step" in row]
        waited = max([waited, *(row.get("time/evaluate", 0.0) for row in rows[:-1])])
        seconds[evaluates] += [row["time/step"] for row in rows[WARM_UP_STEPS:-1]]
    alone, beside = (float(np.median(of)) for of in seconds.values())
    yield Figure("evaluation.step_seconds", beside, "s", alone, "<= 1.03x")
    yield Figure("evaluation.longest_wait", waited, "s", None, "0")
