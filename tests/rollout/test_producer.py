"""The producer: who is admitted when, what a failure costs, and what comes back after a restart."""

import asyncio
import itertools
import pickle
import re
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
import pytest

from helpers.both_sides import BothSides, in_flight
from helpers.simulated_sampling import LognormalWorkflow, make_dataset, trajectory
from helpers.virtual_clock import run_virtual, settle
from rollout.data.task_sets import TaskSets
from rollout.errors import ErrorPolicy, OnError, ServiceFailureError, WorkflowFailureError, evaluation_failure
from rollout.experience import Patience, Tags
from rollout.experience.stores.sqlite import SQLiteExperience
from rollout.types import Completion, GenerateRequest, Generator, Prompt, SamplingParams, Trajectory

pytestmark = pytest.mark.virtual_clock


class CallWorkflow:
    """Runs `body(prompt, calls)`; what it returns is the group, None stands for one good trajectory."""

    def __init__(self, body: Callable[[Prompt, int], object] | None = None, seconds: float = 1.0) -> None:
        self.calls: Counter[str] = Counter()
        self.order: list[str] = []
        self.running = self.most_running = 0
        self.version = 0
        self._body = body
        self._seconds = seconds

    async def run(self, prompt: Prompt, generator: Generator) -> list[Trajectory]:
        self.calls[prompt.query_id] += 1
        self.order.append(f"{prompt.query_id}@{prompt.epoch}")
        self.running += 1
        self.most_running = max(self.running, self.most_running)
        began_at = self.version
        try:
            await asyncio.sleep(self._seconds)
            result = self._body(prompt, self.calls[prompt.query_id]) if self._body else None
        finally:
            self.running -= 1
        return [trajectory(prompt, np.array([began_at, self.version]))] if result is None else result


class NoRequests:
    """The generators of workflows that sample by themselves."""

    async def partial(self) -> dict[str, Completion]:
        return {}


def make_producer(workflow: object, num_prompts: int = 20, **settings: object) -> BothSides:
    settings = {"batch_size": 4, "max_staleness": 1, "generator": NoRequests()} | settings
    return BothSides(make_dataset(num_prompts), workflow, **settings)


def names(dataset: TaskSets, positions: Iterable[int]) -> list[str]:
    """What the prompts at these positions of the stream are called, with their epoch."""
    return [f"{p.query_id}@{p.epoch}" for p in map(dataset.at, positions)]


async def train(producer: BothSides, workflow: CallWorkflow, steps: range) -> list[str]:
    taken = []
    for step in steps:
        taken += [group[0].query_id for group in await producer.take(step)]
        await asyncio.sleep(0.5)
        workflow.version = step + 1
        producer.set_version(step + 1)
    return taken


async def test_prompts_start_as_far_ahead_as_the_bound_allows_and_no_further() -> None:
    workflow = CallWorkflow()
    async with make_producer(workflow, batch_size=4, max_staleness=2) as producer:
        await settle()
        assert workflow.running == 12
        await asyncio.sleep(10)
        assert producer.stats()["rollout/num_ready"] == 12
        await producer.take(0)
        await asyncio.sleep(10)
        assert workflow.calls.total() == 12, "a step taken makes no room: the next version does"
        producer.set_version(1)
        await settle()
        assert workflow.running == 4


async def test_episodes_that_newer_weights_have_begun_wait_for_such_weights_after_a_restart(tmp_path) -> None:
    """A token of older weights would make them due before their turn."""
    before = CallWorkflow(seconds=1e6)
    store = SQLiteExperience(tmp_path / "e.db")
    async with make_producer(before, batch_size=4, max_staleness=2, experience=store) as producer:
        producer.set_version(1)
        await settle()
        assert before.running == 16
    store.close()
    after = CallWorkflow(seconds=1e6)
    store = SQLiteExperience(tmp_path / "e.db")
    async with make_producer(after, batch_size=4, max_staleness=2, experience=store) as producer:
        await settle()
        assert after.running == 12
        producer.set_version(1)
        await settle()
        assert after.running == 16
    assert after.order == before.order
    store.close()


async def test_max_in_flight_caps_what_runs_at_once() -> None:
    workflow = CallWorkflow()
    async with make_producer(workflow, max_staleness=4, max_in_flight=3) as producer:
        await train(producer, workflow, range(10))
    assert workflow.most_running == 3


class Requests(NoRequests):
    """A generator whose requests take 1 s, and the last of each group 10 s; how many ran at once, looked at every
    quarter of a second."""

    def __init__(self) -> None:
        self.running = 0
        self.seen: list[int] = []

    async def generate(self, request: GenerateRequest) -> Completion:
        self.running += 1
        try:
            await asyncio.sleep(10.0 if request.request_id.endswith("/7") else 1.0)
        finally:
            self.running -= 1
        return Completion(
            token_ids=np.array([0]), logprobs=np.array([0.0]), versions=np.array([0]), finish_reason="stop"
        )

    async def look(self) -> None:
        await asyncio.sleep(0.1)  # never at the moment at which requests end
        while True:
            self.seen.append(self.running)
            await asyncio.sleep(0.25)


class GroupWorkflow:
    """Eight samples of `num_turns` requests each, 1 s apart; `fails(prompt)` makes the first one fail in the middle.
    What still runs then is left behind, or with `tidy` cancelled."""

    def __init__(
        self,
        num_turns: int = 1,
        fails: Callable[[Prompt], bool] = lambda prompt: False,
        tidy: bool = False,
        max_new_tokens: int = 1,
    ) -> None:
        self._num_turns = num_turns
        self._sampling = SamplingParams(max_new_tokens=max_new_tokens)
        self._fails = fails
        self._tidy = tidy
        self._failed: set[str] = set()

    async def run(self, prompt: Prompt, generator: Generator) -> list[Trajectory]:
        async def sample(i: int) -> None:
            for turn in range(self._num_turns):
                await asyncio.sleep(1.0 if turn else 0.0)
                name = f"{prompt.query_id}/{turn}/{i}"
                await generator.generate(GenerateRequest(request_id=name, prompt_ids=[1], sampling=self._sampling))
                if self._fails(prompt) and prompt.query_id not in self._failed:
                    self._failed.add(prompt.query_id)
                    raise ConnectionError("try again")

        samples = [asyncio.ensure_future(sample(i)) for i in range(8)]
        try:
            await asyncio.gather(*samples)
        finally:
            for task in samples if self._tidy else ():
                task.cancel()
        return [trajectory(prompt, np.array([0]))] * 8


async def seen_running(workflow: GroupWorkflow, *, max_in_flight: int, seconds: float) -> list[int]:
    requests = Requests()
    producer = make_producer(
        workflow, 1000, batch_size=500, generator=requests, max_in_flight=max_in_flight, group_size=8
    )
    async with producer:
        watch = asyncio.create_task(requests.look())
        await asyncio.sleep(seconds)
        watch.cancel()
    return requests.seen


def test_generators_are_kept_full_while_last_answers_take_their_time_and_between_turns() -> None:
    """A cap on prompts would leave one request of eight running, ten seconds long."""
    seen = run_virtual(seen_running(GroupWorkflow(), max_in_flight=32, seconds=60.0))
    assert min(seen) >= 32 and max(seen) <= 32 + 7
    seen = run_virtual(seen_running(GroupWorkflow(num_turns=3), max_in_flight=32, seconds=60.0))
    assert min(seen[8:]) >= 32


async def test_answers_that_end_make_place_for_others_also_after_the_store_was_full() -> None:
    requests = Requests()
    settings: dict[str, object] = {"batch_size": 10, "max_staleness": 0, "max_in_flight": 16, "group_size": 8}
    async with make_producer(GroupWorkflow(), 1000, generator=requests, **settings) as producer:
        await asyncio.sleep(100)
        assert requests.running == 0, "the store is full until the next version"
        await producer.take(0)
        producer.set_version(1)
        await asyncio.sleep(2.5)
        assert requests.running >= 16, "the last answers of the first groups still run"


@pytest.mark.parametrize("same", [True, False])
async def test_tokens_that_a_restart_saves_or_costs_are_counted(same: bool) -> None:
    first = make_producer(GroupWorkflow(), 1, batch_size=1, generator=Requests(), group_size=8, num_epochs=1)
    async with first:
        await asyncio.sleep(5)
        state = pickle.loads(pickle.dumps(await first.save()))
    workflow = GroupWorkflow(max_new_tokens=1 if same else 2)
    second = make_producer(workflow, 1, batch_size=1, generator=Requests(), group_size=8, num_epochs=1)
    second.restore(state)
    async with second:
        await second.take(0)
        counts = [second.stats()[f"rollout/num_{what}_tokens"] for what in ("replayed", "lost")]
    assert counts == ([7.0, 0.0] if same else [0.0, 7.0]), "one of eight answers was under way"


async def test_the_share_of_busy_generators_is_a_mean_over_time() -> None:
    """Three prompts of 1 s fill three of four places for half of the time between two looks."""
    producer = make_producer(CallWorkflow(seconds=1.0), 3, batch_size=3, max_in_flight=4, num_epochs=1)
    async with producer:
        await producer.take(0)
        await asyncio.sleep(1.0)
        assert producer.stats()["rollout/generators_busy"] == pytest.approx(3 / 8, rel=1e-3)
        await asyncio.sleep(1.0)
        assert producer.stats()["rollout/generators_busy"] == 0.0


async def test_a_workflow_that_keeps_failing_ends_the_run_with_its_traceback() -> None:
    def failing_reward_parser(prompt: Prompt, calls: int) -> None:
        if prompt.index == 7:
            raise ZeroDivisionError("seven")

    workflow = CallWorkflow(failing_reward_parser)
    producer = make_producer(workflow, max_retries=2)
    with pytest.raises(WorkflowFailureError) as error:
        async with producer:
            await train(producer, workflow, range(100))
    shown = "".join(traceback.format_exception(error.value))
    assert str(error.value) == (
        "workflow.type: the workflow failed 3 times for one prompt (workflow.on_error=fail); correct the cause, "
        "or set workflow.on_error=skip. The last error: ZeroDivisionError: seven"
    )
    assert "in failing_reward_parser" in shown
    assert "sampling prompt q7 of epoch 0, attempt 3, the last" in shown
    assert workflow.calls["q7"] == 3
    assert workflow.running == 0


def skipping(max_share: float = 0.1) -> ErrorPolicy:
    return ErrorPolicy(on_error="skip", max_share=max_share, always_fatal=(ConnectionError,))


def fails_for(*indices: int, error: type[BaseException] = ZeroDivisionError) -> Callable[[Prompt, int], None]:
    def body(prompt: Prompt, calls: int) -> None:
        if prompt.index in indices:
            raise error("this prompt")

    return body


def without(dataset: TaskSets, *indices: int, num: int = 20) -> list[str]:
    """The first `num` prompts of the stream but those with these indices."""
    positions = (position for position in itertools.count() if dataset.at(position).index not in indices)
    return names(dataset, itertools.islice(positions, num))


@pytest.mark.parametrize("in_order", [False, True])
async def test_a_prompt_whose_workflow_keeps_failing_is_skipped_and_another_takes_its_place(in_order, caplog) -> None:
    workflow = CallWorkflow(fails_for(1, 6))
    producer = make_producer(workflow, max_retries=1, errors=skipping(), in_order=in_order, num_epochs=1)
    async with producer:
        taken = await train(producer, workflow, range(5))
    assert Counter(taken) == Counter(without(producer._dataset, 1, 6))
    assert producer.stats()["rollout/num_skipped"] == 2
    assert workflow.calls["q1"] == 2
    assert "q1: skipped after 2 attempts (workflow.on_error=skip; 2 prompts so far): ZeroDivisionError" in caplog.text
    assert caplog.text.count("(test_producer.py, line ") == caplog.text.count("ZeroDivisionError") == 6


async def test_skipped_prompts_take_no_place_of_max_in_flight() -> None:
    workflow = CallWorkflow(fails_for(*range(4)))
    settings: dict[str, object] = {"max_retries": 0, "errors": skipping(), "num_epochs": 1, "max_in_flight": 2}
    async with make_producer(workflow, **settings) as producer, asyncio.timeout(100):
        taken = await train(producer, workflow, range(4))
    assert len(taken) == 16 and not {"q0", "q1", "q2", "q3"} & set(taken)


async def test_too_many_skipped_prompts_end_the_run_with_the_error_and_the_limit() -> None:
    workflow = CallWorkflow(fails_for(*range(20)))
    with pytest.raises(WorkflowFailureError) as error:
        async with make_producer(workflow, max_retries=0, errors=skipping(0.05)) as producer:
            await producer.take(0)
    assert str(error.value) == (
        "workflow.type: the workflow failed for 6 of the last 6 prompts, more than workflow.max_error_share=0.05 "
        "of 100 may; correct the cause, or raise workflow.max_error_share. The last error: ZeroDivisionError: "
        "this prompt"
    )


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (lambda: TimeoutError("no answer"), ServiceFailureError),
        (lambda: chained(RuntimeError("the judge"), ConnectionResetError()), ServiceFailureError),
        (lambda: chained(ValueError("wrapped"), Lost()), ServiceFailureError),
        (lambda: ExceptionGroup("two", [ValueError(), TimeoutError()]), ServiceFailureError),
        (lambda: chained(ValueError("own"), KeyError()), WorkflowFailureError),
    ],
)
@pytest.mark.parametrize("on_error", ["skip", "fail"])
def test_a_workflow_that_other_processes_let_down_may_find_them_again_in_another_attempt(
    raised: Callable[[], Exception], kind: type[Exception], on_error: OnError
) -> None:
    error = raised()
    policy = ErrorPolicy(on_error=on_error, max_share=0.0, always_fatal=(Lost,))
    policy.count(failed=True)
    failure = policy.ends_run(error, runs=1)
    assert type(failure) is kind and "correct the cause" in str(failure)
    assert type(evaluation_failure(error, (Lost,))) is kind


class Lost(Exception):
    """Of the run's own processes."""


def chained(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize("on_error", ["skip", "fail"])
async def test_errors_of_the_run_itself_are_not_skipped(on_error: OnError) -> None:
    workflow = CallWorkflow(fails_for(*range(20), error=ConnectionError))
    errors = ErrorPolicy(on_error=on_error, always_fatal=(ConnectionError,))
    with pytest.raises(ConnectionError, match="this prompt"):
        async with make_producer(workflow, max_retries=0, errors=errors) as producer:
            await producer.take(0)


class TaskGroupWorkflow:
    """Three samples in an asyncio.TaskGroup, as docs/customization.md has it; the second of them calls `body`."""

    def __init__(self, body: Callable[[Prompt, int], object], *, tidy: bool = True) -> None:
        """Without `tidy`, a sample that is cancelled raises another error."""
        self.calls: Counter[str] = Counter()
        self.version = 0
        self._body, self._tidy = body, tidy

    async def run(self, prompt: Prompt, generator: Generator) -> list[Trajectory]:
        self.calls[prompt.query_id] += 1
        calls, began_at = self.calls[prompt.query_id], self.version

        async def sample(i: int) -> Trajectory:
            try:
                await asyncio.sleep(1.0 + i)
                if i == 1:
                    self._body(prompt, calls)
                return trajectory(prompt, np.array([began_at]))
            except asyncio.CancelledError:
                if self._tidy:
                    raise
                raise ZeroDivisionError("cleaning up") from None

        async with asyncio.TaskGroup() as group:
            samples = [group.create_task(sample(i)) for i in range(3)]
        return [task.result() for task in samples]


async def test_a_sample_that_exits_in_a_task_group_costs_its_prompt_and_no_other(caplog) -> None:
    workflow = TaskGroupWorkflow(fails_for(1, 6, error=SystemExit))
    async with make_producer(workflow, errors=skipping(), num_epochs=1) as producer:
        taken = await train(producer, workflow, range(5))
    assert Counter(taken) == Counter(without(producer._dataset, 1, 6))
    stats = producer.stats()
    assert (stats["rollout/num_skipped"], stats["rollout/num_failures"]) == (2, 8)
    exits = (
        r"RuntimeError\('the workflow raised SystemExit\(this prompt\): .*'\) \(test_producer.py, line \d+, in body\)"
    )
    assert re.search(rf"q1: attempt 1 of 4 failed: {exits}", caplog.text)
    assert re.search(rf"q1: skipped after 4 attempts .*: {exits}", caplog.text)


@pytest.mark.parametrize(("kind", "failures"), [(CallWorkflow, 2), (TaskGroupWorkflow, 3)])
async def test_a_workflow_that_fails_now_and_then_is_run_again_with_the_same_prompt(kind, failures) -> None:
    def flaky(prompt: Prompt, calls: int) -> None:
        if calls <= failures and prompt.index % 3 == 0:
            raise ConnectionError("try again")

    workflow = kind(flaky)
    async with make_producer(workflow, num_epochs=1) as producer:
        taken = await train(producer, workflow, range(5))
        assert sorted(taken) == sorted(f"q{i}@0" for i in range(20))
        assert producer.stats()["rollout/num_failures"] == failures * 7
        assert workflow.calls["q3"] == failures + 1
        assert workflow.calls["q4"] == 1


@pytest.mark.parametrize("tidy", [True, False])
@pytest.mark.parametrize("seconds", [0.5, 2.0], ids=["while_samples_run", "as_one_fails"])
async def test_leaving_cancels_task_groups_also_those_in_which_a_sample_fails(seconds: float, tidy: bool) -> None:
    """An error out of the cancellation is no reason to begin again."""
    workflow = TaskGroupWorkflow(fails_for(*range(20)), tidy=tidy)
    async with make_producer(workflow, errors=skipping()) as producer:
        await asyncio.sleep(seconds)
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert asyncio.get_running_loop().time() == pytest.approx(seconds)
    assert workflow.calls.total() == 8 and producer.stats()["rollout/num_failures"] == 0
    assert producer.experience._error is None


def test_a_task_group_of_errors_of_the_run_itself_is_not_skipped() -> None:
    async def main(body: Callable[[Prompt, int], object]) -> None:
        workflow = CallWorkflow(body)
        async with make_producer(workflow, max_retries=0, errors=skipping()) as producer:
            await producer.take(0)

    def raises(*errors: Exception) -> Callable[[Prompt, int], object]:
        def body(prompt: Prompt, calls: int) -> None:
            if prompt.index == 3:
                raise ExceptionGroup("in a TaskGroup", [ExceptionGroup("in another", list(errors))])

        return body

    gone = ConnectionError("generator-0"), ConnectionError("generator-1")
    with pytest.raises(ConnectionError, match="generator-0") as raised:
        run_virtual(main(raises(*gone)))
    sent = pickle.loads(pickle.dumps(raised.value))
    assert "raised together with 1 more: ConnectionError('generator-1')" in "".join(traceback.format_exception(sent))
    run_virtual(main(raises(gone[0], ZeroDivisionError("of the prompt"))))


class TwoArgumentError(Exception):
    def __init__(self, file: str, line: int) -> None:
        super().__init__(f"{file}:{line} is wrong")


@pytest.mark.parametrize(("always_fatal", "kind"), [((), WorkflowFailureError), ((TwoArgumentError,), RuntimeError)])
async def test_an_error_that_cannot_be_sent_to_another_process_keeps_its_text_and_place(always_fatal, kind) -> None:
    def unpicklable(prompt: Prompt, calls: int) -> None:
        raise TwoArgumentError("rows.txt", 7)

    with pytest.raises(kind, match="TwoArgumentError: rows.txt:7 is wrong") as error:
        errors = ErrorPolicy(on_error="fail", always_fatal=always_fatal)
        async with make_producer(CallWorkflow(unpicklable), max_retries=0, errors=errors) as producer:
            await producer.take(0)
    sent = pickle.loads(pickle.dumps(error.value))
    shown = "".join(traceback.format_exception(sent))
    assert "in unpicklable" in shown and "sampling prompt q" in shown


async def test_skipped_prompts_are_not_drawn_again_after_a_restart() -> None:
    workflow = CallWorkflow(fails_for(1, 6))
    settings = {"max_retries": 0, "errors": skipping(), "num_epochs": 1, "in_order": True}
    first = make_producer(workflow, **settings)
    async with first:
        taken = await train(first, workflow, range(2))
        state = pickle.loads(pickle.dumps(await first.save()))
    again = make_producer(workflow, **settings)
    again.restore(state)
    async with again:
        taken += await train(again, workflow, range(2, 5))
    assert Counter(taken) == Counter(without(again._dataset, 1, 6))


async def test_something_cancelled_inside_a_workflow_is_a_failure_like_any_other() -> None:
    def cancel(prompt: Prompt, calls: int) -> None:
        if calls == 1:
            raise asyncio.CancelledError

    workflow = CallWorkflow(cancel)
    async with make_producer(workflow) as producer:
        assert len(await producer.take(0)) == 4
    workflow = CallWorkflow(cancel)
    with pytest.raises(WorkflowFailureError, match="awaited was cancelled"):
        async with make_producer(workflow, max_retries=0) as producer:
            await producer.take(0)


@pytest.mark.parametrize("group", [[], "text", [3]])
async def test_a_workflow_that_returns_something_else_is_told_so(group: object) -> None:
    """What is wrong inside of a trajectory: test_trajectory_checks.py."""
    with pytest.raises(WorkflowFailureError) as error:
        async with make_producer(CallWorkflow(lambda prompt, calls: group), max_retries=0) as producer:
            await producer.take(0)
    assert f"returns a non-empty list of Trajectory, not {group!r}" in str(error.value)


async def test_the_last_epoch_ends_the_stream() -> None:
    workflow = CallWorkflow()
    async with make_producer(workflow, num_prompts=10, max_staleness=8, num_epochs=2) as producer:
        taken = await train(producer, workflow, range(6))
        with pytest.raises(ValueError, match=r"take\(6\): the run has 6 steps"):
            await producer.take(6)
    assert sorted(taken) == sorted(f"q{i}@{epoch}" for epoch in range(2) for i in range(10))
    assert workflow.calls.total() == 20


@pytest.mark.parametrize("over_age", ["wait", "mask"])
def test_a_restored_run_consumes_every_prompt_once_and_samples_what_was_in_flight_first(over_age: str) -> None:
    settings = {"num_prompts": 30, "max_staleness": 2, "num_epochs": 2, "max_in_flight": 7, "over_age": over_age}

    async def first_half() -> tuple[list[str], bytes, list[str]]:
        workflow = LognormalWorkflow(group_size=2)
        producer = make_producer(workflow, **settings)
        taken = []
        async with producer:
            for step in range(6):
                taken += [group[0].query_id for group in await producer.take(step)]
                workflow.push()
                producer.set_version(step + 1)
            await asyncio.sleep(0.5)
            state = await producer.save()
            assert state["experience"]["ready"]
            running = list(in_flight(state))
            assert running
            return taken, pickle.dumps(state), running

    async def second_half(state: bytes) -> tuple[list[str], list[str]]:
        workflow = CallWorkflow()
        workflow.version = 6
        producer = make_producer(workflow, **settings)
        producer.restore(pickle.loads(state))
        async with producer:
            taken = await train(producer, workflow, range(6, 16))
            assert producer.stats()["rollout/num_prompts"] == 60
        return taken, workflow.order

    before, state, running = run_virtual(first_half())
    after, order = run_virtual(second_half(state))
    assert order[: len(running)] == running
    assert sorted(before + after) == sorted(f"q{i}@{epoch}" for epoch in range(2) for i in range(30))


async def test_a_checkpoint_of_a_checkpoint_still_has_what_was_in_flight() -> None:
    first = make_producer(CallWorkflow(), max_staleness=1)
    async with first:
        await settle()
        state = await first.save()
    second = make_producer(CallWorkflow(), max_staleness=1, max_in_flight=1)
    second.restore(state)
    async with second:
        await settle()
        assert list(in_flight(await second.save())) == list(in_flight(state)) == names(make_dataset(20), range(8))


def test_a_checkpoint_of_other_settings_is_refused() -> None:
    state = make_producer(CallWorkflow()).state_dict()
    for settings, said in (
        ({"batch_size": 8}, "batch_size=8, but the recover checkpoint was written with 4"),
        ({"max_staleness": 4}, "max_staleness=4, but the recover checkpoint was written with 1"),
        ({"over_age": "mask"}, "over_age=mask, but the recover checkpoint was written with wait"),
        ({"in_order": True}, "in_order=True, but the recover checkpoint was written with False"),
        ({"num_prompts": 21}, "num_prompts=20, this one 21"),
    ):
        with pytest.raises(ValueError, match=said):
            make_producer(CallWorkflow(), **settings).load_state_dict(state)


async def test_a_checkpoint_of_other_settings_begins_at_its_step_on_request() -> None:
    workflow = CallWorkflow()
    first = make_producer(workflow)
    async with first:
        await train(first, workflow, range(2))
    workflow = CallWorkflow()
    workflow.version = 2
    second = make_producer(workflow, max_staleness=2)
    second.begin_at(2, reason="Another bound")
    async with second:
        await train(second, workflow, range(2, 3))
    assert workflow.order[:12] == names(make_dataset(20), range(8, 20))


async def test_other_groups_keep_their_prompts_and_sample_them_again() -> None:
    workflow = CallWorkflow()
    first = make_producer(workflow)
    async with first:
        before = await train(first, workflow, range(2))
        await asyncio.sleep(5)
        state = await first.save()
    assert len(state["experience"]["ready"]) == 8
    workflow = CallWorkflow()
    workflow.version = 2
    second = make_producer(workflow)
    second.restore(state)
    second.experience.resample(2)
    async with second:
        after = await train(second, workflow, range(2, 5))
    assert sorted(before + after) == sorted(f"q{i}@0" for i in range(20))
    assert set(after) <= set(workflow.order), "those that were ready too"


async def test_in_order_every_step_gets_its_own_prompts_whoever_is_first() -> None:
    workflow = LognormalWorkflow(group_size=2)
    async with make_producer(workflow, num_prompts=10, max_staleness=2, in_order=True) as producer:
        for step in range(12):
            taken = await producer.take(step)
            epoch, within = divmod(step, 3)
            positions = [10 * epoch + i for i in range(4 * within, min(4 * within + 4, 10))]
            assert producer.taken == names(make_dataset(10), positions)
            assert [group[0].query_id for group in taken] == names(make_dataset(10), positions)
            workflow.push()
            producer.set_version(step + 1)


async def test_stats_gather_the_counts_of_all_parts() -> None:
    workflow = CallWorkflow()
    async with make_producer(workflow, stats_sources=[lambda: {"reward/num_scored": 5.0}]) as producer:
        await train(producer, workflow, range(3))
        stats = producer.stats()
    assert stats["reward/num_scored"] == 5
    assert stats["dataset/num_prompts"] == 20
    assert stats["rollout/num_tokens"] == 2 * stats["rollout/num_trajectories"] == 2 * stats["rollout/num_prompts"]
    assert 0 <= stats["staleness/mean"] <= stats["staleness/max"] <= 1
    assert stats["rollout/wait_seconds"] >= stats["rollout/wait_for_oldest_seconds"] >= 0
    assert all(isinstance(value, float) for value in stats.values())


async def test_a_workflow_that_never_ends_is_run_again_and_then_skipped() -> None:
    class Hangs(CallWorkflow):
        async def run(self, prompt: Prompt, generator: Generator) -> list[Trajectory]:
            self.calls[prompt.query_id] += 1
            if (prompt.index, prompt.epoch) == (1, 0):
                await asyncio.Event().wait()
            return await super().run(prompt, generator)

    workflow = Hangs()
    errors = ErrorPolicy(on_error="skip")
    async with make_producer(
        workflow, 2, batch_size=2, max_staleness=0, max_retries=1, timeout_seconds=5.0, errors=errors
    ) as producer:
        await producer.take(0)
        assert producer.stats()["rollout/num_failures"] == 2 and producer.stats()["rollout/num_skipped"] == 1


async def test_an_episode_that_its_step_has_given_up_is_sampled_no_further() -> None:
    class Slow(CallWorkflow):
        ended = 0

        async def run(self, prompt: Prompt, generator: Generator) -> list[Trajectory]:
            try:
                await asyncio.sleep(1000.0 if (prompt.index, prompt.epoch) == (1, 0) else 0.0)
                return await super().run(prompt, generator)
            except asyncio.CancelledError:
                self.ended += 1
                raise

    workflow = Slow()
    async with make_producer(workflow, 2, batch_size=2, max_staleness=0) as producer:
        selection = producer._rules.selection
        lease = await producer.experience.lease(selection, 0, "trainer", patience=Patience(2, seconds=0.1))
        assert ([tags.row for tags in lease.tags], [tags.fate for tags in lease.dropped]) == (["q0"], ["late"])
        assert workflow.ended == 0 and producer.stats()["rollout/num_in_flight"] == 1
        workflow.version = 1
        producer.set_version(1)
        await settle()
        assert workflow.ended == 1 and producer.stats()["rollout/num_in_flight"] == 2, "those of the next step"
        assert len(await producer.take(1)) == 2
        producer.check()


async def test_prompts_that_take_a_multiple_of_the_mean_are_late_and_others_take_their_places() -> None:
    """Batches of 4 that take 1 s, but every sixth prompt 100 s. The limit is 3 times a mean that counts
    those that it has ended."""

    class Workflow(CallWorkflow):
        seconds: list[float] = []

        async def run(self, prompt: Prompt, generator: Generator) -> list[Trajectory]:
            self._seconds = 100.0 if int(prompt.query_id[1:]) % 6 == 5 else 1.0
            began = asyncio.get_running_loop().time()
            try:
                return await super().run(prompt, generator)
            finally:
                self.seconds.append(asyncio.get_running_loop().time() - began)

    workflow = Workflow()
    async with make_producer(workflow, dynamic_timeout=3.0, max_staleness=0, num_epochs=4) as producer:
        late = []
        for step in range(10):
            await train(producer, workflow, range(step, step + 1))
            late += producer.dropped
        producer.check()
    assert {(tags.fate, tags.reason) for tags in late} == {("late", "slow")} and len(late) >= 6
    assert {int(tags.row[1:]) % 6 for tags in late} == {5} and max(workflow.calls.values()) <= 4, "no second run"
    slow = [seconds for seconds in workflow.seconds if seconds > 1.0]
    assert slow[0] == 3.0 and max(slow) < 9.0


async def test_a_step_whose_prompts_all_hang_is_not_waited_for() -> None:
    class Hanging(CallWorkflow):
        async def run(self, prompt: Prompt, generator: Generator) -> list[Trajectory]:
            self._seconds = 1e6 if prompt.query_id == "q1" else 1.0
            return await super().run(prompt, generator)

    workflow = Hanging()
    async with make_producer(workflow, 4, dynamic_timeout=2.0, batch_size=1, max_staleness=0) as producer:
        taken = await asyncio.wait_for(train(producer, workflow, range(3)), timeout=100)
        assert taken == ["q2@0", "q0@0", "q3@0"], "q1, the third, hangs"


async def test_processors_change_rewards_and_drop_episodes_for_a_reason() -> None:
    def shaped(tags: Tags, trajectories: list[Trajectory]) -> list[Trajectory]:
        return [replace(t, reward=t.reward - 0.25) for t in trajectories]

    def no_even_ones(tags: Tags, trajectories: list[Trajectory]) -> list[Trajectory] | str:
        assert list(tags.rewards) == [t.reward for t in trajectories], "as the one before has left them"
        return "even" if int(tags.row[1:]) % 2 == 0 else trajectories

    trajectory_reward = trajectory(make_dataset(1).at(0), np.array([0])).reward

    workflow = CallWorkflow()
    async with make_producer(workflow, batch_size=2, processors=[shaped, no_even_ones]) as producer:
        groups = await producer.take(0)
        assert {int(t.query_id[1:].partition("@")[0]) % 2 for group in groups for t in group} == {1}
        assert {t.reward for group in groups for t in group} == {trajectory_reward - 0.25}
        assert producer.stats()["dropped/even"] >= 1
        assert {tags.reason for tags in producer.lessee._leases[0].dropped} == {"even"}
