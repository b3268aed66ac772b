"""Between messages and tokens: prompts, what follows an answer, and answers as messages.

Invariant: tokens that were sampled are never made from text. A conversation is rendered once, up to the first answer;
after it, only new messages are.

Tool calls are read out of answers. What a chat template makes of known calls shows in which form it writes them; three
forms cover the templates of the open model families:

    <tool_call>{"name": NAME, "arguments": {...}}</tool_call>             object: JSON with the name
    <call>NAME<sep>{...}</call>                                           named: JSON after the name
    <function=NAME><parameter=KEY>VALUE</parameter></function>            tagged: one text for each argument
"""

import json
import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from os.path import commonprefix
from typing import Protocol

from rollout.data.chat_template import ChatTemplate, Message, Messages, Tools
from rollout.data.encoder import Encoder
from rollout.data.source import DatasetError
from rollout.sessions.calls import CallError

NAMES = ("alpha_tool", "omega_tool")
ARGUMENTS = {"first_argument": "value of one", "second_argument": "value of two"}
"""What is looked for in rendered text."""
Read = tuple[str, dict[str, object]]
"""Name and arguments of a call."""
_THOUGHTS_END = "</think>"
_IN_ID = "functions."
"""What ids of calls begin with where a template writes the name of a call as part of its id, as Kimi's do."""
_PLACE = "the request"


class ToolFormat(Protocol):
    """How tool calls are written."""

    @property
    def opening(self) -> str:
        """Text before the first call; empty: an answer with calls begins with one."""
        ...

    def calls(self, text: str, tools: Sequence[object]) -> Iterator[Read]:
        """Yield the calls in a text from the first `opening` on. Raises ValueError for a call that is malformed."""
        ...

    @property
    def about(self) -> str:
        """The form in words."""
        ...


def tool_format(chat: ChatTemplate) -> ToolFormat | None:
    """Return how a template writes tool calls; None where it writes none in a form that can be read."""
    for named in (False, True):
        one = chat.calls_as_written([_probe(0, named)])
        if one and (found := _find_format(one, chat.calls_as_written([_probe(0, named), _probe(1, named)]))):
            return found
    return None


def names_in_ids(form: ToolFormat | None) -> bool:
    """Return whether the template writes the name of a call as part of its id only: functions.NAME:NUMBER."""
    return isinstance(form, NamedFormat) and form.before.endswith(_IN_ID)


def _probe(number: int, named: bool) -> dict[str, object]:
    function = {"name": NAMES[number], "arguments": dict(ARGUMENTS)}
    name = f"{_IN_ID}{NAMES[number]}:{number}" if named else f"call0000{number}"
    return {"id": name, "type": "function", "function": function}


def _find_format(one: str, two: str | None) -> ToolFormat | None:
    """Find the form in the text of an answer with the first probe, and of one with both; None: the template takes one
    call only."""
    one, two = one.rpartition(_THOUGHTS_END)[2], (two or "").rpartition(_THOUGHTS_END)[2]
    first = two.partition(NAMES[1])[0] if NAMES[1] in two else None
    found: ToolFormat | None = _find_object(one) or _find_named(one, first) or _find_tagged(one, first)
    return found


def split_calls(text: str, form: ToolFormat, tools: Sequence[object]) -> tuple[str, list[Read]]:
    """Return the text before the first call, and the calls; all of the text where one of them is malformed."""
    if (begin := text.find(form.opening)) < 0:
        return text, []
    try:
        calls = list(form.calls(text[begin:], tools))
    except (ValueError, KeyError, TypeError, RecursionError):
        return text, []
    return (text[:begin], calls) if calls else (text, [])


@dataclass(frozen=True)
class ObjectFormat:
    """JSON objects with these keys after `opening`."""

    opening: str
    name: str
    arguments: str

    def calls(self, text: str, tools: Sequence[object]) -> Iterator[Read]:
        for value in _json_values(text.removeprefix(self.opening)):
            yield _checked(value[self.name], value[self.arguments])

    @property
    def about(self) -> str:
        return f"JSON with {self.name} and {self.arguments} after {self.opening!r}"


@dataclass(frozen=True)
class NamedFormat:
    """A name between two texts, and JSON of its arguments."""

    opening: str
    before: str
    between: str

    def calls(self, text: str, tools: Sequence[object]) -> Iterator[Read]:
        pattern = re.compile(f"{_blank(self.before)}\\s*([^\\s{{}}<>\\[\\]]+?)\\s*{_blank(self.between)}\\s*(?=\\{{)")
        decoder, at = json.JSONDecoder(), 0
        while found := pattern.search(text, at):
            value, at = decoder.raw_decode(text, found.end())
            yield _checked(found[1], value)

    @property
    def about(self) -> str:
        return f"a name after {self.before!r}, and JSON of the arguments after {self.between!r}"


@dataclass(frozen=True)
class TaggedFormat:
    """A name after `before`, and for each argument a key after `before_key` and a value between `between` and
    `after_value`."""

    opening: str
    before: str
    after_name: str
    before_key: str
    between: str
    after_value: str
    closing: str

    def calls(self, text: str, tools: Sequence[object]) -> Iterator[Read]:
        _, *parts = re.split(_blank(self.before), text)
        types = {name: _types(function) for name, function in map(_function, tools)}
        key_and_value = re.compile(
            rf"{_blank(self.before_key)}\s*(.*?)\s*{_blank(self.between)}(.*?){_blank(self.after_value)}", re.DOTALL
        )
        for part in parts:
            named = re.match(rf"\s*([\w.\-]+)\s*{_blank(self.after_name)}", part)
            if named is None or (self.closing and not re.search(_blank(self.closing), part)):
                raise ValueError("a call without a name or an end")
            own = types.get(named[1], {})
            found = key_and_value.finditer(part, named.end())
            yield named[1], {m[1]: _typed(m[2].removeprefix("\n").removesuffix("\n"), own.get(m[1])) for m in found}

    @property
    def about(self) -> str:
        return f"a name after {self.before!r}, arguments between {self.between!r} and {self.after_value!r}"


def _find_object(one: str) -> ObjectFormat | None:
    for found in re.finditer(r"\{", one):
        try:
            call, _ = json.JSONDecoder().raw_decode(one, found.start())
        except ValueError:
            continue
        name = next((key for key, value in call.items() if value == NAMES[0]), None)
        arguments = next((key for key, value in call.items() if next(iter(ARGUMENTS)) in str(value)), None)
        if name is not None and arguments is not None:
            return ObjectFormat(one[: found.start()].strip().removesuffix("[").strip(), name, arguments)
    return None


def _find_named(one: str, first: str | None) -> NamedFormat | None:
    """Find the form. `first`: the text up to the name of a second call; None: there is none."""
    opening, _, after = one.partition(NAMES[0])
    at = after.find("{")
    try:
        value, end = json.JSONDecoder().raw_decode(after, max(at, 0))
    except ValueError:
        return None
    if at < 0 or value != ARGUMENTS:
        return None
    before = opening if first is None else _common_suffix(opening, first)
    return NamedFormat(opening.strip(), before.strip(), after[:at].strip()) if before.strip() else None


def _find_tagged(one: str, first: str | None) -> TaggedFormat | None:
    """Find the form, see _find_named()."""
    (key, value), (next_key, next_value) = ARGUMENTS.items()
    found = re.search(rf"(?s)^(.*?){NAMES[0]}(.*?){key}(.*?){value}(.*?){next_key}(.*?){next_value}(.*)$", one)
    if found is None or found[3] != found[5]:
        return None
    opening, to_key, between, to_next, _, tail = found.groups()
    before_key = _common_suffix(to_key, to_next)
    after_value = to_next[: len(to_next) - len(before_key)]
    closing, before = "", opening
    if first is not None:
        end = first.rpartition(next_value)[2]
        before = _common_suffix(opening, end)
        closing = end[len(after_value) : len(end) - len(before)].strip()
    parts = (before, before_key, between, after_value)
    if not all(part.strip() for part in parts) or NAMES[0] in to_key:
        return None
    return TaggedFormat(
        opening=opening.strip(), before=before.strip(), after_name=to_key[: len(to_key) - len(before_key)].strip(),
        before_key=before_key.strip(), between=between.strip(), after_value=after_value.strip(), closing=closing,
    )  # fmt: skip


def _common_suffix(a: str, b: str) -> str:
    return commonprefix((a[::-1], b[::-1]))[::-1]


def _blank(literal: str) -> str:
    """Return a pattern for a literal, whatever blanks, numbers and truth values are in it."""
    words = (re.sub(r"\d+", r"\\d+", re.escape(word)) for word in literal.split())
    return r"\s*".join(word.replace('"true"', '"(?:true|false)"') for word in words)


def _checked(name: object, arguments: object) -> Read:
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(arguments, dict) or not isinstance(name, str):
        raise ValueError("a call needs a name and an object of arguments")
    return name, arguments


def _function(tool: object) -> tuple[str, Mapping[str, object]]:
    """Return the name and the declaration of a tool. Raises ValueError."""
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping):
        raise ValueError("a tool needs a function")
    return str(function["name"]), function


def _types(function: Mapping[str, object]) -> dict[str, object]:
    parameters = function.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    if not isinstance(properties, Mapping):
        return {}
    return {name: schema.get("type") for name, schema in properties.items() if isinstance(schema, Mapping)}


def _typed(text: str, kind: object) -> object:
    """Return the text of an argument as a value of its JSON type; the text where it is none, or the type not known."""
    if kind is None or kind == "string":
        return text
    try:
        return json.loads(text.strip() if kind != "boolean" else text.strip().lower())
    except ValueError:
        return text


def _json_values(text: str) -> Iterator[dict[str, object]]:
    """Yield the JSON objects in a text, those of lists one by one. Raises ValueError for text that begins one and is
    none."""
    decoder, at = json.JSONDecoder(), 0
    while (at := min((i for i in (text.find("{", at), text.find("[", at)) if i >= 0), default=-1)) >= 0:
        if text[at] == "[" and not text[at + 1 :].lstrip().startswith("{"):  # a mark such as [TOOL_CALLS]
            at += 1
            continue
        value, at = decoder.raw_decode(text, at)
        for one in value if isinstance(value, list) else [value]:
            if not isinstance(one, dict):
                raise ValueError("a call is a JSON object")
            yield one


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

    def call_id(self, name: str, number: int, *, otherwise: str) -> str:
        """Return the id of a call, the conversation's `number`th, from 0: in the form that the template needs, or
        `otherwise`."""
        return f"{_IN_ID}{name}:{number}" if names_in_ids(self._tool_format) else otherwise

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
