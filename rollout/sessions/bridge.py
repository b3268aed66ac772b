"""Between messages and tokens: prompts, what follows an answer, and answers as messages.

Invariant: tokens that were sampled are never made from text. A conversation is rendered once, up to the first answer;
after it, only new messages are.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import cached_property

from rollout.data.chat_template import Message, Messages, Tools
from rollout.data.encoder import Encoder
from rollout.data.source import DatasetError
from rollout.sessions.calls import CallError
from rollout.sessions.tool_calls import Read, ToolFormat, split_calls, tool_format

_PLACE = "the request"


class Bridge:
    """The chat template of the policy, for conversations that go on."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self._tokenizer = encoder.tokenizer
        self._ends = frozenset(encoder.end_token_ids)

    def prompt(self, messages: Messages, tools: Tools) -> list[int]:
        """Return the tokens of a conversation up to where the next answer begins. Raises CallError."""
        try:
            return self._tokens(self._encoder.render(messages, tools, place=_PLACE))
        except DatasetError as error:
            raise CallError(str(error), param="messages") from error

    def following(self, answer: Message, sampled: Sequence[int], new: Messages, tools: Tools) -> list[int]:
        """Return the tokens between an answer, whose last ones are `sampled`, and the next: its end, if it was not
        sampled, and the messages `new`. Raises CallError."""
        try:
            chat, new = self._encoder.conversation(new, tools, place=_PLACE)
            end, rest = chat.following(answer, new, tools, place=_PLACE)
        except DatasetError as error:
            raise CallError(str(error), param="messages") from error
        if not end:
            return self._tokens(rest)
        tokens = self._tokens(end + rest)  # from the end token on: a tokenizer may begin a text with a blank
        last = int(sampled[-1]) if len(sampled) else None
        return tokens[1:] if last in self._ends and (chat.ends_turns or last == tokens[0]) else tokens

    def text(self, token_ids: Sequence[int]) -> str:
        """Return the text of an answer, without the token that ended it."""
        ids = [int(token) for token in token_ids]
        if ids and ids[-1] in self._ends:
            ids.pop()
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))

    def read(self, text: str, tools: Tools) -> tuple[str, str, list[Read]]:
        """Return (thoughts, text, calls of tools) of an answer. What is not written as the template writes tool calls
        is text, and so are calls where the client offered no `tools`."""
        thoughts, closing, said = text.rpartition("</think>")
        thoughts = thoughts.strip().removeprefix("<think>").strip() if closing else ""
        form = self._tool_format if tools else None
        said, calls = (said, []) if form is None else split_calls(said, form, tools or ())
        return thoughts, said.strip(), calls

    def cut(self, token_ids: Sequence[int], stop: Sequence[str]) -> tuple[int, str | None]:
        """Return how many tokens there are up to the first of the texts `stop`, its own included, and which it is."""

        def found(end: int) -> str | None:
            text = self.text(token_ids[:end])
            return next((s for s in stop if s in text), None)

        if found(len(token_ids)) is None:
            return len(token_ids), None
        end = bisect_left(range(len(token_ids)), True, key=lambda end: found(end) is not None)
        return end, found(end)

    @property
    def writes_calls(self) -> bool:
        """Whether the template writes tool calls in a form that read() finds."""
        return self._tool_format is not None

    @cached_property
    def _tool_format(self) -> ToolFormat | None:
        return tool_format(self._encoder.chat) if self._encoder.chat is not None else None

    def _tokens(self, text: str) -> list[int]:
        return list(self._encoder.tokenise([text])[0])
