"""What is trained of a conversation with chat templates of each kind, and what is refused instead of left out."""

import logging
import resource
from pathlib import Path
from typing import Any

import pytest

from rollout.data import chat_template
from rollout.data.chat_template import read_messages
from rollout.data.encoder import Encoder, PromptFormat, encode_examples, first_row
from rollout.data.rows import Example
from rollout.data.source import DatasetError
from rollout.data.tokenizer import load_tokenizer
from tests.rollout.data.test_encoder import CHATML, tokenizer

CALLS = (
    "{% for c in m.tool_calls or [] %}"
    "<call>{{ c.function.name }} {{ c.function.arguments | tojson }}</call>{% endfor %}"
)
TOOLS = CHATML.replace("{{ m.content }}", "{{ m.content }}" + CALLS)
THINKS = TOOLS.replace("<|im_start|>assistant\n{% if", "<|im_start|>assistant\n<think>\n{% if").replace(
    "{{ m.content }}", "{{ (m.content or '').split('</think>')[-1] }}"
)
"""As R1: its prompts begin thoughts, its turns have none."""


def said(role: str, content: str | None, **others: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **others}


def called(arguments: Any) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": "w", "arguments": arguments}}


def trained(template: str, *messages: dict[str, Any], **options: Any) -> list[str]:
    """Every sequence of a conversation, without the marks <|im_start|>; what is trained in [[ ]]."""
    options = {"eos": "<|im_end|>"} | options
    made = tokenizer(template)
    made.eos_token = options.pop("eos")
    encoder = Encoder(made, PromptFormat(**options))
    example = Example(place="d:1", messages=read_messages(list(messages), "messages"))
    shown = [first_row(encoder, sequence) for sequence in encode_examples(encoder, [example])]
    return [text.partition(": ")[2].replace("<|im_start|>", "|").replace("<|im_end|>", "|") for text in shown]


ASK = said("user", "hi")


@pytest.mark.parametrize("given", ['{"city": "Ü"}', {"city": "Ü"}])
@pytest.mark.parametrize(
    ("template", "written"),
    [
        (TOOLS, 'w {"city": "Ü"}'),
        (TOOLS.replace("c.function.arguments | tojson", "c.function.arguments + ''"), 'w {"city": "Ü"}'),
        (TOOLS.replace("{{ c.function.arguments | tojson }}", "{{ c.function.arguments['city'] }}"), None),
        (TOOLS.replace("c.function.arguments | tojson", "c.function.arguments.items() | list"), None),
        (
            CHATML.replace(
                "{{ m.content }}", "{% if m.content is none %}" + CALLS + "{% else %}{{ m.content }}{% endif %}"
            ),
            'w {"city": "Ü"}',
        ),
    ],
)
def test_arguments_of_a_tool_call_are_written_once_however_a_row_has_them(
    template: str, written: str | None, given: Any
) -> None:
    row = (ASK, said("assistant", None, tool_calls=[called(given)]), said("tool", ""), said("assistant", "done"))
    if written is None:  # Python's own notation, or only some of the arguments
        with pytest.raises(
            DatasetError, match="d:1: the chat template leaves out tool_calls, which would not be trained"
        ):
            trained(template, *row)
        return
    (text,) = trained(template, *row)
    assert text.replace("None", "").endswith(
        f"|assistant\\n[[<call>{written}</call>|]]\\n|tool\\n|\\n|assistant\\n[[done|]]"
    )


@pytest.mark.parametrize(
    ("calls", "said"),
    [
        ([called("[1")], "arguments of a tool call must be a JSON object, found '\\[1'"),
        ("w(1)", "must be a list of calls"),
        ([{"function": "w"}], "a tool call must have a function with a name, found"),
        ([{"arguments": {}}], "a tool call must have a function with a name, found"),
    ],
)
def test_calls_that_are_none_are_refused(calls: Any, said: str) -> None:
    with pytest.raises(ValueError, match=f'"messages", message 2: .*{said}'):
        trained(TOOLS, ASK, {"role": "assistant", "tool_calls": calls})


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (said("assistant", "done"), "[[done|]]"),
        (said("assistant", "", tool_calls=[called({"a": "b"})]), '[[<call>w {"a": "b"}</call>|]]'),
        (said("assistant", "<think>\nhm\n</think>\n\ndone"), "<think>\\n[[hm\\n</think>\\n\\ndone|]]"),
        (said("assistant", "hm\n</think>\n\ndone"), "<think>\\n[[hm\\n</think>\\n\\ndone|]]"),
        (
            said("assistant", "hm</think>", tool_calls=[called({"a": "b"})]),
            '<think>\\n[[hm</think><call>w {"a": "b"}</call>|]]',
        ),
    ],
)
def test_turns_that_do_not_begin_as_the_prompt_of_a_generator_ends(answer: dict[str, Any], text: str) -> None:
    assert trained(THINKS, ASK, answer) == ["|user\\nhi|\\n|assistant\\n" + text]


def test_each_turn_with_thoughts_is_trained_after_turns_without() -> None:
    first, second = (said("assistant", f"<think>\n{name}\n</think>{name}") for name in ("a", "b"))
    assert trained(THINKS, ASK, first, ASK, second) == [
        "|user\\nhi|\\n|assistant\\n<think>\\n[[a\\n</think>a|]]",
        "|user\\nhi|\\n|assistant\\na|\\n|user\\nhi|\\n|assistant\\n<think>\\n[[b\\n</think>b|]]",
    ]


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking", "tool_calls", "refusal"])
def test_what_a_template_leaves_out_of_the_assistants_turn_is_refused(key: str) -> None:
    value = [called({"a": "b"})] if key == "tool_calls" else "hm"
    with pytest.raises(DatasetError, match=f"d:1: the chat template leaves out {key}.*set prompt.chat_template to"):
        trained(CHATML, ASK, said("assistant", "done", **{key: value}))
    keeps = TOOLS.replace("{{ m.content }}", f"{{{{ m.{key} if m.{key} is string }}}}{{{{ m.content }}}}")
    (text,) = trained(keeps, ASK, said("assistant", "done", **{key: value}))
    assert text.endswith('[[done<call>w {"a": "b"}</call>|]]' if key == "tool_calls" else "[[hmdone|]]")


def test_other_keys_that_a_template_leaves_out_are_named(caplog: pytest.LogCaptureFixture) -> None:
    assert trained(CHATML, ASK, said("assistant", "done", mood="glad", tone="low")) == [
        "|user\\nhi|\\n|assistant\\n[[done|]]"
    ]
    for key in ("mood", "tone"):
        assert f"the chat template leaves out '{key}' of the assistant's turns (first: d:1)" in caplog.text


@pytest.mark.parametrize("refusal", [{"weight": 0}, {"weight": False}, {"train": False}, {"loss": 0}])
def test_a_turn_with_weight_0_is_not_trained(refusal: dict[str, Any]) -> None:
    row = (ASK, said("assistant", "bad", **refusal), ASK, said("assistant", "good", weight=1))
    assert trained(CHATML, *row) == ["|user\\nhi|\\n|assistant\\nbad|\\n|user\\nhi|\\n|assistant\\n[[good|]]"]
    assert trained(CHATML, *row[:2]) == []
    for key, value in (("weight", 0.5), ("train", "false"), ("loss", "no")):
        with pytest.raises(ValueError, match=f"message 2: {key} must be 0 or 1, false or true, found {value!r}"):
            trained(CHATML, ASK, said("assistant", "bad", **{key: value}))


OPENS = CHATML.replace("{% if add_generation_prompt %}", "{% if true %}")


def test_a_template_that_always_opens_a_turn_trains_up_to_the_end_token(caplog: pytest.LogCaptureFixture) -> None:
    row = (ASK, said("assistant", "a"), ASK, said("assistant", "b"))
    whole = ["|user\\nhi|\\n|assistant\\n[[a|]]\\n|user\\nhi|\\n|assistant\\n[[b|]]"]
    assert trained(OPENS, *row) == whole
    assert not caplog.text
    assert trained(OPENS, *row, eos="</s>") == [
        "|user\\nhi|\\n|assistant\\n[[a|</s>]]",
        "|user\\nhi|\\n|assistant\\na|\\n|user\\nhi|\\n|assistant\\n[[b|</s>]]",
    ]
    assert "ends a turn with '<|im_end|>', which is no end token (<pad>, </s>): answers run on" in caplog.text
    with pytest.raises(
        DatasetError, match="the chat template opens a turn after every answer .* and has no token that ends one"
    ):
        trained(OPENS.replace("<|im_end|>", "").replace("<|im_start|>", "# "), *row)


@pytest.mark.parametrize("role", ["system", "user", "tool"])
def test_a_template_that_leaves_a_message_out_is_refused(role: str) -> None:
    template = CHATML.replace("{{ m.content }}", f"{{{{ m.content if m.role != '{role}' or 'probe' in m.content }}}}")
    if role == "user":  # on some rows only
        template = template.replace("'probe' in", "'question' in")
    messages = (said("user", "1 2"), said("assistant", "3"), said(role, '4 "5"'))
    for row in (messages, (*messages, said("assistant", "6"))):
        with pytest.raises(DatasetError, match=f"d:1: the chat template leaves out the content of role '{role}|user'"):
            encoder = Encoder(tokenizer(template))
            encoder.render(row, place="d:1")
            encode_examples(encoder, [Example(place="d:1", messages=row)])
    cut = CHATML.replace("{{ m.content }}", "{{ m.content[:4] }}")  # of parts: all, as Python writes a list
    with pytest.raises(DatasetError, match="d:1: the chat template leaves out content of the assistant's turn"):
        trained(cut, ASK, said("assistant", "a long answer"))
    quoted = CHATML.replace("{{ m.content }}", "{{ m.content | tojson if m.role == 'tool' else m.content | trim }}")
    trained(quoted, said("user", " 1 2\n"), said("assistant", "3"), said("tool", '4 "5"\n'), said("assistant", "6"))


def test_a_template_that_changes_the_prompt_when_the_answer_follows_is_refused() -> None:
    template = CHATML.replace("{{ m.content }}", "{{ m.content }}{% if loop.last %} (last){% endif %}")
    with pytest.raises(DatasetError, match="d:1: the chat template changes what stands before the assistant's turn"):
        trained(template, ASK, said("assistant", "a"))


def test_a_template_that_does_not_end_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "_SECONDS", 0.2)
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(DatasetError, match="does not take it .*: it takes more than 0.2 s"):
        Encoder(tokenizer(endless)).render_prompt("1+1?", place="d:1")


@pytest.mark.parametrize(
    "text",
    [
        "{{ 'x' * 9999999999 }}",
        "{% set n = namespace(x='x') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    ],
)
def test_a_template_that_fills_the_memory_is_stopped(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "_SECONDS", 600)  # a busy host fills it slowly
    before = resource.getrlimit(resource.RLIMIT_AS)
    with pytest.raises(DatasetError, match="does not take it .*: it takes more than 1024 MiB of memory"):
        Encoder(tokenizer(text)).render_prompt("1+1?", place="d:1")
    assert resource.getrlimit(resource.RLIMIT_AS) == before


@pytest.mark.parametrize(
    "text",
    ["{{ 9**(9**9) }}", "{% set n = namespace(x=9) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}"],
)
def test_a_template_that_computes_with_huge_integers_is_stopped(text: str, tmp_path: Path) -> None:
    tokenizer(text).save_pretrained(tmp_path)
    with pytest.raises(DatasetError, match="does not take it .*: it computes an integer of more than 4096 bits"):
        Encoder(load_tokenizer(tmp_path)).render_prompt("1+1?", place="d:1")


def test_one_time_is_written_into_all_rows_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    (text,) = trained("{{ strftime_now('%f') }}" + CHATML, ASK, said("assistant", "a"), ASK, said("assistant", "b"))
    assert text.endswith("[[b|]]") and "The chat template writes the time of this start: 20" in caplog.text


def test_a_token_without_an_embedding_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 261}')
    encoder = Encoder(tokenizer(None), folder=tmp_path)
    encoder.tokenise(["a<|im_end|>"])
    with pytest.raises(
        DatasetError, match="token '<think>' has id 261, and the model has embeddings for vocab_size=261"
    ):
        encoder.tokenise(["a", "<think>"])


def test_a_template_that_reads_parts_gets_parts() -> None:
    parts = CHATML.replace("{{ m.content }}", "{% for part in m.content %}{{ part.text }}{% endfor %}")
    first = CHATML.replace("{{ m.content }}", "{{ m.content[0]['text'] }}")
    strict = parts.replace("{{ part.text }}", "{{ part.text if part is mapping else raise_exception('no') }}")
    for template in (parts, first, strict):
        assert trained(template, said("system", "s"), ASK, said("assistant", "a")) == [
            "|system\\ns|\\n|user\\nhi|\\n|assistant\\n[[a|]]"
        ]
    assert Encoder(tokenizer(parts)).render_prompt("1+1?", place="d:1")[0].startswith("<|im_start|>user\n1+1?")


def test_the_mark_of_the_next_turn_is_trained_where_it_ends_an_answer() -> None:
    template = CHATML.replace("<|im_end|>\n", "")  # as GLM-4
    row = (ASK, said("assistant", "a"), ASK, said("assistant", "b"))
    assert trained(template, *row, eos="<|im_start|>") == ["|user\\nhi|assistant\\n[[a|]]user\\nhi|assistant\\n[[b|]]"]


def test_what_is_trained_is_shown_with_escapes_visible() -> None:
    (text,) = trained(CHATML, said("user", "\x1b[31m" + "x" * 3000), said("assistant", "ü\n"))
    assert "\\x1b[31mxxx" in text and "x [...] x" in text and text.endswith("[[ü\\n|]]") and len(text) < 1200
