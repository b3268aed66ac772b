"""Which answers of a step are kept as text, and how they look."""

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from core.monitoring.monitor import Monitor, TensorBoardSink
from core.monitoring.samples import Sample, choose_evaluation_samples, choose_samples, log_text, printable, shortened
from core.monitoring.screen import Screen
from rollout.data.prompts import PromptDataset
from rollout.data.task_sets import TaskSet, TaskSets
from rollout.evaluation import Episode
from rollout.experience import episode_id, without_epoch
from rollout.experience.selection import Schedule
from rollout.types import PROMPT_VERSION, Prompt, Trajectory


def spell(tokens: np.ndarray) -> str:
    return "".join(chr(ord("a") + t) for t in tokens)


def answer(query_id: str, reward: float, versions: Sequence[int] = (3, 4), finish: str = "stop") -> Trajectory:
    """A prompt "ab" and one token for each version."""
    all_versions = np.array([PROMPT_VERSION, PROMPT_VERSION, *versions], np.int32)
    total = len(all_versions)
    return Trajectory(
        query_id=query_id, token_ids=np.arange(total, dtype=np.int32), loss_mask=all_versions >= 0,
        rollout_logprobs=np.zeros(total, np.float32), versions=all_versions, reward=reward,
        finish_reason=finish, metrics={"num_turns": 2},
    )  # type: ignore[arg-type]  # fmt: skip


def choose(groups: list[list[Trajectory]], share: float = 1.0) -> list[Sample]:
    return choose_samples(groups, [f"s/q/{50 + i}" for i in range(len(groups))], spell, step=7, share=share)


def test_a_sample_has_text_reward_lengths_versions_and_its_row_holds_all_of_it() -> None:
    (sample,) = choose([[answer("q", 0.5, versions=(3, 5, 4), finish="length")]])
    assert sample == Sample(
        step=7, query_id="q", episode="s/q/50", index=0, prompt="ab", answer="cde", reward=0.5, finish_reason="length",
        prompt_tokens=2, answer_tokens=3, oldest_version=3, newest_version=5, notable=("best", "worst", "longest"),
        metrics={"num_turns": 2.0},
    )  # fmt: skip
    assert Sample.from_row({"step": 7, **sample.to_row()}) == sample


def test_answers_of_an_evaluation_are_chosen_as_those_of_a_step() -> None:
    figures = [(0.0, 3), (1.0, 2), (-1.0, 2), (0.5, 9), *[(0.5, 1)] * 36]
    answers = [
        (
            Prompt(query_id=f"q{i}", index=i, task="math", text="", token_ids=np.array([0, 1]), solutions=()),
            Episode(text=f"answer {i}", score=score, tokens=tokens, finish_reason="stop"),
        )
        for i, (score, tokens) in enumerate(figures)
    ]
    kept = choose_evaluation_samples("hard", answers, spell, step=7, share=0.1)
    notable = {name: sample for sample in kept for name in sample.notable}
    assert {name: s.query_id for name, s in notable.items()} == {"best": "q1", "worst": "q2", "longest": "q3"}
    assert notable["best"] == Sample(
        step=7, query_id="q1", episode="hard/q1", index=0, prompt="ab", answer="answer 1", reward=1.0,
        finish_reason="stop", prompt_tokens=2, answer_tokens=2, oldest_version=7, newest_version=7,
        notable=("best",), evaluation="hard",
    )  # fmt: skip
    assert 3 < len(kept) < 20
    every = choose_evaluation_samples("hard", answers, spell, step=7, share=1.0)
    assert [s.episode for s in every] == [f"hard/q{i}" for i in range(40)]
    in_training = choose([[answer(p.query_id, 0.5)] for p, _ in answers], share=0.1)
    whole = {s.query_id for s in kept if not s.notable}
    assert whole == {s.query_id for s in in_training if not s.notable} - {s.query_id for s in notable.values()}


def test_best_worst_and_longest_are_of_the_whole_step_and_kept_beyond_the_share() -> None:
    groups = [
        [answer("q0", 0.0), answer("q0", 0.5)],
        [answer("q1", 1.0), answer("q1", 0.5, versions=(1,) * 9)],
        [answer("q2", 0.5), answer("q2", -1.0)],
    ]
    kept = choose(groups, share=1e-9)
    notable = {name: (s.query_id, s.index) for s in kept for name in s.notable}
    assert notable == {"best": ("q1", 0), "worst": ("q2", 1), "longest": ("q1", 1)}
    whole = [s.query_id for s in kept]
    assert len({q for q in whole if whole.count(q) == 2}) >= 1, "one prompt at least is there with all its answers"


def test_the_same_prompts_are_kept_in_every_step_about_as_many_as_the_share_says() -> None:
    groups = [[answer(f"q{i}", reward) for reward in (float(i), 0.0, 0.5)] for i in range(400)]

    def picked(groups: list[list[Trajectory]]) -> set[str]:
        ids = [s.query_id for s in choose(groups, share=0.25)]
        return {q for q in ids if ids.count(q) == 3}

    first = picked(groups)
    assert 70 <= len(first) <= 130
    assert picked(groups[::-1]) == first
    assert picked(groups[:100]) == first & {f"q{i}" for i in range(100)}
    assert len(choose(groups)) == 1200, "all of them with a share of 1"


def test_tokens_of_an_environment_are_turns_of_their_own() -> None:
    (sample,) = choose([[answer("q", 1.0, versions=(3, 3, PROMPT_VERSION, 4))]])
    assert sample.answer == "cdef" and (sample.oldest_version, sample.newest_version) == (3, 4)
    assert [(t.by, t.text) for t in sample.turns] == [("model", "cd"), ("environment", "e"), ("model", "f")]
    assert Sample.from_row({"step": 7, **sample.to_row()}) == sample


def test_a_text_cannot_control_the_terminal_and_a_long_one_shows_its_start_and_end() -> None:
    assert printable("a\x1b[2J\r\nü\u202e") == "a\\x1b[2J\\r\nü\\u202e"
    assert shortened("abc" * 3, 9) == "abcabcabc"
    assert shortened("a" * 50 + "b" * 50, 10) == "aaaaa [... 90 characters ...] bbbbb"


def test_the_log_shows_what_is_known_of_an_answer() -> None:
    (sample,) = choose([[answer("q", 1.0)]])
    assert log_text(sample) == (
        "Step 7, best and worst and longest answer: reward 1.000, 2 tokens (stop), weights of version 3 to 4, prompt "
        "q, answer 0\n  prompt: ab\n  answer: cd"
    )
    (short,) = choose([[answer("q", 1.0, versions=(3,))]])
    assert ", 1 token (stop)," in log_text(short)


class Texts:
    """A sink that takes samples too."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def write(self, step: int, metrics: object) -> None: ...

    def write_samples(self, step: int, samples: Sequence[Sample]) -> None:
        assert [s.answer for s in samples] == ["cd"]
        self.steps.append(step)

    def close(self) -> None: ...


@pytest.mark.parametrize(("every", "due"), [(3, [1, 3, 6]), (1, [1, 2, 3, 4, 5, 6]), (None, [])])
def test_samples_are_reported_after_the_first_step_and_every_few_steps(every, due, caplog) -> None:
    sink, read = Texts(), []

    def samples() -> list[Sample]:
        read.append(1)
        return choose([[answer("q", 1.0)]])

    monitor = Monitor(
        screen=Screen(Console(quiet=True), compact=False),
        sinks=[sink], consumed=None, schedule=Schedule(num_prompts=6, batch_size=1), done_steps=0, elapsed=0.0,
        sample_steps=every,
    )  # fmt: skip
    with caplog.at_level(logging.INFO):
        for step in range(1, 7):
            monitor.samples(step, samples)
    assert sink.steps == due and len(read) == len(due), "nothing is fetched where nothing is due"
    assert caplog.text.count("answer: cd") == len(due)


def test_tensorboard_shows_the_text_of_a_sample_under_what_is_notable(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorBoardSink(tmp_path, continue_after=-1)
    sink.write_samples(7, choose([[answer("q", 1.0), answer("q", 0.0, versions=(1, 1, 1))]]))
    sink.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    names = events.Tags()["tensors"]
    assert names == [f"samples/{name}/text_summary" for name in ("best", "worst", "longest")]
    (event,) = events.Tensors(names[1])
    assert event.step == 7
    text = event.tensor_proto.string_val[0].decode()
    assert "reward 0.000" in text and "    ab\n\n    cde" in text


def test_rows_of_two_sets_with_one_name_have_references_of_their_own() -> None:
    stream = TaskSets([
        TaskSet(name, PromptDataset([
            Prompt(query_id="0", index=0, task="", text="", token_ids=np.array([0, 1]), solutions=(name,)),
        ], seed=1))
        for name in ("a/b", "c")
    ])  # fmt: skip
    references = {without_epoch(episode_id(prompt)): prompt.answers[0] for prompt in stream.prompts}
    ids = [episode_id(stream.at(k)) for k in range(4)]
    samples = choose_samples(
        [[answer("0", 0.5)] for _ in ids], ids, spell, step=7, share=1.0, references=references
    )  # fmt: skip
    assert [sample.reference for sample in samples] == ["a/b", "c"] * 2
