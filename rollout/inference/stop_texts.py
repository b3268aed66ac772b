"""Texts that end a completion, for generators that know token ids alone.

A generator interrupts a request after every token that may complete such a text; the router then reads the text, and
ends the request or continues it. Invariant: a completion ends with the token that completes the first of the texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


class StopTexts:
    """The stop texts of a run, by the vocabulary of its tokenizer."""

    def __init__(self, tokenizer: Any, texts: Sequence[str]) -> None:
        self._tokenizer, self._texts = tokenizer, tuple(texts)
        self._tail = 4 + max((len(text.encode()) for text in texts), default=0)  # a token has a byte of text or more
        self.token_ids = tuple(self._candidates()) if texts else ()
        """Every token that may complete one of the texts."""

    def ends(self, token_ids: np.ndarray) -> bool:
        """Return whether the last tokens of a completion hold one of the texts."""
        tail = token_ids[-self._tail :].tolist()
        decoded = self._tokenizer.decode(tail, skip_special_tokens=False)
        return any(text in decoded for text in self._texts)

    def _candidates(self) -> list[int]:
        ends = tuple(text[start:] for text in self._texts for start in range(len(text)))
        before = self._tokenizer.encode("a", add_special_tokens=False)[-1:]  # keeps the space that a token begins with
        length = len(self._tokenizer.decode(before))
        written_in_parts = not all(text.isascii() for text in self._texts)
        found = []
        for token in range(len(self._tokenizer)):
            decoded = self._tokenizer.decode([*before, token], skip_special_tokens=False)[length:]
            part = written_in_parts and "\ufffd" in decoded  # some bytes of a character
            if part or decoded.startswith(ends) or any(text in decoded for text in self._texts):
                found.append(token)
        return found
