"""From rows to token ids: the one encoder of training, fine-tuning and evaluation.

A conversation goes through the chat template. A prompt of one text becomes the user's turn of it, or is put into
`PromptFormat.template`, or stays as it is: without a chat template, and where it has the template's marks already.
Invariant: the tokens before a sampled completion are the same wherever that prompt is used, with one token at the
beginning of the sequence at most, and every completion ends with one of `end_token_ids`.

Rows of fine-tuning become tokens with a mask: only what the assistant writes is trained on. Invariant: the tokens
before a trained turn are those that a generator gets as its prompt at this point, or the beginning of them where the
chat template writes turns without the rest, and a trained turn ends with an end token. Where the template writes an
earlier turn without one, or in another way than the last one (Qwen3 removes its thoughts), the turns after it are in a
sequence of their own.
"""

import logging
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from model_specs.model_folder import ModelFolderError, read_end_token_ids
from model_specs.untrusted import read_bytes, read_json_object
from rollout.data.chat_template import ChatTemplate, Messages, Tools, is_trained
from rollout.data.rows import Example, Row
from rollout.data.source import DatasetError
from rollout.types import Tokenizer

logger = logging.getLogger(__name__)

BOXED_INSTRUCTION = "\nPlease reason step by step, and put your final answer within \\boxed{}."
"""What a question of the chat template ends with where reward.function=math judges the answer."""
_BATCH_TEXTS = 1024


@dataclass(frozen=True, kw_only=True)
class PromptFormat:
    """What surrounds a prompt."""

    template: str | None = None
    """Text with {prompt} in its place. None: the chat template, or nothing without one."""
    system: str | None = None
    """Message that a conversation begins with, unless it has one."""
    instruction: str = ""
    """What the user's turn of a prompt of one text ends with, unless the prompt mentions a box already."""
    chat_template: str | None = None
    """A jinja file, or text. None: the tokenizer's template."""
    chat_options: Mapping[str, object] = field(default_factory=dict)
    """Variables of the chat template."""


class Encoder:
    """Renders and tokenises prompts and conversations."""

    def __init__(
        self, tokenizer: Tokenizer, prompt_format: PromptFormat | None = None, *, folder: str | Path = ""
    ) -> None:
        """`folder`: of the model, whose generation_config.json has further end tokens and whose config.json has the
        size of its vocabulary. Raises DatasetError for a template without {prompt} and for a chat template that cannot
        be read."""
        self.tokenizer = tokenizer
        self._format = prompt_format or PromptFormat()
        template = self._format.template
        if template is not None and "{prompt}" not in template:
            message = f"prompt template {template!r} has no {{prompt}}; write it where the prompt belongs"
            raise DatasetError(message, setting="prompt.template")
        given = self._format.chat_template
        self.chat_template = None if given is None else _chat_template(given)
        """Content of prompt.chat_template; None: the tokenizer's own is used, if it has one."""
        self.end_token_ids = _end_token_ids(tokenizer, folder)
        self._start = _start_tokens(tokenizer)
        has_chat_template = bool(given is not None or tokenizer.chat_template)
        self.chat = (
            ChatTemplate(tokenizer, self.chat_template, self._format.chat_options, end_token_ids=self.end_token_ids)
            if has_chat_template
            else None
        )
        """None: the model has no chat template."""
        rendering = [
            template,
            self._format.system,
            self._format.instruction,
            self.chat_template,
            tokenizer.chat_template,
        ]
        self.checksum = zlib.crc32(repr([*rendering, sorted(self._format.chat_options.items())]).encode())
        """Of everything that a prompt is rendered with, but the date."""
        self._vocab_size = _vocab_size(folder)

    def encode(self, rows: Sequence[Row]) -> list[tuple[str, list[int]]]:
        """Return (text, token ids) of every prompt. Raises DatasetError where a template cannot take a row."""
        rendered = [
            (self.render(row.messages, row.tools, place=row.place), True)
            if row.messages is not None
            else self.render_prompt(row.prompt, row.tools, place=row.place)
            for row in rows
        ]
        if self.chat is not None and any(is_chat for _, is_chat in rendered):
            self.chat.report()
        num_as_they_are = sum(row.messages is None and self._is_rendered(row.prompt) for row in rows)
        if self.chat is not None and num_as_they_are:
            logger.info(
                "%d of %d prompts have the marks of the chat template (%s) and are used as they are.",
                num_as_they_are, len(rows), ", ".join(self.chat.marks),
            )  # fmt: skip
        token_ids = self.tokenise([text for text, _ in rendered])
        return [
            (text, ids if is_chat else self.started(ids))
            for (text, is_chat), ids in zip(rendered, token_ids, strict=True)
        ]

    def _is_rendered(self, prompt: str) -> bool:
        if self._format.template is not None or self.chat is None:
            return False
        return any(mark in prompt for mark in self.chat.marks)

    def render_prompt(self, prompt: str, tools: Tools = None, *, place: str) -> tuple[str, bool]:
        """Return the text of a prompt, and whether the chat template wrote it, with all of its special tokens."""
        if self._format.template is not None:
            return self._format.template.replace("{prompt}", prompt), False
        if self.chat is None or self._is_rendered(prompt):
            return prompt, False
        return self.render(self.turn(prompt), tools, place=place), True

    def turn(self, prompt: str) -> Messages:
        """Return a prompt of one text as the user's turn."""
        asks = "\\boxed" in prompt
        return ({"role": "user", "content": prompt + ("" if asks else self._format.instruction)},)

    def render(self, messages: Messages, tools: Tools = None, *, place: str) -> str:
        """Return a conversation in the chat template, up to where the assistant's next turn begins."""
        chat, messages = self.conversation(messages, tools, place=place)
        return chat.render(messages, tools, place=place)

    def conversation(self, messages: Messages, tools: Tools, *, place: str) -> tuple[ChatTemplate, Messages]:
        """Return the chat template, and a conversation with the system message in the form that it reads."""
        if self.chat is None:
            raise DatasetError(
                f"{place}: a conversation, and the model has no chat template: set prompt.chat_template to a jinja "
                "file, or name the column of the text with prompt_field"
            )
        if self._format.system is not None and messages and messages[0]["role"] != "system":
            messages = ({"role": "system", "content": self._format.system}, *messages)
        return self.chat, self.chat.prepare(messages, tools, place=place)

    def tokenise(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each text, without special tokens that the text does not have."""
        ids: list[list[int]] = []
        for first in range(0, len(texts), _BATCH_TEXTS):
            batch = list(texts[first : first + _BATCH_TEXTS])
            ids += self.tokenizer(batch, add_special_tokens=False)["input_ids"]
        largest = max((max(of) for of in ids if of), default=0)
        if self._vocab_size is not None and largest >= self._vocab_size:
            raise DatasetError(
                f"token {self.tokenizer.decode([largest])!r} has id {largest}, and the model has embeddings for "
                f"vocab_size={self._vocab_size} tokens: resize them (resize_token_embeddings of transformers), or use "
                "the tokenizer of the model"
            )
        return ids

    def started(self, token_ids: list[int]) -> list[int]:
        """Return token ids with what the tokenizer puts before a text, unless they begin with it."""
        return token_ids if token_ids[: len(self._start)] == self._start else self._start + token_ids

    @property
    def end_token_id(self) -> int:
        """The token that ends an answer to train on where no template writes one. Raises DatasetError without any."""
        if self.tokenizer.eos_token_id is not None:
            return int(self.tokenizer.eos_token_id)
        if not self.end_token_ids:
            raise DatasetError("the tokenizer has no eos_token, and generation_config.json no eos_token_id; add one")
        return self.end_token_ids[0]


def _end_token_ids(tokenizer: Tokenizer, folder: str | Path) -> tuple[int, ...]:
    """Return the token ids that end an answer: the tokenizer's end and pad tokens, and the end tokens of
    generation_config.json (a chat model's turn has its own end token). Raises DatasetError."""
    try:
        of_model = read_end_token_ids(folder) if folder else ()
    except (OSError, ModelFolderError) as error:
        raise DatasetError(str(error)) from error
    ends = {tokenizer.eos_token_id, tokenizer.pad_token_id, *of_model}
    return tuple(sorted(end for end in ends if end is not None))


def _vocab_size(folder: str | Path) -> int | None:
    """Return the number of embeddings in config.json, None where there is none. Raises DatasetError."""
    path = Path(folder) / "config.json"
    if not folder or not path.is_file():
        return None
    try:
        size = read_json_object(path).get("vocab_size")
    except (OSError, ValueError) as error:
        raise DatasetError(f"{path}: not readable: {error}") from error
    return size if type(size) is int else None


def _start_tokens(tokenizer: Tokenizer) -> list[int]:
    """Return what the tokenizer puts before a text by itself: the token at the beginning of the sequence, if any."""
    with_specials, alone = tokenizer(["a"])["input_ids"][0], tokenizer(["a"], add_special_tokens=False)["input_ids"][0]
    for length in range(len(with_specials)):
        if with_specials[length : length + len(alone)] == alone:
            return list(with_specials[:length])
    return []


def _chat_template(given: str) -> str:
    """Return a jinja template that was given as a file or as text."""
    if "{{" in given or "{%" in given:
        return given
    path = Path(os.path.expanduser(given))
    try:
        return read_bytes(path).decode()
    except (OSError, ValueError) as error:
        message = f"{path}: cannot read the chat template: {error}; name a jinja file, or write the text of one"
        raise DatasetError(message, setting="prompt.chat_template") from error


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
