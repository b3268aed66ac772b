"""The measurements of `python -m tools.bench cpu`. Each yields figures; what is compared runs alternately."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from allocation import ParallelLayout
from core.algorithms.losses import sft_loss
from mcore_adapter.data.batch import PackedBatch
from mcore_adapter.device import get_device
from mcore_adapter.settings import EngineConfig, EngineModel, OptimizerConfig
from rollout.inference.embedded.generator import EmbeddedGenerator
from rollout.types import GenerateRequest, SamplingParams
from tools.bench.figure import Figure
from tools.demo.data import make_tokenizer, write_jsonl

ROUNDS = 5


@dataclass(frozen=True, kw_only=True)
class Scene:
    """The folder of the measurements, and the interpreters that they may use."""

    folder: Path
    trl_python: Path | None

    def model(self, name: str, *, hidden_size: int, num_layers: int) -> Path:
        """Return a random Qwen2-shaped model with the demo's tokenizer."""
        from transformers import Qwen2Config, Qwen2ForCausalLM

        path = self.folder / name
        if not path.exists():
            torch.manual_seed(0)
            config = Qwen2Config(
                vocab_size=16,
                hidden_size=hidden_size,
                intermediate_size=3 * hidden_size,
                num_hidden_layers=num_layers,
                num_attention_heads=hidden_size // 32,
                num_key_value_heads=hidden_size // 64,
                max_position_embeddings=1024,
                tie_word_embeddings=True,
                eos_token_id=1,
                pad_token_id=0,
            )
            Qwen2ForCausalLM(config).save_pretrained(path)
            make_tokenizer().save_pretrained(path)
        return path

    def prompts(self) -> Path:
        path = self.folder / "prompts.jsonl"
        if not path.exists():
            sums = [(a, b) for a in range(10, 100) for b in range(10, 55)]
            write_jsonl(path, [{"prompt": f"{a}+{b}=", "solutions": [f"\\boxed{{{a + b}}}"]} for a, b in sums])
        return path


def alternate(first: Callable[[], float], second: Callable[[], float], rounds: int = ROUNDS) -> tuple[float, float]:
    """Return the medians of two rates measured in turn, after one round of warm-up."""
    pairs = [(first(), second()) for _ in range(rounds + 1)][1:]
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
            path = scene.model(name, hidden_size=hidden, num_layers=layers)
            tokens = torch.randint(2, 16, (count, length), generator=torch.Generator().manual_seed(0))
            mask = torch.ones(count, length, dtype=torch.bool)
            mask[:, 0] = False
            batch = PackedBatch(
                token_ids=tokens.flatten(), cu_seqlens=torch.arange(count + 1) * length, loss_mask=mask.flatten()
            )
            engine = MegatronEngine(
                trained_model(path),
                parallel=parallel,
                device=device,
            )
            plain = plain_step(path, tokens)

            def ours(engine: MegatronEngine = engine, batch: PackedBatch = batch) -> float:
                start = time.perf_counter()
                engine.train_step(batch, sft_loss, max_tokens_per_mb=16384)
                return batch.num_tokens / (time.perf_counter() - start)

            value, baseline = alternate(ours, plain)
            yield Figure(
                name=f"update.train_step_{name}", value=value, unit="tokens/s", baseline=baseline, target=">= 0.9x"
            )
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
        path = scene.model(name, hidden_size=hidden, num_layers=layers)
        value, baseline = asyncio.run(compare_generators(path))
        yield Figure(
            name=f"rollout.embedded_generator_{name}", value=value, unit="tokens/s", baseline=baseline, target=">= 2.5x"
        )


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
