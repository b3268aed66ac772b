"""Show how a model's chat template continues conversations, and where it rewrites what it has written before.

A conversation is rendered turn by turn as the endpoint does it (docs/agents.md) and as a whole. The template is
append-only where both are the same text.
"""

import json
import sys
from collections.abc import Iterator, Mapping

from rollout.data.chat_template import ChatTemplate, Message
from rollout.data.encoder import Encoder, PromptFormat
from rollout.data.source import DatasetError
from rollout.data.tokenizer import load_tokenizer
from rollout.sessions.bridge import names_in_ids, tool_format
from tools import arguments as cli

_TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
    },
}
_SHOWN_CHARS = 60


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _calls(*numbers: int) -> Message:
    calls = [
        {"id": f"call0000{n}", "type": "function", "function": {"name": "add", "arguments": {"b": n, "a": 1}}}
        for n in numbers
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _result(number: int) -> Message:
    return {"role": "tool", "name": "add", "tool_call_id": f"call0000{number}", "content": str(number + 1)}


def _answer(text: str) -> Message:
    return {"role": "assistant", "content": text}


_TURNS = [_user("One?"), _answer("1"), _user("Two?"), _answer("2")]
CONVERSATIONS: Mapping[str, list[Message]] = {
    "turns": _TURNS,
    "system": [{"role": "system", "content": "Be short."}, *_TURNS],
    "thoughts": [
        _user("One?"),
        _answer("<think>\nEasy.\n</think>\n\n1"),
        _user("Two?"),
        _answer("<think>\nHard.\n</think>\n\n2"),
    ],
    "tools": [_user("1+2?"), _calls(2), _result(2), _answer("3")],
    "parallel tools": [_user("1+2, 1+3?"), _calls(2, 3), _result(2), _result(3), _answer("3, 4")],
}


def check(chat: ChatTemplate, messages: list[Message]) -> str | None:
    """Return where the text that grows turn by turn differs from the whole, as a line; None where it does not. Raises
    DatasetError where the template cannot take the conversation."""
    tools = (_TOOL,) if any("tool_calls" in m for m in messages) else None
    text, since = "", 0
    answers = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    for at in answers:
        prepared = chat.prepare(tuple(messages[: at + 1]), tools, place="")
        whole, turn = chat.render(prepared[:-1], tools, place=""), chat.turn(prepared, tools, place="")
        if text:
            end, rest = chat.following(messages[since], tuple(messages[since + 1 : at]), tools, place="")
            text += ("" if chat.ends_turn(text) else end) + rest
        else:
            text = whole
        if whole != text:
            return _difference(text, whole, f"before answer {answers.index(at) + 1}")
        text, since = text + turn.written, at
    return None


def _difference(grown: str, whole: str, place: str) -> str:
    at = next((i for i, (a, b) in enumerate(zip(grown, whole, strict=False)) if a != b), min(len(grown), len(whole)))
    start = max(0, at - _SHOWN_CHARS // 2)
    return (
        f"not append-only {place}: the endpoint has {grown[start : at + _SHOWN_CHARS]!r}, the template writes "
        f"{whole[start : at + _SHOWN_CHARS]!r}"
    )


def lines(chat: ChatTemplate) -> Iterator[tuple[str, str]]:
    """Yield (name, finding) of each conversation, and how tool calls are read."""
    form = tool_format(chat)
    for name, messages in CONVERSATIONS.items():
        if names_in_ids(form):
            messages = json.loads(json.dumps(messages).replace("call0000", "functions.add:"))
        try:
            yield name, check(chat, messages) or "append-only"
        except DatasetError as error:
            yield name, f"not possible: {str(error).lstrip(': ')}"
    if form is None:
        yield "calls of tools", "not written in a form that is known: they are not read, and are text of the answer"
    else:
        yield "calls of tools", form.about


def main() -> int:
    """Print one line for each kind of conversation. Exit code 1: the model has no chat template."""
    parser = cli.parser_of("tools.check_template", __doc__.split("\n\n")[0])
    parser.add_argument(
        "--model", type=cli.model(weights=False), required=True, help="Hugging Face folder, or id of the hub"
    )
    parser.add_argument("--chat_template", help="jinja file or text in place of the tokenizer's (prompt.chat_template)")
    given = parser.parse_args()
    try:
        template = PromptFormat(chat_template=given.chat_template)
        encoder = Encoder(load_tokenizer(given.model), template, folder=given.model)
    except (DatasetError, OSError, ValueError) as error:
        return cli.refused(f"--model {given.model}: {error}")
    if encoder.chat is None:
        return cli.refused(f"--model {given.model}: it has no chat template; give --chat_template", code=1)
    for name, finding in lines(encoder.chat):
        print(f"{name + ':':<16}{finding}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
