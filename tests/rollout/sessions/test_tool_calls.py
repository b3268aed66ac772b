"""Calls of tools are read from answers as the chat template writes them, whatever its form."""

import importlib.util
import random
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from helpers.chat_tokenizer import chat_tokenizer
from rollout.data.encoder import Encoder
from rollout.data.source import DatasetError
from rollout.sessions.bridge import Bridge, NamedFormat, ObjectFormat, TaggedFormat

_TURNS = """{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% if m.tool_calls %}CALLS{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
_EACH = "{% for c in m.tool_calls %}{% set f = c.function %}CALL{% endfor %}"
OWN = {
    "object": '<call>{"tool": "{{ f.name }}", "with": {{ f.arguments | tojson }}}</call>',
    "named": "<|call|>function<|sep|>{{ f.name }}\n```json\n{{ f.arguments | tojson }}\n```<|end|>",
    "named in ids": "<|call|>{{ c.id }}<|sep|>{{ f.arguments | tojson }}<|end|>",
    "tagged": "<tool_call>\n<function={{ f.name }}>\n{% for k, v in f.arguments.items() %}<parameter={{ k }}>\n"
    "{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}</function>\n</tool_call>",
    "tags with types": '<a:call name="{{ f.name }}">\n{% for k, v in f.arguments.items() %}<a:value key="{{ k }}" '
    'string="{{ "true" if v is string else "false" }}">{{ v if v is string else v | tojson }}</a:value>\n'
    "{% endfor %}</a:call>",
    "tags of keys": "\n<tool_call>{{ f.name }}\n{% for k, v in f.arguments.items() %}<arg_key>{{ k }}</arg_key>\n"
    "<arg_value>{{ v if v is string else v | tojson }}</arg_value>\n{% endfor %}</tool_call>",
}
FORMS = {
    "object": ObjectFormat, "named": NamedFormat, "named in ids": NamedFormat, "tagged": TaggedFormat,
    "tags with types": TaggedFormat, "tags of keys": TaggedFormat,
}  # fmt: skip
TOOLS = tuple(
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "A tool.",
            "parameters": {
                "type": "object",
                "properties": {
                    "text": {"type": "string"},
                    "count": {"type": "integer"},
                    "share": {"type": "number"},
                    "on": {"type": "boolean"},
                    "items": {"type": "array"},
                    "object": {"type": "object"},
                },
            },
        },
    }
    for name in ("search", "get_weather", "run-2")
)


def bridge(template: str) -> Bridge:
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "ANSWER"}]
    try:
        text = chat_tokenizer().apply_chat_template(turns, chat_template=template, tokenize=False)
        end = re.match(r"\s*(<[^<>\s]*>|\[[^\[\]]*\])", text.rpartition("ANSWER")[2])
    except Exception:  # noqa: BLE001 - the template takes other conversations
        end = None
    tokenizer = chat_tokenizer(*([end[1]] if end else []))
    tokenizer.chat_template = template
    return Bridge(Encoder(tokenizer))


def own(name: str) -> str:
    return _TURNS.replace("CALLS", _EACH.replace("CALL", OWN[name]))


def random_calls(rng: random.Random) -> list[dict[str, Any]]:
    values: Mapping[str, Any] = {
        "text": rng.choice(["Paris", "a b", "7", "true", "ä €\n{x}", 'say "hi"', "[1]", ""]),
        "count": rng.randint(-5, 10**6),
        "share": rng.random(),
        "on": rng.random() < 0.5,
        "items": [1, "two", None],
        "object": {"a": {"b": [1]}},
    }
    calls = []
    for i in range(rng.randint(1, 3)):
        keys = rng.sample(sorted(values), rng.randint(0, len(values)))
        function = {"name": rng.choice(TOOLS)["function"]["name"], "arguments": {key: values[key] for key in keys}}
        calls.append({"id": f"call0000{i}", "type": "function", "function": function})
    return calls


def check_round_trip(chat: Bridge, calls: list[dict[str, Any]]) -> None:
    """Read what the template writes for these calls."""
    encoder = chat._encoder
    for number, call in enumerate(calls):
        call["id"] = chat.call_id(call["function"]["name"], number, otherwise=call["id"])
    turns = ({"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": calls})
    template, prepared = encoder.conversation(turns, TOOLS, place="")
    written = template.turn(prepared, TOOLS, place="").written
    text = chat.text(encoder.tokenise([written])[0])
    _, _, found = chat.read(text, TOOLS)
    assert found == [(c["function"]["name"], c["function"]["arguments"]) for c in calls], written


def one_call(chat: Bridge) -> str:
    """Return an answer of one call as the template writes it."""
    function = {"name": "search", "arguments": {"text": "x", "count": 3}}
    call = {"id": chat.call_id("search", 0, otherwise="c"), "type": "function", "function": function}
    turns = ({"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [call]})
    template, prepared = chat._encoder.conversation(turns, TOOLS, place="")
    return template.turn(prepared, TOOLS, place="").written.partition("<|im_end|>")[0].strip()


@pytest.mark.parametrize("name", OWN)
def test_what_a_template_writes_is_read_back(name: str) -> None:
    chat, rng = bridge(own(name)), random.Random(name)
    assert isinstance(chat._tool_format, FORMS[name])
    for _ in range(30):
        check_round_trip(chat, random_calls(rng))


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("cut", [0.3, 0.6, 0.95])
def test_a_call_that_is_cut_off_is_text(name: str, cut: float) -> None:
    chat = bridge(own(name))
    written = one_call(chat)
    text = written[: int(len(written.removesuffix("</call>").removesuffix("<|end|>").removesuffix("\n```")) * cut)]
    assert chat.read(text, TOOLS)[1:] == (text.strip(), [])


@pytest.mark.parametrize("name", OWN)
def test_a_call_that_is_nested_without_end_is_text(name: str) -> None:
    chat = bridge(own(name))
    text = one_call(chat).replace("3", "[" * 9999)
    assert chat.read(text, TOOLS)[2] in ([], [("search", {"text": "x", "count": "[" * 9999})])


@pytest.mark.parametrize(("sampled", "between"), [("<|pad|>", ""), ("<|im_end|>", "<|pad|>"), ("", "<|pad|>")])
def test_the_mark_of_the_next_turn_follows_another_end_of_an_answer(sampled: str, between: str) -> None:
    """As in GLM's templates, where the mark itself is an end token."""
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|pad|>' if m.role == 'user' else '<|im_start|>' }}{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>{% endif %}"
    )
    chat = Bridge(Encoder(tokenizer))
    ids = tokenizer.encode(f"yes{sampled}", add_special_tokens=False)
    added = chat.following({"role": "assistant", "content": "yes"}, ids, ({"role": "user", "content": "go"},), None)
    assert tokenizer.decode(added) == f"{between}go<|im_start|>"


def trl_templates() -> list[Path]:
    spec = importlib.util.find_spec("trl")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    return sorted(path for folder in folders for path in Path(folder, "chat_templates").glob("*.jinja"))


@pytest.mark.nightly
def test_templates_of_trl_are_read_back_and_checked() -> None:
    """Prints what each of them is; at least 15 have a form of calls that is known."""
    from tools.check_template import lines

    paths = trl_templates()
    if not paths:
        pytest.skip("trl is not installed: no chat templates")
    known, rng = 0, random.Random(1)
    for path in paths:
        chat = bridge(path.read_text(encoding="utf-8"))
        for name, finding in lines(chat._encoder.chat):
            print(f"{path.name}, {name}: {finding}")
            assert name == "calls of tools" or finding.startswith(("append-only", "not append-only", "not possible: "))
        if chat.writes_calls:
            known += 1
            for _ in range(20):
                calls = random_calls(rng)[:1]
                try:
                    check_round_trip(chat, calls)
                except DatasetError as error:  # the template or its date refuses the conversation
                    print(f"{path.name}: {error}")
    assert known >= 15
