"""A conversation becomes trajectories in which every sampled token is trained once, with what its sampling reported."""

import numpy as np

from helpers.simulated_sampling import make_prompts
from rollout.types import PROMPT_VERSION, Completion, FinishReason, SamplingParams
from rollout.workflows import TrajectoryBuilder

(PROMPT,) = make_prompts(1)  # tokens 0 and 1
SAMPLING = SamplingParams(max_new_tokens=4)


def completion(
    tokens: list[int], version: int, *, finish: FinishReason = "stop", experts: list[int] | None = None
) -> Completion:
    return Completion(
        token_ids=np.array(tokens, np.int32),
        logprobs=-np.array(tokens, np.float32),
        versions=np.full(len(tokens), version, np.int32),
        finish_reason=finish,
        routed_experts=None if experts is None else np.array(experts, np.int16).reshape(-1, 1, 1),
    )


def test_turns_keep_their_tokens_masks_logprobs_versions_and_the_last_finish_reason() -> None:
    sample = TrajectoryBuilder(PROMPT, number=3)
    sample.sampled(completion([5, 6], 2)).observed([7]).observed(range(8, 10)).sampled(
        completion([11], 4, finish="length")
    )
    built = sample.observed([12]).build(0.5, {"turns": 2})
    assert built.token_ids.tolist() == [0, 1, 5, 6, 7, 8, 9, 11, 12]
    assert built.loss_mask.tolist() == [False, False, True, True, False, False, False, True, False]
    assert built.rollout_logprobs.tolist() == [0, 0, -5, -6, 0, 0, 0, -11, 0]
    assert built.versions.tolist() == [-1, -1, 2, 2, -1, -1, -1, 4, -1]
    assert (built.reward, built.finish_reason, built.rollout, built.metrics) == (0.5, "length", 3, {"turns": 2})
    assert built.routed_experts is None


def test_the_experts_of_a_token_are_those_of_the_pass_that_sampled_it() -> None:
    """A later turn reports the tokens before it again, perhaps under other weights."""
    sample = TrajectoryBuilder(PROMPT, number=0)
    sample.sampled(completion([5, 6], 2, experts=[1, 1, 1]))  # of 4 tokens: no pass was made over the last one
    sample.observed([7]).sampled(completion([8, 9], 4, experts=[2, 2, 2, 2, 2, 2]))
    assert sample.build(1.0).routed_experts.ravel().tolist() == [1, 1, 1, 2, 2, 2, -1]


def test_a_turn_knows_the_version_that_its_conversation_began_with() -> None:
    sample = TrajectoryBuilder(PROMPT, number=0)
    began_at = [sample.request(SAMPLING, seed=7).began_at]
    for version in (3, 4):
        sample.sampled(completion([5], version)).observed([6])
        began_at.append(sample.request(SAMPLING, seed=7).began_at)
    assert began_at == [None, 3, 3]


def test_a_request_asks_for_the_next_turn_with_a_seed_of_its_own() -> None:
    def seeds() -> list[int]:
        sample, other = TrajectoryBuilder(PROMPT, number=0), TrajectoryBuilder(PROMPT, number=1)
        first = sample.request(SAMPLING, seed=7)
        assert first.prompt_ids == [0, 1] and first.sampling is SAMPLING
        second = sample.sampled(completion([5], 0)).observed([6]).request(SAMPLING, seed=7)
        assert second.prompt_ids == [0, 1, 5, 6]
        branches = [sample.fork().request(SAMPLING, seed=7) for _ in range(2)]
        requests = [first, second, other.request(SAMPLING, seed=7), *branches]
        assert len({r.request_id for r in requests}) == len(requests)
        return [r.seed for r in requests]

    assert seeds() == seeds()
    assert len(set(seeds())) == 5


def test_a_branch_has_what_came_before_as_context_and_belongs_to_the_same_rollout() -> None:
    sample = TrajectoryBuilder(PROMPT, number=2).sampled(completion([5, 6], 1))
    branch = sample.fork().observed([7]).sampled(completion([8], 2))
    first, second = sample.sampled(completion([9], 1)).build(1.0), branch.build(1.0)
    assert first.token_ids.tolist() == [0, 1, 5, 6, 9] and first.loss_mask.tolist() == [False, False, True, True, True]
    assert second.token_ids.tolist() == [0, 1, 5, 6, 7, 8]
    assert second.loss_mask.tolist() == [False] * 5 + [True]
    assert second.versions.tolist() == [PROMPT_VERSION] * 5 + [2]
    assert first.rollout == second.rollout == 2
