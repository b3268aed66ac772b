"""The chat template of a model: the one place that renders it, and that finds an answer in what it renders.

What transformers renders is the reference. Invariant: text that comes out of here has everything that its messages say;
a template that leaves something out is an error, not a shorter prompt.
"""

import json
import logging
import os
import re
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import cached_property, partial
from typing import Any, NamedTuple

from rollout.data.source import DatasetError, parsed
from rollout.types import Tokenizer

Message = dict[str, Any]
"""{"role": ..., "content": ..., ...}, with whatever keys chat templates read."""
Messages = tuple[Message, ...]

ANSWER_KEYS = ("content", "reasoning_content", "reasoning", "thinking", "tool_calls", "function_call", "refusal")
"""Keys of what the assistant writes."""
LOSS_KEYS = ("weight", "train", "training", "loss")
"""Keys that say whether a turn of the assistant is trained on: 0 or false for no."""
_ROLES = {
    "user": "user", "human": "user", "system": "system", "assistant": "assistant", "gpt": "assistant",
    "bot": "assistant", "chatgpt": "assistant", "model": "assistant", "tool": "tool", "function_response": "tool",
    "observation": "tool",
}  # fmt: skip
"""Names of the roles, in whatever case."""


def is_conversation(value: object) -> bool:
    """Return whether a value is a list of messages, or json of one."""
    value = parsed(value) if isinstance(value, str) else value
    first = value[0] if isinstance(value, list | tuple) and value else None
    return isinstance(first, Mapping) and bool(first.keys() & {"role", "from"})


def read_messages(value: object, column: str, *, may_be_empty: bool = False) -> Messages:
    """Return the messages in a column. `may_be_empty`: turns without a text are allowed, as a policy may sample one.
    Raises ValueError that names the column and the message."""
    value = parsed(value) if isinstance(value, str) else value
    if not isinstance(value, list | tuple) or not value:
        found = type(value).__name__
        raise ValueError(
            f'"{column}" must be a list of messages, as [{{"role": "user", "content": "..."}}], found {found}'
        )
    return tuple(
        _message(message, f'"{column}", message {number}', may_be_empty)
        for number, message in enumerate(value, start=1)
    )


def _message(message: object, place: str, may_be_empty: bool) -> Message:
    if not isinstance(message, Mapping):
        raise ValueError(f"{place}: must have a role and content, found {type(message).__name__}")
    role = message.get("role", message.get("from"))
    if not isinstance(role, str) or not role:
        raise ValueError(f"{place}: has no role, only {sorted(message)}")
    content = message.get("content", message.get("value"))
    role = _ROLES.get(role.lower(), role)
    text = _text(content, place)
    text.encode()  # a lone surrogate is valid json and would fail in the tokenizer, far from its row
    others = {k: v for k, v in message.items() if k not in ("role", "from", "content", "value") and v is not None}
    if calls := others.pop("tool_calls", None):
        others["tool_calls"] = _tool_calls(calls, place)
    says = may_be_empty or text.strip() or role in ("system", "tool") or any(map(others.get, ANSWER_KEYS))
    if not says:
        raise ValueError(f"{place}: the content of role {role!r} is empty")
    for key in LOSS_KEYS:
        if others.get(key, 1) not in (0, 1):
            raise ValueError(f"{place}: {key} must be 0 or 1, false or true, found {others[key]!r:.60}")
    return {"role": role, "content": text, **others}


def is_trained(message: Message) -> bool:
    """Return whether fine-tuning trains on a message: one of the assistant that does not say otherwise."""
    return message["role"] == "assistant" and all(message.get(key, 1) for key in LOSS_KEYS)


def _tool_calls(value: object, place: str) -> list[dict[str, object]]:
    """Return tool calls as {type, function: {name, arguments}} with arguments as dictionaries."""
    value = parsed(value) if isinstance(value, str) else value
    if not isinstance(value, list | tuple) or not all(isinstance(call, Mapping) for call in value):
        raise ValueError(f"{place}: tool_calls must be a list of calls, found {str(value)[:60]!r}")
    calls = []
    for call in value:
        function = call.get("function", call)
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ValueError(f"{place}: a tool call must have a function with a name, found {str(call)[:60]!r}")
        given = function.get("arguments")
        arguments = parsed(given.strip() or "{}") if isinstance(given, str) else given or {}
        if not isinstance(arguments, Mapping):
            raise ValueError(f"{place}: arguments of a tool call must be a JSON object, found {str(given)[:60]!r}")
        named = call if "function" in call else {"type": "function"}
        calls.append({**named, "function": {**function, "arguments": arguments}})
    return calls


def _text(content: object, place: str) -> str:
    if content is None:
        return ""
    if isinstance(content, list | tuple):
        kinds = {part.get("type") if isinstance(part, Mapping) else type(part).__name__ for part in content}
        if kinds - {"text"}:
            raise ValueError(
                f"{place}: content of type {', '.join(map(str, sorted(kinds, key=str)))}; only text is supported"
            )
        return "".join(_text(part.get("text"), place) for part in content)
    if not isinstance(content, str):
        raise ValueError(f"{place}: content must be a text, found {type(content).__name__}")
    return content


def read_tools(value: object, column: str) -> tuple[object, ...] | None:
    """Return the functions that a row offers: JSON schemas, as a list or as json text. Raises ValueError."""
    value = parsed(value) if isinstance(value, str) else value
    if value is None or value == "" or value == []:
        return None
    if not isinstance(value, list | tuple):
        raise ValueError(f'"{column}" must be a list of JSON schemas of functions, found {type(value).__name__}')
    return tuple(parsed(tool) if isinstance(tool, str) else tool for tool in value)


def split_answer(messages: Messages) -> tuple[Messages, str | None]:
    """Return a conversation without the assistant's turns at its end, and the last one's text."""
    end = len(messages)
    while end and messages[end - 1]["role"] == "assistant":
        end -= 1
    return messages[:end], None if end == len(messages) else str(messages[-1]["content"])


logger = logging.getLogger(__name__)

Tools = tuple[object, ...] | None
Convert = Callable[[Mapping[str, object]], object]
"""Brings the arguments of a tool call into another form."""

_SECONDS = 10
"""Time limit of rendering one conversation, which takes milliseconds."""
_BYTES = 2**30
"""Memory limit of rendering one conversation."""
_USER, _ANSWER, _ARGUMENT = "the user's question", "the assistant's answer", "name_of_an_argument"
"""Contents that are looked for in rendered text."""
_MISWRITTEN = re.compile(rf"['\\\\]\"?{_ARGUMENT}")
"""An argument in Python's notation, or in JSON in a JSON text."""
_KEY = "prompt.chat_template"
_PROBE = "tried on a short conversation"
_WAY_OUT = f"set {_KEY} to a jinja file"
_MARK = re.compile(r"<[^<>]*>|\[[^\[\]]*\]")
_PIECES = re.compile(rf"{_MARK.pattern}|\s+|[^\s<\[]+|.")
_NAMES = ("id", "type", "index")
"""Keys of a tool call that are no part of the answer."""


class Turn(NamedTuple):
    """A turn of the assistant in rendered text."""

    before: str
    written: str
    """What the assistant writes after `before`, up to the end of its turn."""


class ChatTemplate:
    """A chat template, with the tokens that end an answer."""

    def __init__(
        self, tokenizer: Tokenizer, template: str | None, options: Mapping[str, object], *, end_token_ids: Sequence[int]
    ) -> None:
        """`template`: jinja text. None: that of the tokenizer. `options`: further variables."""
        self._tokenizer, self._template = tokenizer, template
        self._ends = [text for token in end_token_ids if (text := str(tokenizer.decode([token])))]
        self._now = datetime.now()
        self._options = {"strftime_now": self._now.strftime, **options}  # one date for all rows
        self._calls: Callable[[Message], Message] | None = None
        self._opened: dict[str, str] = {}
        """Tools: what the template writes before the answer to a question."""
        self._warned: set[tuple[str, str]] = set()

    def prepare(self, messages: Messages, tools: Tools = None, *, place: str) -> Messages:
        """Return messages in the form that the template reads: contents as texts or lists of parts, arguments of tool
        calls as dictionaries or as JSON text. Raises DatasetError."""
        messages = tuple({k: v for k, v in message.items() if k not in LOSS_KEYS} for message in messages)
        if self._reads_parts:
            messages = tuple(map(_in_parts, messages))
        calling = next((i for i, message in enumerate(messages) if message.get("tool_calls")), None)
        if calling is None:
            return messages
        convert = self._calls or self._find_calls(messages[: calling + 1], tools, place)
        return tuple(map(convert, messages))

    def render(self, messages: Messages, tools: Tools = None, *, place: str) -> str:
        """Return a prepared conversation up to where the assistant's next turn begins. Raises DatasetError where the
        template cannot take it, or leaves something out."""
        text = self._render(messages, tools, place=place)
        self._check_written(messages, text, place)
        return text

    def turn(self, messages: Messages, tools: Tools = None, *, place: str) -> Turn:
        """Return the last of prepared messages, one of the assistant, as it is trained on. Raises DatasetError where it
        cannot be found in what the template writes."""
        before = self._render(messages[:-1], tools, place=place)
        whole = self._up_to_end(self._render(messages, tools, place=place, opens=False))
        last = messages[-1]
        if whole.startswith(before):
            turn = Turn(before, whole[len(before) :])
        else:
            turn = self._opened_otherwise(messages, tools, before, whole, place)
        lost = [key for key in last if key != "role" and not _is_written(last[key], turn.written)]
        if answers := [key for key in lost if key in ANSWER_KEYS]:
            hint = "" if "tool_calls" in answers else ", or write thoughts into content, as <think>...</think>"
            raise self._error(
                f"{place}: the chat template leaves out {' and '.join(answers)} of the assistant's turn, which would "
                f"not be trained; {_WAY_OUT} that writes it{hint}"
            )
        for key in lost:
            self._warn("the chat template leaves out %r of the assistant's turns (first: %s)", key, place)
        since = max((i for i, m in enumerate(messages[:-1], 1) if m["role"] == "assistant"), default=0)
        self._check_written(messages[since:-1], before, place)
        return turn

    def following(self, turn: Message, new: Messages, tools: Tools = None, *, place: str) -> Turn:
        """Return what the template writes after a turn of the assistant: as `before` the end of that turn, as `written`
        the rest, with the messages `new`, up to where the next turn begins. What precedes the turn is not asked for, so
        that a template that rewrites it later changes nothing. Raises DatasetError."""
        question = {"role": "user", "content": _USER}
        turn = {**turn, "role": "assistant", "content": _ANSWER}
        question, turn, *prepared = self.prepare((question, turn, *new), tools, place=place)
        new = tuple(prepared)
        if (opened := self._opened.get(repr(tools))) is None:
            opened = self._opened[repr(tools)] = self._render((question,), tools, place=place)
        text = self._render((question, turn, *new), tools, place=place)
        self._check_written(new, text, place)
        before = os.path.commonprefix((opened, text))
        if _USER not in before:
            raise self._error(
                f"{place}: the chat template changes what stands before the assistant's turn; {_WAY_OUT} that does not"
            )
        after = text[len(before) :]
        ends = [(after.index(end), end) for end in self._ends if end in after]
        if ends:
            at, end = min(ends)
            return Turn(end, after[at + len(end) :])
        if turn.get("tool_calls") or _ANSWER not in after:
            raise self._error(f"{place}: the chat template has no token that ends the assistant's turn; {_WAY_OUT}")
        return Turn("", after.partition(_ANSWER)[2])

    @cached_property
    def ends_turns(self) -> bool:
        """Whether a turn has an end of its own; otherwise the mark of the next turn ends it, as in GLM's templates."""
        return bool(self._end[0].strip())

    def ends_turn(self, written: str) -> bool:
        """Return whether the text of an answer ends with an end token."""
        return written.rstrip().endswith(tuple(self._ends))

    def calls_as_written(self, calls: Sequence[Mapping[str, object]]) -> str | None:
        """Return what the template makes of an answer of these tool calls; None where it does not take them."""
        turns = ({"role": "user", "content": _USER}, {"role": "assistant", "content": "", "tool_calls": list(calls)})
        try:
            opened = self._render(self.prepare(turns[:1], place=_PROBE), place=_PROBE)
            text = self._render(self.prepare(turns, place=_PROBE), place=_PROBE, opens=False)
        except DatasetError:
            return None
        return text[len(os.path.commonprefix((text, opened)).rstrip("<")) :]  # marks stay whole

    def continues(self, written: str, text: str) -> bool:
        """Return whether rendered text goes on after an answer, at whose end a generator stops."""
        ends, following = tuple(self._ends), text.removeprefix(written)
        return text.startswith(written) and (written.endswith(ends) or following.startswith(ends))

    def report(self) -> None:
        """Warn where answers run on after the end of their turn, and log the date that the template writes."""
        _ = self._end
        if "strftime_now" in str(self._template or self._tokenizer.chat_template):
            logger.info("The chat template writes the time of this start: %s", self._now.isoformat(" ", "seconds"))

    @cached_property
    def marks(self) -> tuple[str, ...]:
        """Added tokens that open the user's turn: a prompt that has one is in the template already."""
        opening, found, _ = self._probe(1).partition(_USER)
        return tuple(token for token in self._added_tokens if found and token in opening)

    @cached_property
    def _added_tokens(self) -> list[str]:
        """Added tokens that look like marks."""
        added = {str(token.content) for token in self._tokenizer.added_tokens_decoder.values()}
        return sorted(filter(_MARK.fullmatch, added))

    @cached_property
    def _reads_parts(self) -> bool:
        """Whether the template reads a content only as a list of {type, text}."""
        question = {"role": "user", "content": _USER}
        with suppress(DatasetError):
            if _USER in self._render((question,), place=_PROBE):
                return False
        with suppress(DatasetError):
            text = self._render((_in_parts(question),), place=_PROBE)
            return _USER in text and "'type'" not in text  # or it writes the list itself
        return False  # it takes no such conversation: the rows may be others

    def _probe(self, num_turns: int, *, opens: bool = True) -> str:
        """Return what the template makes of a question, an answer, and a question."""
        contents = ("user", _USER), ("assistant", _ANSWER), ("user", _USER)
        turns = tuple({"role": role, "content": text} for role, text in contents[:num_turns])
        return self._render(self.prepare(turns, place=_PROBE), place=_PROBE, opens=opens)

    @cached_property
    def _end(self) -> tuple[str, str]:
        """What the template writes after an answer: the end of the turn, and what no generator samples after it."""
        try:
            text, opened, longer = self._probe(2, opens=False), self._probe(2), self._probe(3)
        except DatasetError:
            return "", ""  # it takes no such conversation: the rows may be others
        after, next_turn = text.rpartition(_ANSWER)[2], longer.partition(_ANSWER)[2]
        if _ANSWER not in text or not after.strip():
            return "", ""
        ends = [after.index(token) + len(token) for token in self._ends if token in after]
        if ends:
            return after[: min(ends)], after[min(ends) :].rstrip()
        marks = [after.index(token) + len(token) for token in self._added_tokens if token in after]
        if marks:
            message = "the chat template ends a turn with %r, which is no end token (%s): answers run on after it. Add "
            message += "its id to eos_token_id in generation_config.json"
            self._warn(message, after[: min(marks)].strip(), ", ".join(self._ends))
        if text.strip() != opened.strip() or next_turn.strip().startswith(after.strip()):
            return after.rstrip(), ""
        if not marks:
            raise self._error(
                f"{_PROBE}: the chat template opens a turn after every answer ({after!r}) and has no token that "
                f"ends one; {_WAY_OUT} that opens a turn only where add_generation_prompt is set"
            )
        return after[: min(marks)], after[min(marks) :].rstrip()

    def _up_to_end(self, text: str) -> str:
        """Return rendered text up to where a generator stops."""
        return text.rstrip().removesuffix(self._end[1]).rstrip()

    def _opened_otherwise(self, messages: Messages, tools: Tools, before: str, whole: str, place: str) -> Turn:
        """Return a turn that does not begin as the prompt of a generator ends: R1's prompts end in <think>, its turns
        have no thoughts. The turn is what follows the marks that both have, unless its content ends the thoughts that
        the prompt begins."""
        closed = self._up_to_end(self._render(messages[:-1], tools, place=place, opens=False))
        if not (before.startswith(closed) and whole.startswith(closed)):
            raise self._error(
                f"{place}: the chat template changes what stands before the assistant's turn when the turn follows; "
                f"{_WAY_OUT} that does not, or write rows as texts"
            )
        start = len(closed)
        for piece in _PIECES.findall(before, start):
            if not whole.startswith(piece, start):
                break
            start += len(piece)
        opening, written = before[start:], whole[start:]
        thoughts = _with_thoughts(messages[-1]["content"], opening, written)
        if thoughts is not None:
            return Turn(before, thoughts)
        message = (
            "the chat template ends the prompts of generators in %r and writes turns without it; they are trained "
        )
        self._warn(message + "as it writes them (first: %s)", opening, place)
        return Turn(before[:start], written)

    def _find_calls(self, messages: Messages, tools: Tools, place: str) -> Callable[[Message], Message]:
        """Return what brings a message with tool calls into the form that the template writes, tried on the first one:
        arguments as dictionary or as JSON text, and beside them an empty content as "" or as None."""
        *before, calling = messages
        calling = _calling(calling, convert=lambda _: {_ARGUMENT: "x"})
        converters: tuple[Convert, ...] = (dict, partial(json.dumps, ensure_ascii=False))
        forms = [partial(_calling, convert=convert, empty=empty) for convert in converters for empty in ("", None)]
        errors = []
        for form in forms:
            try:
                text = self._render((*before, form(calling)), tools, place=place, opens=False)
            except DatasetError as error:
                errors.append(error)
                continue
            if _ARGUMENT in text and not _MISWRITTEN.search(text):
                self._calls = form
                return form
        if len(errors) == len(forms):
            raise errors[0]
        raise self._error(
            f"{place}: the chat template leaves out tool_calls, which would not be trained; {_WAY_OUT} that writes them"
        )

    def _render(self, messages: Messages, tools: Tools = None, *, place: str, opens: bool = True) -> str:
        try:
            with _limits():
                text = str(
                    self._tokenizer.apply_chat_template(
                        list(messages),
                        tools=list(tools) if tools else None,
                        chat_template=self._template,
                        tokenize=False,
                        add_generation_prompt=opens,
                        **self._options,
                    )
                )
                text.encode()  # the tokenizer fails at lone surrogates, far from the row
                return text
        except Exception as error:  # noqa: BLE001 - templates raise jinja's errors and their own
            roles = ", ".join(message["role"] for message in messages)
            reason = str(error) or type(error).__name__
            raise self._error(f"{place}: the chat template does not take it (roles {roles}): {reason}") from error

    def _check_written(self, messages: Messages, text: str, place: str) -> None:
        """Raise DatasetError where the content of another role than the assistant is not in rendered text."""
        for message in messages:
            role = message["role"]
            if role != "assistant" and not _is_written(message["content"], text):
                raise self._error(
                    f"{place}: the chat template leaves out the content of role {role!r}; {_WAY_OUT} that writes it"
                )

    def _error(self, message: str) -> DatasetError:
        """Return an error of the key that names the template; without it, of the model where no row is needed."""
        of_model = "model" if message.startswith(_PROBE) else ""
        return DatasetError(message, setting=of_model if self._template is None else _KEY)

    def _warn(self, text: str, what: str, *others: str) -> None:
        """Log a warning, once for each `what`."""
        if (text, what) not in self._warned:
            self._warned.add((text, what))
            logger.warning(text, what, *others)


def _with_thoughts(content: str | list[Message] | None, opening: str, written: str) -> str | None:
    """Return what a generator writes after `opening`, <think>, where a content has its thoughts in full, with or
    without the opening, and the template may have left them out. None: a content without."""
    said = str(content[0]["text"] if isinstance(content, list) else content or "").strip()
    mark = opening.strip()
    if not _MARK.fullmatch(mark):
        return None
    thoughts, closing, answer = said.rpartition(mark.replace("<", "</", 1))
    if not closing or mark in thoughts.removeprefix(mark):
        return None
    rest = said if said in written else answer.strip()
    if rest not in written:
        return None
    text = said[: len(said) - len(rest)] + written[written.index(rest) :]
    return text.removeprefix(mark).removeprefix(opening.partition(mark)[2]) if text.startswith(mark) else text


def _is_written(value: object, text: str) -> bool:
    """Return whether every text in a value is in rendered text, whatever blanks and marks a template puts into it."""
    if isinstance(value, Mapping):
        return all(_is_written(inner, text) for key, inner in value.items() if key not in _NAMES)
    if isinstance(value, list | tuple):
        return all(_is_written(inner, text) for inner in value)
    if not isinstance(value, str) or value.strip() in text or json.dumps(value, ensure_ascii=False)[1:-1] in text:
        return True
    if not isinstance(inner := parsed(value), str) and _is_written(inner, text):
        return True
    packed = "".join(text.split())
    return all("".join(piece.split()) in packed for piece in _MARK.split(value))


def _in_parts(message: Message) -> Message:
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


def _calling(message: Message, *, convert: Convert, empty: str | None = "") -> Message:
    """Return a message with the arguments of its tool calls converted, and `empty` for an empty content beside them."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        calls.append({**call, "function": {**function, "arguments": convert(function["arguments"])}})
    return {**message, "content": message["content"] or empty, "tool_calls": calls}


@contextmanager
def _limits() -> Iterator[None]:
    """Raise TimeoutError or MemoryError in a template that does not end or fills the memory. Without effect outside the
    main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        raise TimeoutError(f"it takes more than {_SECONDS} s")

    with open("/proc/self/statm", "rb", buffering=0) as file:
        used_bytes = int(file.read(32).split()[0]) * resource.getpagesize()
    limit, hard_limit = resource.getrlimit(resource.RLIMIT_AS)
    lowest = min(each for each in (used_bytes + _BYTES, limit, hard_limit) if each != resource.RLIM_INFINITY)
    started, handler = time.monotonic(), signal.signal(signal.SIGALRM, stop)
    left, _ = signal.setitimer(signal.ITIMER_REAL, _SECONDS)
    resource.setrlimit(resource.RLIMIT_AS, (lowest, hard_limit))
    try:
        yield
    except MemoryError:
        raise MemoryError(f"it takes more than {_BYTES >> 20} MiB of memory") from None
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard_limit))
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler or signal.SIG_DFL)
        if left:  # of another timer
            signal.setitimer(signal.ITIMER_REAL, max(0.001, left - (time.monotonic() - started)))
