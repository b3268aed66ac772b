"""Rows of fine-tuning as tokens with a mask: only what the assistant writes is trained on.

Invariant: the tokens before a trained turn are those that a generator gets as its prompt at this point. Where a chat
template writes an earlier turn in another way than the last one (Qwen3 removes its thoughts), a conversation therefore
becomes one sequence for each turn of the assistant.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rollout.data.encoder import Encoder
from rollout.data.messages import Messages
from rollout.data.rows import Example
from rollout.data.source import DatasetError

Tools = tuple[Any, ...] | None


@dataclass(frozen=True)
class Part:
    """A piece of a sequence."""

    text: str
    is_trained: bool


@dataclass(frozen=True)
class MaskedSequence:
    """One sequence to train on."""

    token_ids: list[int]
    loss_mask: list[bool]
    """True for the tokens to train on."""
    text: str
    row: int
    """Number of the row, from 0, that it comes from."""


def encode_examples(encoder: Encoder, examples: Sequence[Example]) -> list[MaskedSequence]:
    """Return one sequence for each example, or for each turn of the assistant where the template requires that.

    Raises DatasetError where the template cannot take an example."""
    rendered = [(row, *parts) for row, example in enumerate(examples) for parts in _render(encoder, example)]
    token_ids = iter(encoder.tokenise([part.text for _, parts, _ in rendered for part in parts]))
    sequences = []
    for row, parts, is_chat in rendered:
        ids = [next(token_ids) for _ in parts]
        if not is_chat:
            ids[0] = encoder.started(ids[0])
        ids[-1] = _ended(encoder, ids[-1])
        sequences.append(
            MaskedSequence(
                token_ids=[token for piece in ids for token in piece],
                loss_mask=[p.is_trained for p, piece in zip(parts, ids, strict=True) for _ in piece],
                text="".join(part.text for part in parts),
                row=row,
            )
        )
    return sequences


def encode_answers(
    encoder: Encoder, prompt: str | Messages, answers: Sequence[str | Messages], *, place: str
) -> tuple[list[int], list[list[int]]]:
    """Return the token ids of a prompt, and of each of several answers to it up to its end token.

    All are texts, or all are messages. Raises DatasetError where the template cannot take them."""
    if isinstance(prompt, str):
        before, is_chat = encoder.render_prompt(prompt, place=place)
        turns: Messages = encoder.turn(prompt)
        answers = [({"role": "assistant", "content": answer},) for answer in answers] if is_chat else answers
    else:
        before, is_chat, turns = encoder.render(prompt, place=place), True, prompt
    tails = [
        answer
        if isinstance(answer, str)
        else _tail(encoder, (*turns, *answer), before, num_new=len(answer), place=place)
        for answer in answers
    ]
    start, *ends = encoder.tokenise([before, *tails])
    return start if is_chat else encoder.started(start), [_ended(encoder, ids) for ids in ends]


def _ended(encoder: Encoder, token_ids: list[int]) -> list[int]:
    """Return token ids that end with a token at which a generator stops."""
    if token_ids and token_ids[-1] in encoder.end_token_ids:
        return token_ids
    return [*token_ids, encoder.end_token_id]


def _render(encoder: Encoder, example: Example) -> Iterator[tuple[list[Part], bool]]:
    """Yield the parts of every sequence of an example, and whether the chat template wrote them."""
    if example.messages is None:
        text, is_chat = encoder.render_prompt(example.prompt, place=example.place)
        yield [Part(text, False), Part(_answer(encoder, example, text) if is_chat else example.answer, True)], is_chat
        return
    turns = [i for i, message in enumerate(example.messages) if message["role"] == "assistant"]
    whole = _one_sequence(encoder, example, turns)
    if whole is not None:
        yield whole, True
        return
    for turn in turns:
        before = encoder.render(example.messages[:turn], example.tools, place=example.place)
        written = _tail(encoder, example.messages[: turn + 1], before, tools=example.tools, place=example.place)
        yield [Part(before, False), Part(written, True)], True


def _answer(encoder: Encoder, example: Example, before: str) -> str:
    """Return what the assistant writes after `before`, as the template ends a turn."""
    messages = (*encoder.turn(example.prompt), {"role": "assistant", "content": example.answer})
    return _tail(encoder, messages, before, tools=example.tools, place=example.place)


def _tail(
    encoder: Encoder, messages: Messages, before: str, *, num_new: int = 1, tools: Tools = None, place: str
) -> str:
    """Return the last `num_new` messages of a conversation as the template writes them after `before`.

    A single turn that it writes in another way there is its text alone; of several, this raises DatasetError."""
    text = encoder.render(messages, tools, place=place, opens=False).rstrip()
    if text.startswith(before):
        return text.removeprefix(before)
    if num_new > 1:
        raise DatasetError(f"{place}: the chat template changes the prompt when an answer follows; write texts")
    return str(messages[-1]["content"])


def _one_sequence(encoder: Encoder, example: Example, turns: Sequence[int]) -> list[Part] | None:
    """Return the whole conversation with its trained turns. None: the template writes earlier turns in another way."""
    assert example.messages is not None, "the caller has seen them"
    parts: list[Part] = []
    written = ""
    for turn in turns:
        before = encoder.render(example.messages[:turn], example.tools, place=example.place)
        after = encoder.render(example.messages[: turn + 1], example.tools, place=example.place, opens=False)
        end = after.rstrip()
        if not (before.startswith(written) and end.startswith(before)):
            return None
        parts += [Part(before[len(written) :], False), Part(end[len(before) :], True)]
        written = end
    return parts
