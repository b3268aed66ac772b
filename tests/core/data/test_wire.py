"""What crosses processes as few arrays arrives as it was sent."""

import numpy as np
import pytest

from core.launch.generator_actor import completions_from_wire, completions_to_wire
from rollout.types import Completion

EXPERTS = np.arange(8, dtype=np.int16).reshape(2, 2, 2)


def completion(num_tokens: int, experts: np.ndarray | None = None) -> Completion:
    return Completion(
        token_ids=np.arange(num_tokens, dtype=np.int32) + 10 * num_tokens,
        logprobs=-np.arange(num_tokens, dtype=np.float32) - num_tokens,
        versions=np.full(num_tokens, num_tokens, np.int32),
        finish_reason="length" if num_tokens % 2 else "stop",
        routed_experts=experts,
    )


@pytest.mark.parametrize("lengths", [[], [3], [3, 0, 1, 2]])
def test_completions_and_errors_arrive_as_they_were_sent(lengths: list[int]) -> None:
    failure = ValueError("refused")
    sent = {f"r{n}": completion(n, EXPERTS if n == 3 else None) for n in lengths}
    arrived = dict(completions_from_wire(completions_to_wire([("failed", failure), *sent.items()])))
    assert arrived.pop("failed") is failure and arrived.keys() == sent.keys()
    for name, expected in sent.items():
        got = arrived[name]
        assert isinstance(got, Completion) and got.finish_reason == expected.finish_reason
        assert got.routed_experts is expected.routed_experts
        for field in ("token_ids", "logprobs", "versions"):
            np.testing.assert_array_equal(getattr(got, field), getattr(expected, field), strict=True)
