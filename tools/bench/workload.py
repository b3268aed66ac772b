"""Prompts, rewards that cost nothing, and answers of random lengths, for measurements with random weights."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from rollout.types import GenerateRequest, Prompt
from rollout.workflows import SingleTurnMathWorkflow
from tools.demo.data import write_jsonl

_FIRST, _SECOND = range(10, 100), range(10, 55)
NUM_ADDITIONS = len(_FIRST) * len(_SECOND)


def additions(folder: Path) -> Path:
    """Return a file of additions as prompts in this folder, which is written once."""
    path = folder / "prompts.jsonl"
    if not path.exists():
        sums = [(a, b) for a in _FIRST for b in _SECOND]
        write_jsonl(path, [{"prompt": f"{a}+{b}=", "solutions": [f"\\boxed{{{a + b}}}"]} for a, b in sums])
    return path


def coin_reward(prompt: Prompt, text: str) -> float:
    """Return 0 or 1 by the answer's characters: groups with both, so that no gradient is zero."""
    return float(sum(map(ord, text)) % 2)


MEDIAN_TOKENS = 448
SIGMA = 0.95
"""Standard deviation of the logarithm of the length: the 99th percentile is 9.1 times the median."""


class LognormalLengths(SingleTurnMathWorkflow):
    """Each sample's length is drawn from its seed, and cut at ppo.gen.max_new_tokens."""

    def _requests(self, prompt: Prompt) -> list[GenerateRequest]:
        return [
            replace(request, sampling=replace(request.sampling, max_new_tokens=length, stop_token_ids=()))
            for request, length in (
                (request, length_of(request.seed, request.sampling.max_new_tokens))
                for request in super()._requests(prompt)
            )
        ]


def length_of(seed: int, most: int) -> int:
    """Return the tokens of the answer with this seed."""
    return int(np.clip(np.random.default_rng(seed).lognormal(np.log(MEDIAN_TOKENS), SIGMA), 1, most))
