"""Preference pairs from jsonl rows: texts, conversations, columns by name, and rows that are none."""

import json
from pathlib import Path

import pytest

from rollout.data.rows import PreferenceFields, read_preferences
from rollout.data.source import DatasetError


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def says(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def test_texts_are_read_from_the_named_columns(tmp_path: Path) -> None:
    path = write(tmp_path / "pairs.jsonl", {"question": "1+1=", "good": "2", "bad": "3", "prompt": "not this"})
    (pair,) = read_preferences(path, PreferenceFields(prompt="question", chosen="good", rejected="bad"))
    assert [(answer.prompt, answer.answer) for answer in pair] == [("1+1=", "2"), ("1+1=", "3")]


def test_the_common_beginning_of_two_conversations_is_the_prompt(tmp_path: Path) -> None:
    asked = [says("user", "1+1="), says("assistant", "?"), says("user", "say it")]
    chosen, rejected = says("assistant", "2"), says("assistant", "3")
    path = write(
        tmp_path / "pairs.jsonl",
        {"prompt": "ignored", "chosen": [*asked, chosen], "rejected": [*asked, rejected]},
        {"prompt": "1+1=", "chosen": [chosen], "rejected": [rejected]},
        {"prompt": asked, "chosen": [chosen], "rejected": [rejected]},
        {"chosen": [*asked, chosen], "rejected": [*asked, chosen]},
    )
    pairs = read_preferences(path, PreferenceFields())
    prompts = [tuple(asked), (says("user", "1+1="),), tuple(asked), tuple(asked)]
    assert [pair.chosen.messages for pair in pairs] == [(*prompt, chosen) for prompt in prompts]
    answers = [rejected, rejected, rejected, chosen]
    assert [pair.rejected.messages for pair in pairs] == [(*p, a) for p, a in zip(prompts, answers, strict=True)]
    assert [{answer.num_untrained for answer in pair} for pair in pairs] == [{len(prompt)} for prompt in prompts]


def test_dialogues_in_one_text_are_read(tmp_path: Path) -> None:
    asked = "\n\nHuman: hi\nyou\n\nAssistant: yes?\n\nHuman: 1+1"
    row = {"chosen": asked + "\n\nAssistant: 2", "rejected": asked + "\n\nAssistant: 3\n\nor 4 "}
    (pair,) = read_preferences(write(tmp_path / "pairs.jsonl", row), PreferenceFields())
    before = (says("user", "hi\nyou"), says("assistant", "yes?"), says("user", "1+1"))
    assert pair.chosen.messages == (*before, says("assistant", "2"))
    assert pair.rejected.messages == (*before, says("assistant", "3\n\nor 4"))


ASKED = [says("user", "1+1="), says("assistant", "2")]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "1", "answer": "2"}, r":2: no chosen answer under 'chosen', only \['answer', 'prompt'\]; set data"),
        ({"prompt": "1", "chosen": "2"}, r":2: no rejected answer under 'rejected'"),
        ({"prompt": "1", "chosen": "2", "rejected": " "}, r':2: "rejected" must be a non-empty string, found str'),
        ({"chosen": "2", "rejected": "3"}, r":2: no prompt under 'prompt', only \['chosen', 'rejected'\]; set data"),
        ({"prompt": "1", "chosen": [says("user", "2")], "rejected": "3"}, ":2: .* must be both texts or both lists"),
        ({"prompt": "1", "chosen": ["2"], "rejected": ["3"]}, ':2: "chosen" must be a non-empty string, found list'),
        ({"chosen": [says("a", "2")], "rejected": [says("a", "3")]}, ":2: the two conversations share no beginning"),
        (
            {"chosen": [*ASKED, says("user", "why"), says("assistant", "so")], "rejected": ASKED},
            ":2: one of the two conversations is the beginning of the other",
        ),
        (
            {
                "chosen": [*ASKED, says("user", "why"), says("assistant", "so")],
                "rejected": [*ASKED, says("user", "why")],
            },
            ":2: the two conversations part at a turn of 'user'",
        ),
    ],
)
def test_a_row_that_is_no_pair_is_named_by_file_and_line(tmp_path: Path, row: object, message: str) -> None:
    path = write(tmp_path / "pairs.jsonl", {"prompt": "1", "chosen": "2", "rejected": "3"}, row)
    with pytest.raises(DatasetError, match=message):
        read_preferences(path, PreferenceFields())
