"""From one prompt to its group of trajectories, and workflows by import path."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rollout.plugins import PluginError
from rollout.rewards.pool import RewardPool
from rollout.types import Completion, GenerateRequest, Prompt, SamplingParams
from rollout.workflows import SingleTurnMathWorkflow, TrajectoryBuilder, make_workflow, sample_seed

SAMPLING = SamplingParams(max_new_tokens=4)


class ScriptedGenerator:
    """Answers the k-th request with the k-th list of tokens; remembers what it was asked."""

    def __init__(self, *answers: list[int], finish_reason: str = "stop", fail_at: int | None = None) -> None:
        self.answers = answers
        self.requests: list[GenerateRequest] = []
        self.cancelled = 0
        self._finish_reason = finish_reason
        self._fail_at = fail_at

    async def generate(self, request: GenerateRequest) -> Completion:
        index = len(self.requests)
        self.requests.append(request)
        try:
            if self._fail_at is not None:
                await asyncio.sleep(0.01 if index == self._fail_at else 60)
                raise ConnectionError("the server is gone")
            await asyncio.sleep(0.01 * (len(self.answers) - index))  # the last asked is the first to answer
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        tokens = np.array(self.answers[index], dtype=np.int32)
        return Completion(
            token_ids=tokens,
            logprobs=-np.arange(1, len(tokens) + 1, dtype=np.float32),
            versions=np.arange(5, 5 + len(tokens), dtype=np.int32),
            finish_reason=self._finish_reason,
        )


class AllRight:
    """A reward pool without processes."""

    async def score_many(self, prompt: Prompt, texts: Sequence[str]) -> list[float]:
        return [1.0] * len(texts)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """Token i is the word i, token 0 ends a text."""
    backend = Tokenizer(models.WordLevel({"<eos>": 0} | {str(i): i for i in range(1, 100)}, unk_token="<eos>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")


def make_prompt(epoch: int = 0, index: int = 3) -> Prompt:
    token_ids = np.array([7, 8], dtype=np.int32)
    return Prompt(
        query_id="q3", index=index, epoch=epoch, task="math", text="?", token_ids=token_ids, solutions=("\\boxed{42}",)
    )


async def test_a_group_is_sampled_decoded_scored_and_kept_in_sample_order(tokenizer: PreTrainedTokenizerFast) -> None:
    generator = ScriptedGenerator([42, 0], [41, 0], [42])

    async with RewardPool("math", num_workers=1) as pool:
        workflow = SingleTurnMathWorkflow(
            tokenizer=tokenizer, reward_pool=pool, sampling=SAMPLING, group_size=3, seed=1
        )
        group = await workflow.run(make_prompt(), generator)
    assert [t.reward for t in group] == [1.0, -1.0, 1.0]
    first = group[0]
    assert first.token_ids.tolist() == [7, 8, 42, 0]
    assert first.loss_mask.tolist() == [False, False, True, True]
    assert first.rollout_logprobs.tolist() == [0, 0, -1, -2]
    assert first.versions.tolist() == [-1, -1, 5, 6]
    assert (first.query_id, first.finish_reason, first.oldest_version) == ("q3", "stop", 5)
    assert [request.prompt_ids for request in generator.requests] == [[7, 8]] * 3
    assert len({request.group_id for request in generator.requests}) == 1
    assert len({request.request_id for request in generator.requests}) == 3
    assert {request.sampling for request in generator.requests} == {SAMPLING}


def test_a_prompt_issued_again_gets_the_same_seeds_and_every_other_draw_gets_others(tokenizer) -> None:
    def seeds(run_seed: int, epoch: int, index: int) -> list[int]:
        generator = ScriptedGenerator([1], [1])

        workflow = SingleTurnMathWorkflow(
            tokenizer=tokenizer, reward_pool=AllRight(), sampling=SAMPLING, group_size=2, seed=run_seed
        )
        asyncio.run(workflow.run(make_prompt(epoch, index), generator))
        return [request.seed for request in generator.requests]

    assert seeds(1, 0, 3) == seeds(1, 0, 3) == [sample_seed(1, 0, 3, 0), sample_seed(1, 0, 3, 1)]
    assert seeds(2, 1, 3) == [sample_seed(2, 1, 3, 0), sample_seed(2, 1, 3, 1)]
    drawn = [sample_seed(*key) for key in np.ndindex(3, 3, 10, 16)]
    assert len(set(drawn)) == 3 * 3 * 10 * 16
    assert all(0 <= seed < 2**63 for seed in drawn)


async def test_when_one_sample_fails_the_others_are_cancelled_and_the_error_is_raised(tokenizer) -> None:
    generator = ScriptedGenerator([1], [1], [1], fail_at=1)

    workflow = SingleTurnMathWorkflow(
        tokenizer=tokenizer, reward_pool=AllRight(), sampling=SAMPLING, group_size=3, seed=1
    )
    with pytest.raises(ConnectionError, match="the server is gone"):
        await workflow.run(make_prompt(), generator)
    await asyncio.sleep(0)
    assert generator.cancelled == 2, "before the loop ends, which cancels whatever still runs"


async def test_the_requests_of_a_second_attempt_have_the_seeds_of_the_first_and_names_of_their_own(tokenizer) -> None:
    """What the first attempt left behind in a generator may still run under its names."""
    generator = ScriptedGenerator([1], [1], [1], [1])

    workflow = SingleTurnMathWorkflow(
        tokenizer=tokenizer, reward_pool=AllRight(), sampling=SAMPLING, group_size=2, seed=1
    )
    for _ in range(2):
        await workflow.run(make_prompt(), generator)
    first, second = generator.requests[:2], generator.requests[2:]
    assert [request.seed for request in first] == [request.seed for request in second]
    assert len({request.request_id for request in generator.requests}) == 4
    assert first[0].group_id == first[1].group_id != second[0].group_id == second[1].group_id


def test_an_aborted_completion_is_an_error_that_names_the_router() -> None:
    completion = Completion(token_ids=np.array([1]), logprobs=np.zeros(1), versions=np.zeros(1), finish_reason="abort")
    with pytest.raises(RuntimeError, match="use a Router"):
        TrajectoryBuilder(make_prompt(), number=0).sampled(completion)


PLUGINS = """
class Good:
    def __init__(self, *, tokenizer, reward_pool, sampling, group_size, seed):
        self.group_size = group_size
    async def run(self, prompt, generator):
        return []

class NotAsync(Good):
    def run(self, prompt, generator):
        return []

class OtherArguments(Good):
    async def run(self, prompt):
        return []

class OtherSettings:
    def __init__(self, tokenizer, temperature):
        pass
    async def run(self, prompt, generator):
        return []
"""


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("plugin_workflows:NotAsync", "needs a method `async def run(self, prompt, generator)`"),
        ("plugin_workflows:OtherArguments", "its signature is (prompt)"),
        ("plugin_workflows:OtherSettings", "its signature is (tokenizer, temperature)"),
        ("plugin_workflows:Goood", "has no 'Goood'; did you mean 'Good'?"),
        ("plugin_workflowz:Good", "there is no module 'plugin_workflowz'"),
        ("plugin_workflows", "use one of endpoint, environment, math, tools, or package.module:Class"),
        ("plugin_workflows:Good()", "write it as package.module:Name"),
    ],
)
def test_a_workflow_plugin_that_does_not_fit_is_one_clear_error(tmp_path, monkeypatch, spec: str, said: str) -> None:
    (tmp_path / "plugin_workflows.py").write_text(PLUGINS)
    monkeypatch.syspath_prepend(tmp_path)
    settings = {"tokenizer": None, "reward_pool": None, "sampling": SAMPLING, "group_size": 2, "seed": 0}
    assert make_workflow("plugin_workflows:Good", **settings).group_size == 2
    assert isinstance(make_workflow("math", **settings), SingleTurnMathWorkflow)
    with pytest.raises(PluginError) as error:
        make_workflow(spec, **settings)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("import no_such_dependency", "failed with ModuleNotFoundError: No module named 'no_such_dependency' (FILE:1)"),
        ("x = 1\nx / 0", "failed with ZeroDivisionError: division by zero (FILE:2)"),
        ("x = 1\ndef broken(:\n", "failed with SyntaxError: invalid syntax (plugin_broken.py, line 2) (FILE:2)"),
        ('import shlex\nshlex.split("\'")', "failed with ValueError: No closing quotation (FILE:2)"),
        ("import sys\nsys.exit(0)", "ends the process with sys.exit(0) at FILE:2; put what the script runs under"),
    ],
)
def test_a_plugin_module_that_cannot_be_imported_is_one_line_with_the_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, said: str
) -> None:
    (tmp_path / "plugin_broken.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(PluginError) as error:
        make_workflow("plugin_broken:Name")
    said = said.replace("FILE", str(tmp_path / "plugin_broken.py"))
    assert str(error.value).startswith(f"workflow plugin_broken:Name: importing plugin_broken {said}")
    assert "\n" not in str(error.value)
