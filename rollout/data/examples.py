"""Rows of fine-tuning as tokens with a mask: only what the assistant writes is trained on.

Invariant: the tokens before a trained turn are those that a generator gets as its prompt at this point, or the
beginning of them where the chat template writes turns without the rest, and a trained turn ends with an end token.
Where the template writes an earlier turn without one, or in another way than the last one (Qwen3 removes its thoughts),
the turns after it are in a sequence of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollout.data.encoder import Encoder
from rollout.data.messages import is_trained
from rollout.data.rows import Example

_SHOWN_CHARS = 1000


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
    """Return one sequence for each example; several where the template writes earlier turns in another way, none where
    nothing is trained on. Raises DatasetError where the template cannot take an example."""
    rendered = [(row, *parts) for row, example in enumerate(examples) for parts in _render(encoder, example)]
    if encoder.chat is not None and any(is_chat for _, _, is_chat in rendered):
        encoder.chat.report()
    token_ids = iter(encoder.tokenise([part.text for _, parts, _ in rendered for part in parts]))
    sequences = []
    for row, parts, is_chat in rendered:
        ids = [next(token_ids) for _ in parts]
        if not is_chat:
            ids[0] = encoder.started(ids[0])
        for part, turn, following in zip(parts, ids, [*ids[1:], [encoder.end_token_id]], strict=True):
            if part.is_trained and not (turn and turn[-1] in encoder.end_token_ids):
                turn.append(following.pop(0))  # of GLM-4 the mark of the next turn
        sequences.append(
            MaskedSequence(
                token_ids=[token for piece in ids for token in piece],
                loss_mask=[p.is_trained for p, piece in zip(parts, ids, strict=True) for _ in piece],
                text="".join(part.text for part in parts),
                row=row,
            )
        )
    return sequences


def _render(encoder: Encoder, example: Example) -> list[tuple[list[Part], bool]]:
    """Return the parts of every sequence of an example, and whether the chat template wrote them."""
    messages = example.messages
    if messages is None:
        text, is_chat = encoder.render_prompt(example.prompt, example.tools, place=example.place)
        if not is_chat:
            return [([Part(text, False), Part(example.answer, True)], False)]
        messages = (*encoder.turn(example.prompt), {"role": "assistant", "content": example.answer})
    chat, prepared = encoder.conversation(messages, example.tools, place=example.place)
    added = len(prepared) - len(messages)  # the system message
    written, sequences = "", list[list[Part]]()
    for number, message in enumerate(messages):
        if number < example.num_untrained or not is_trained(message):
            continue
        turn = chat.turn(prepared[: number + added + 1], example.tools, place=example.place)
        if not sequences or not chat.continues(written, turn.before):
            sequences, written = [*sequences, []], ""
        sequences[-1] += [Part(turn.before[len(written) :], False), Part(turn.written, True)]
        written = turn.before + turn.written
    return [(parts, True) for parts in sequences]


def first_row(encoder: Encoder, sequence: MaskedSequence) -> str:
    """Return a sequence for the log, what is trained on in [[ ]], characters that are not printable as escapes."""
    pieces, start = [], 0
    for end in range(1, len(sequence.token_ids) + 1):
        if end == len(sequence.token_ids) or sequence.loss_mask[end] != sequence.loss_mask[start]:
            text = repr(str(encoder.tokenizer.decode(sequence.token_ids[start:end])))[1:-1]
            if len(text) > _SHOWN_CHARS:
                text = f"{text[: _SHOWN_CHARS // 2]} [...] {text[-_SHOWN_CHARS // 2 :]}"
            pieces.append(f"[[{text}]]" if sequence.loss_mask[start] else text)
            start = end
    counts = f"{sum(sequence.loss_mask)} of {len(sequence.token_ids)} tokens trained, in [[ ]]"
    return f"First row ({counts}): {''.join(pieces)}"
