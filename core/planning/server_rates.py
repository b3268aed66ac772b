"""Rates of a server's process on this host, for `slipstream plan --calibrate`: waves of requests to a real server of
the backend that runs take on GPUs, and the fit to their times.

The model is narrow, so that the GPU has next to nothing to do for each request, and as deep as usual ones, as a prompt
launches each layer. The fit holds where the server's process is slower than the GPU with this model.
"""

import asyncio
import json
import logging
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from allocation import GPU
from core.planning.rates import Calibration, calibration_of
from rollout.errors import GeneratorCallError, GeneratorStartError
from rollout.inference.backend import BackendSettings, FlagValue, GeneratorConfig, Replica
from rollout.inference.registry import BACKENDS, DEFAULT_BACKEND
from rollout.types import GenerateRequest, SamplingParams

logger = logging.getLogger(__name__)

_VOCABULARY = 1024
MODEL = dict(
    architectures=["Qwen2ForCausalLM"], model_type="qwen2", hidden_act="silu", hidden_size=256, intermediate_size=512,
    num_attention_heads=4, num_key_value_heads=1, num_hidden_layers=28, vocab_size=_VOCABULARY, rms_norm_eps=1e-6,
    max_position_embeddings=1024, rope_theta=10000.0, tie_word_embeddings=True,
)  # fmt: skip
_ROUNDS, _FIRST_TOKENS = 3, 8
_PATIENCE_SECONDS = 120.0
"""Of start and waves, so that a calibration takes less than three minutes."""
_FAILURES = (GeneratorStartError, GeneratorCallError, OSError, ValueError)
"""Why a server does not start, has no GPU for itself, ends, or does not answer in time (OSError)."""
_BACKEND = DEFAULT_BACKEND[GPU]
Times = Mapping[tuple[int, int], float]
"""(requests, tokens of each answer) -> seconds of a wave."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """Waves to measure: of few and of many requests, with answers of each of two lengths."""

    few: int
    many: int
    prompt: int
    answers: tuple[int, int]
    """So long that all requests run at once for a while."""

    def waves(self) -> list[tuple[int, int]]:
        """Return requests and tokens of each answer."""
        return [(requests, answer) for requests in (self.few, self.many) for answer in self.answers]


LOAD = Load(few=16, many=384, prompt=128, answers=(128, 512))


def with_server_rates(calibration: Calibration, times: Times | None, load: Load = LOAD) -> Calibration:
    """Return a calibration of a GPU with the rates of a server whose waves took `times`, and those of H200 for what is
    not measured: all of them where `times` is None. `source` names those."""
    known = calibration_of("H200")
    assert known is not None, "it is part of this package"
    kept = replace(
        calibration, decode_token_seconds=known.decode_token_seconds, request_seconds=known.request_seconds,
        decode_layer_seconds=known.decode_layer_seconds, decode_layer_link_seconds=known.decode_layer_link_seconds,
    )  # fmt: skip
    if times is None:
        return replace(kept, source=f"{kept.source}; rates of servers (decode_*, request_seconds) are those of H200")
    few, many, (short, long) = load.few, load.many, load.answers

    def step(requests: int) -> float:
        """Return the seconds of a decode step while all requests run: both waves begin and end alike."""
        return (times[requests, long] - times[requests, short]) / (long - short)

    def begin(requests: int) -> float:
        """Return the seconds in which all requests begin, and those that every wave takes."""
        return times[requests, short] - short * step(requests)

    return replace(
        kept,
        source=f"{kept.source}; decode_layer_seconds and decode_layer_link_seconds are those of H200",
        decode_token_seconds=max(0.0, step(many) / many),
        request_seconds=max(0.0, (begin(many) - begin(few)) / (many - few)),
    )


def server_times(
    *,
    gpu: int | None,
    python: str | None = None,
    load: Load = LOAD,
    begin: Callable[[str], None] = logger.info,
    patience_seconds: float = _PATIENCE_SECONDS,
) -> Times | None:
    """Return the times of waves of requests to a server on this GPU, or on the CPU; None, with a warning, where it does
    not start or takes too long. `python`: an interpreter that has its library, None for this one; `begin` gets the name
    of each phase."""

    async def measured(folder: Path) -> Times:
        async with asyncio.timeout(patience_seconds):
            begin("start of a server")
            replica = await BACKENDS[_BACKEND].start(_settings(folder, gpu, python, load))
            try:
                begin("waves of requests")
                return await _wave_times(replica, load)
            finally:
                await replica.close()

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODEL))
        try:
            return asyncio.run(measured(Path(folder)))
        except _FAILURES as error:
            why = str(error) or f"not done in {patience_seconds:.0f} s"
            logger.warning("The rates of servers are not measured, those of H200 are kept: %s", why)
            return None


def _settings(folder: Path, gpu: int | None, python: str | None, load: Load) -> BackendSettings:
    cached = 2 * load.many * (load.prompt + load.answers[-1])
    small: dict[str, FlagValue] = {} if gpu is not None else {"max_total_tokens": cached, "sleep_on_idle": True}
    return BackendSettings(
        name="server",
        model_path=str(folder),
        log_file=folder / "server.log",
        gpus=() if gpu is None else (gpu,),
        load_weights=False,
        # While a server is nearly full, prompts wait for each other (BATCHED_PREFILLS).
        config=GeneratorConfig(max_running=2 * load.many, python=python, flags=small),
        startup_timeout_seconds=math.inf,
    )


async def _wave_times(replica: Replica, load: Load) -> Times:
    """Return the medians of some rounds."""
    draw = np.random.default_rng(0)

    async def seconds(requests: int, answer: int) -> float:
        prompts = draw.integers(0, _VOCABULARY, (requests, load.prompt)).tolist()
        sampling = SamplingParams(max_new_tokens=answer)
        asked = [GenerateRequest(request_id=str(i), prompt_ids=p, sampling=sampling) for i, p in enumerate(prompts)]
        start = time.perf_counter()
        completions = await asyncio.gather(*map(replica.generate, asked))
        assert {len(one.token_ids) for one in completions} == {answer}, "no token ends an answer"
        return time.perf_counter() - start

    for requests in (load.few, load.many):  # first kernels for these sizes
        await seconds(requests, _FIRST_TOKENS)
    found = {wave: list[float]() for wave in load.waves()}
    for wave in load.waves() * _ROUNDS:
        found[wave].append(await seconds(*wave))
    return {wave: statistics.median(rounds) for wave, rounds in found.items()}
