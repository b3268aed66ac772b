"""One encoder: the tokens before an answer are the same in training, fine-tuning and evaluation."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from rollout.data.encoder import BOXED_INSTRUCTION, Encoder, MaskedSequence, PromptFormat, encode_examples
from rollout.data.prompts import PromptDataset
from rollout.data.rows import Example, Row, read_examples, scan_rows
from rollout.data.source import DatasetError

CHATML = (
    "{% if tools %}<|im_start|>system\n{{ tools | map(attribute='function.name') | join(',') }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if quiet %}<think></think>{% endif %}{% endif %}"
)
BEGINS = "{{ bos_token }}" + CHATML
FORGETS = CHATML.replace(
    "{{ m.content }}", "{{ m.content if loop.last else m.content.split('</think>')[-1] }}"
)  # as Qwen3: thoughts of earlier turns are left out
OPENS_THOUGHTS = CHATML.replace("{% if quiet %}<think></think>{% endif %}", "<think>")


def tokenizer(template: str | None = CHATML, *, begins: bool = False) -> Any:
    """One token a byte; `begins`: puts <s> before a text, as Llama's does."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={byte: i for i, byte in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"])
    made.add_tokens(["<think>", "</think>"])
    if begins:
        made.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", made.token_to_id("<s>"))])
    found = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    found.chat_template = template
    return found


def text_of(encoder: Encoder, token_ids: list[int]) -> str:
    return str(encoder.tokenizer.decode(token_ids))


def encoded(encoder: Encoder, prompt: str = "1+1?", **options: Any) -> str:
    """The prompt as its tokens say it."""
    row = Row(place="d:1", query_id="0", task="math", prompt=prompt, solutions=("2",), **options)
    ((text, token_ids),) = encoder.encode([row])
    assert text_of(encoder, token_ids).removeprefix("<s>") == text.removeprefix("<s>")
    return text_of(encoder, token_ids)


def test_a_prompt_becomes_the_users_turn_of_the_chat_template() -> None:
    boxed = PromptFormat(instruction=BOXED_INSTRUCTION, system="Be brief.", chat_options={"quiet": True})
    assert encoded(Encoder(tokenizer(), boxed)) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1+1?" + BOXED_INSTRUCTION
        + "<|im_end|>\n<|im_start|>assistant\n<think></think>"
    )  # fmt: skip
    assert BOXED_INSTRUCTION not in encoded(Encoder(tokenizer(), boxed), "Put 1+1 into \\boxed{}.")


def test_a_template_or_none_leaves_the_chat_template_out() -> None:
    assert encoded(Encoder(tokenizer(), PromptFormat(template="Q: {prompt}\nA:"))) == "Q: 1+1?\nA:"
    assert encoded(Encoder(tokenizer(), PromptFormat(template="{prompt}"))) == "1+1?"
    assert encoded(Encoder(tokenizer(None), PromptFormat(instruction=BOXED_INSTRUCTION))) == "1+1?"


@pytest.mark.parametrize("template", [None, CHATML, BEGINS])
def test_a_sequence_begins_with_one_token_of_its_beginning(template: str | None) -> None:
    encoder = Encoder(tokenizer(template, begins=True))
    begun = "" if template == CHATML else "<s>"  # a chat template writes all of its special tokens itself
    assert encoded(encoder).startswith(begun) and encoded(encoder).count("<s>") == len(begun) // 3
    plain = Encoder(tokenizer(template, begins=True), PromptFormat(template="<s>{prompt}"))
    assert encoded(plain) == "<s>1+1?"
    assert encoded(Encoder(tokenizer(template, begins=True), PromptFormat(template="{prompt}"))) == "<s>1+1?"


def test_a_prompt_that_is_in_the_chat_template_already_stays_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    encoder = Encoder(tokenizer(OPENS_THOUGHTS), PromptFormat(instruction=BOXED_INSTRUCTION))
    rendered = "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n<think>"
    assert encoded(encoder, rendered) == rendered
    assert "1 of 1 prompts have the marks of the chat template (<|im_start|>) and are used as they are" in caplog.text
    assert encoded(encoder, "Think in <think> tags. 1+1?").startswith("<|im_start|>user\nThink in <think> tags.")


def test_conversations_and_tools_go_through_the_chat_template() -> None:
    turns = ({"role": "system", "content": "Add."}, {"role": "user", "content": "1+1?"})
    tools = ({"type": "function", "function": {"name": "calculator"}},)
    encoder = Encoder(tokenizer(), PromptFormat(system="unused", instruction=BOXED_INSTRUCTION))
    assert encoded(encoder, messages=turns, tools=tools) == (
        "<|im_start|>system\ncalculator<|im_end|>\n<|im_start|>system\nAdd.<|im_end|>\n"
        "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
    )
    with pytest.raises(DatasetError, match="d:1: a conversation, and the model has no chat template"):
        encoded(Encoder(tokenizer(None)), messages=turns)
    strict = CHATML.replace(
        "<|im_start|>{{", "{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}{{"
    )
    with pytest.raises(
        DatasetError, match=r"d:1: the chat template does not take it \(roles system, user\): no system"
    ):
        encoded(Encoder(tokenizer(strict)), messages=turns)


def test_a_chat_template_may_come_from_a_file_or_be_text(tmp_path: Path) -> None:
    path = tmp_path / "own.jinja"
    path.write_text("{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}")
    assert encoded(Encoder(tokenizer(None), PromptFormat(chat_template=str(path)))) == "[user] 1+1?\n"
    assert encoded(Encoder(tokenizer(None), PromptFormat(chat_template=path.read_text()))) == "[user] 1+1?\n"
    for unreadable in (tmp_path / "none.jinja", "/dev/zero"):
        with pytest.raises(DatasetError, match="cannot read the chat template"):
            Encoder(tokenizer(None), PromptFormat(chat_template=str(unreadable)))


@pytest.mark.parametrize(
    ("listed", "ends"), [(None, ["<pad>", "</s>"]), ([259, 260], ["<pad>", "</s>", "<|im_start|>", "<|im_end|>"])]
)
def test_an_answer_ends_with_the_tokens_of_the_tokenizer_and_of_the_generation_config(
    tmp_path: Path, listed: list[int] | None, ends: list[str]
) -> None:
    if listed is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": listed}))
    encoder = Encoder(tokenizer(), folder=tmp_path)
    assert [encoder.tokenizer.decode(token) for token in encoder.end_token_ids] == ends
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(DatasetError, match=r"generation_config\.json: not valid JSON"):
        Encoder(tokenizer(), folder=tmp_path)


def write(tmp_path: Path, *rows: dict[str, Any]) -> Path:
    path = tmp_path / "d.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize("template", [None, CHATML, BEGINS, FORGETS, OPENS_THOUGHTS])
def test_fine_tuning_trains_an_answer_after_the_prompt_that_a_generator_gets(
    tmp_path: Path, template: str | None, begins: bool
) -> None:
    path = write(tmp_path, {"question": "1+1?", "answer": "2"})
    encoder = Encoder(tokenizer(template, begins=begins), PromptFormat(instruction=BOXED_INSTRUCTION))
    (prompt,) = PromptDataset.load(path, encoder, max_prompt_len=500, seed=0).prompts
    (sequence,) = encode_examples(encoder, read_examples(path))
    split = sequence.loss_mask.index(True)
    before = text_of(encoder, prompt.token_ids.tolist()).removesuffix("<think>")  # written for generators only
    assert text_of(encoder, sequence.token_ids[:split]) == before
    assert all(sequence.loss_mask[split:])
    end = "</s>" if template is None else "<|im_end|></s>"
    assert text_of(encoder, sequence.token_ids[split:]) == "2" + end


def pieces(encoder: Encoder, sequence: MaskedSequence) -> list[tuple[str, bool]]:
    """The texts of a sequence, cut where the mask changes."""
    found: list[tuple[list[int], bool]] = []
    for token, trained in zip(sequence.token_ids, sequence.loss_mask, strict=True):
        if not found or found[-1][1] != trained:
            found.append(([], trained))
        found[-1][0].append(token)
    return [(text_of(encoder, tokens), trained) for tokens, trained in found]


TURNS: tuple[dict[str, str], ...] = (
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "<think>sum</think>2"},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "<think>again</think>4"},
    {"role": "user", "content": "thanks"},
)


def with_end(tmp_path: Path, template: str) -> Encoder:
    """An encoder whose generation_config.json has the template's end of a turn."""
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 260}')
    return Encoder(tokenizer(template), folder=tmp_path)


def test_every_turn_of_the_assistant_is_trained_and_nothing_else(tmp_path: Path) -> None:
    encoder = with_end(tmp_path, CHATML)
    (sequence,) = encode_examples(encoder, [Example(place="d:1", messages=TURNS)])
    assert pieces(encoder, sequence) == [
        ("<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n", False),
        ("<think>sum</think>2<|im_end|>", True),
        ("\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n", False),
        ("<think>again</think>4<|im_end|>", True),
    ]


def test_a_template_that_rewrites_earlier_turns_makes_a_sequence_of_every_turn(tmp_path: Path) -> None:
    encoder = with_end(tmp_path, FORGETS)
    first, second = encode_examples(encoder, [Example(place="d:1", messages=TURNS)])
    assert (first.row, second.row) == (0, 0)
    assert pieces(encoder, first) == [
        ("<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n", False), ("<think>sum</think>2<|im_end|>", True),
    ]  # fmt: skip
    assert pieces(encoder, second) == [
        ("<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n"
         "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n", False),
        ("<think>again</think>4<|im_end|>", True),
    ]  # fmt: skip


def test_a_conversation_without_the_assistant_is_named(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r'd\.jsonl:1: "messages" has no turn of the assistant to train on'):
        read_examples(write(tmp_path, {"messages": [{"role": "user", "content": "hi"}]}))


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([{"content": "x"}], "message 1: has no role"),
        ([{"role": "user", "content": "x"}, {"content": "y"}], '"messages", message 2: has no role'),
        ([{"role": "user", "content": " "}], "message 1: the content of role 'user' is empty"),
        ([{"role": "user", "content": [{"type": "image", "url": "x"}]}], "content of type image; only text"),
        ([{"role": "user", "content": [{"type": "text", "text": 5}]}], "message 1: content must be a text, found int"),
        ([{"role": "user", "content": [{"type": "text", "text": None}]}], "message 1: the content of role 'user' is"),
        ([{"role": "assistant", "content": "x"}], "has only turns of the assistant"),
        ("hello", "must be a list of messages"),
    ],
)
def test_a_message_that_cannot_be_used_is_named(tmp_path: Path, messages: Any, said: str) -> None:
    with pytest.raises(DatasetError) as error:
        scan_rows(write(tmp_path, {"messages": messages, "answer": "1"}))
    assert "d.jsonl:1: " in str(error.value) and said in str(error.value)


def test_a_workflow_finds_the_conversation_of_a_prompt_in_its_meta(tmp_path: Path) -> None:
    path = write(tmp_path, {"messages": [{"role": "user", "content": "1+1?"}], "answer": 2, "level": 3})
    (prompt,) = PromptDataset.load(path, Encoder(tokenizer()), max_prompt_len=99, seed=0).prompts
    assert prompt.meta == {"level": 3, "messages": ({"role": "user", "content": "1+1?"},)}
