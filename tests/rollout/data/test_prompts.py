"""Every row schema becomes the same prompts, in an order that a seed fixes and a cursor resumes."""

import json
import os
from collections import Counter
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rollout.data.encoder import Encoder, PromptFormat
from rollout.data.prompts import PromptDataset
from rollout.data.rows import read_examples, scan_rows
from rollout.data.source import DatasetError, DataSource, Fields
from rollout.types import Prompt
from tests.rollout.data.test_encoder import CHATML
from tests.rollout.data.test_encoder import tokenizer as chat_tokenizer

DATA = Path(os.environ.get("SLIPSTREAM_DATA", Path(__file__).parents[3].parent / "shared" / "data"))


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    """One token per word."""
    backend = Tokenizer(models.WordLevel({"<unk>": 0, "one": 1, "two": 2, "Q:": 3}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return Encoder(PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>"))


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return path


def tutorial_row(i: int, prompt: str = "one two") -> dict[str, object]:
    return {"prompt": prompt, "task": "math", "query_id": f"id{i}", "solutions": [f"\\boxed{{{i}}}"]}


def drawn(prompt: Prompt) -> tuple[int, int]:
    return prompt.epoch, prompt.index


@pytest.mark.parametrize(
    ("record", "prompt", "solutions"),
    [
        (tutorial_row(7), "one two", ("\\boxed{7}",)),
        ({"prompt": "p", "solutions": ["3", "\\boxed{x}"]}, "p", ("\\boxed{3}", "\\boxed{x}")),
        ({"question": "q", "answer": "1080 = 2 * 540\n#### 1,080"}, "q", ("\\boxed{1080}",)),
        ({"query": "q", "response": "3 + 4 = 7.\n#### 7\nThe answer is: 7"}, "q", ("\\boxed{7}",)),
        ({"question": "q", "answer": "so\n####\n1,500 \n\n(in all)"}, "q", ("\\boxed{1500}",)),
        ({"problem": "p", "answer": "(0,100)", "level": 5}, "p", ("\\boxed{(0,100)}",)),
        ({"problem": "p", "question": "p", "answer": 27.0}, "p", ("\\boxed{27}",)),
        ({"problem": "p", "solution": "so \\boxed{\\frac{1}{2}}"}, "p", ("so \\boxed{\\frac{1}{2}}",)),
        ({"input": "i", "target": 43.0}, "i", ("\\boxed{43}",)),
        ({"input": "i", "target": 9.43}, "i", ("\\boxed{9.43}",)),
        ({"input": "i", "target": 1e-7}, "i", ("\\boxed{0.0000001}",)),
        ({"prompt": "p", "solutions": "\\boxed{1}"}, "p", ("\\boxed{1}",)),
        ({"question": "q", "answer": "one word"}, "q", ("\\boxed{one word}",)),
    ],
)
def test_rows_of_every_schema_are_read_as_they_are(
    tmp_path: Path, record: dict[str, object], prompt: str, solutions: tuple[str, ...]
) -> None:
    (row,) = scan_rows(write(tmp_path / "d.jsonl", record))
    assert (row.prompt, row.solutions) == (prompt, solutions)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"prompt": "x", ', "not a json object"),
        ("[1, 2]", "expected a json object, found list"),
        ('{"text": "x"}', "no prompt among the columns ['text']"),
        ('{"prompt": "", "solutions": ["1"]}', '"prompt" must be a non-empty string'),
        ('{"prompt": 3, "solutions": ["1"]}', '"prompt" must be a non-empty string, found int'),
        ('{"prompt": "x"}', "no solution among the columns ['prompt']"),
        ('{"prompt": "x", "task": "code"}', "of task 'code', and reward.function=math compares with it"),
        ('{"prompt": "x", "solutions": []}', '"solutions" must hold an answer, found an empty list'),
        ('{"question": "x", "answer": "1 + 1 = 2\\nso 2"}', '"#### <number>" as its last line'),
        ('{"question": "x", "answer": "1 + 1 = 2 ####"}', "#### <number>"),
        ('{"problem": "x", "answer": null}', '"answer" must be a string or a number'),
        ('{"problem": "x", "solution": "no box"}', "no \\boxed"),
        ('{"input": "x", "target": NaN}', '"target" must be a string or a number'),
        ('{"prompt": "\\ud83d", "solutions": ["1"]}', "surrogates"),
        ("[" * 100_000, "nested more than 100 deep"),
    ],
)
def test_a_row_that_cannot_be_used_is_named_by_file_and_line(tmp_path: Path, line: str, said: str) -> None:
    path = write(tmp_path / "d.jsonl", tutorial_row(0), "", line)
    with pytest.raises(DatasetError) as error:
        scan_rows(path)
    assert str(error.value).startswith(f"{path}:3: ")
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("record", "pair"),
    [
        ({"prompt": "p", "answer": "7", "solutions": ["8"]}, ("p", "7")),
        (tutorial_row(7), ("one two", "\\boxed{7}")),
        ({"question": "q", "answer": "1080 = 2 * 540\n#### 1,080"}, ("q", "1080 = 2 * 540\n#### 1,080")),
        ({"problem": "p", "answer": "3", "solution": "so it is 3"}, ("p", "so it is 3")),
        ({"problem": "p", "answer": 27.0, "solution": None}, ("p", "27")),
        ({"input": "i", "target": 9.43}, ("i", "9.43")),
        ({"prompt": "p", "answer": ["first", "second"]}, ("p", "first")),
    ],
)
def test_pairs_for_fine_tuning_hold_the_answer_in_full(
    tmp_path: Path, record: dict[str, object], pair: tuple[str, str]
) -> None:
    (example,) = read_examples(write(tmp_path / "d.jsonl", record))
    assert (example.prompt, example.answer) == pair


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"prompt": "x", "answer": NaN}', "\"answer\" must be a string or a number, found float 'nan'"),
        ('{"prompt": "x", "answer": true}', "\"answer\" must be a string or a number, found bool 'True'"),
        ('{"prompt": "x", "answer": {"a": 1}}', '"answer" must be a string or a number, found dict'),
        ('{"prompt": "x", "answer": ""}', '"answer" must be a non-empty string'),
        ('{"prompt": "x", "solutions": []}', '"solutions" must be a list of non-empty strings'),
        ('{"prompt": "x", "solutions": [true]}', '"solutions" must be a list of non-empty strings'),
        ('{"prompt": "x"}', "no answer among the columns ['prompt']"),
        ('{"prompt": " ", "answer": "1"}', '"prompt" must be a non-empty string'),
        ('{"prompt": "x", "answer": "\\ud83d"}', "surrogates"),
        ('{"prompt": "x", "solutions": ["\\ud83d"]}', "surrogates"),
    ],
)
def test_a_pair_that_cannot_be_trained_on_is_named_by_file_and_line(tmp_path: Path, line: str, said: str) -> None:
    path = write(tmp_path / "d.jsonl", {"prompt": "x", "answer": "1"}, "", line)
    with pytest.raises(DatasetError) as error:
        read_examples(path)
    assert str(error.value).startswith(f"{path}:3: ")
    assert said in str(error.value)


def test_a_missing_or_empty_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"none\.jsonl: cannot read the data set: No such file"):
        scan_rows(tmp_path / "none.jsonl")
    with pytest.raises(DatasetError, match="no data files in this folder"):
        scan_rows(tmp_path)
    with pytest.raises(DatasetError, match="no rows"):
        scan_rows(write(tmp_path / "d.jsonl", "", ""))


def test_a_repeated_query_id_is_kept_under_a_new_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [tutorial_row(1), tutorial_row(1), {**tutorial_row(2), "query_id": "id1#2"}, tutorial_row(1)]
    ids = [row.query_id for row in scan_rows(write(tmp_path / "d.jsonl", *rows))]
    assert ids == ["id1", "id1#2'", "id1#2", "id1#3"]
    assert "2 rows repeat a query_id" in caplog.text


def test_prompts_are_tokenised_in_the_template_and_too_long_ones_are_counted(tmp_path: Path, encoder: Encoder) -> None:
    path = write(tmp_path / "d.jsonl", tutorial_row(0), tutorial_row(1, "one " * 9), tutorial_row(2))
    quoted = Encoder(encoder.tokenizer, PromptFormat(template="Q: {prompt}"))
    dataset = PromptDataset.load(path, quoted, max_prompt_len=3, seed=0)
    assert [p.query_id for p in dataset.prompts] == ["id0", "id2"]
    assert [p.index for p in dataset.prompts] == [0, 1]
    assert dataset.prompts[0].token_ids.tolist() == [3, 1, 2]
    assert dataset.left_out is not None and dataset.left_out.num_left_out == 1
    with pytest.raises(DatasetError, match=r"max_prompt_len=1 leaves none of 3 prompts; the shortest has 2 tokens"):
        PromptDataset.load(path, encoder, max_prompt_len=1, seed=0)
    with pytest.raises(DatasetError, match=r"no \{prompt\}"):
        Encoder(encoder.tokenizer, PromptFormat(template="Q:"))


def test_every_epoch_is_another_shuffle_of_all_prompts_and_the_seed_decides_which(tmp_path, encoder: Encoder) -> None:
    path = write(tmp_path / "d.jsonl", *(tutorial_row(i) for i in range(50)))

    def stream(seed: int) -> list[tuple[int, int]]:
        dataset = PromptDataset.load(path, encoder, max_prompt_len=9, seed=seed)
        return [drawn(dataset.at(k)) for k in range(150)]

    first = stream(1)
    assert Counter(first) == Counter((epoch, index) for epoch in range(3) for index in range(50))
    assert [epoch for epoch, _ in first] == sorted(epoch for epoch, _ in first)
    assert [i for _, i in first[:50]] != [i for _, i in first[50:100]] != list(range(50))
    assert first == stream(1) != stream(2)


def test_without_shuffling_every_epoch_is_in_the_order_of_the_file(tmp_path: Path, encoder: Encoder) -> None:
    path = write(tmp_path / "d.jsonl", *(tutorial_row(i) for i in range(5)))
    dataset = PromptDataset.load(path, encoder, max_prompt_len=9, seed=1, shuffle=False)
    assert [dataset.at(k).index for k in range(10)] == [0, 1, 2, 3, 4] * 2
    with pytest.raises(DatasetError, match="shuffle=False, this one True"):
        PromptDataset.load(path, encoder, max_prompt_len=9, seed=1).check_same(dataset.identity())


def test_other_data_than_of_the_run_is_refused(tmp_path: Path, encoder: Encoder) -> None:
    state = PromptDataset.load(
        write(tmp_path / "a.jsonl", tutorial_row(0), tutorial_row(1)), encoder, max_prompt_len=9, seed=1
    ).identity()
    for rows, seed, said in (
        ([tutorial_row(0)], 1, "num_prompts=2, this one 1"),
        ([tutorial_row(0), tutorial_row(1, "two")], 1, "checksum"),
        ([tutorial_row(0), tutorial_row(1)], 2, "seed=1, this one 2"),
    ):
        other = PromptDataset.load(write(tmp_path / "b.jsonl", *rows), encoder, max_prompt_len=9, seed=seed)
        with pytest.raises(DatasetError, match=said):
            other.check_same(state)


def test_a_column_that_may_be_the_answer_is_named_where_no_row_has_one(tmp_path, caplog) -> None:
    path = write(tmp_path / "d.jsonl", {"prompt": "1+1=", "gold_value": 2, "level": 1})
    scan_rows(path, solved=False)
    assert "prompt.answers is empty; if it is in gold_value, set dataset.answer_field" in caplog.text
    caplog.clear()
    scan_rows(DataSource(path=str(path), fields=Fields(answer="gold_value")), solved=False)
    scan_rows(write(path, {"prompt": "1+1=", "level": 1}), solved=False)
    assert not caplog.text


def test_the_same_rows_at_another_path_continue_a_run(tmp_path: Path, encoder: Encoder) -> None:
    rows = [{"prompt": f"{i}+1=", "answer": i + 1} for i in range(3)]  # without names of their own
    (tmp_path / "job2").mkdir()
    first, other = write(tmp_path / "a.jsonl", *rows), write(tmp_path / "job2" / "train.jsonl", *rows)
    state = PromptDataset.load(first, encoder, max_prompt_len=9, seed=1).identity()
    PromptDataset.load(other, encoder, max_prompt_len=9, seed=1).check_same(state)


def test_a_template_with_the_time_continues_a_run_and_another_template_does_not(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", tutorial_row(0), {"messages": [{"role": "user", "content": "1+1"}], "answer": 2})

    def load(template: str, **changes: str) -> PromptDataset:
        made = chat_tokenizer(template)
        return PromptDataset.load(path, Encoder(made, PromptFormat(**changes)), max_prompt_len=99, seed=1)

    dated = "{{ strftime_now('%f') }}" + CHATML
    before, after = load(dated), load(dated)
    assert before.prompts[0].text != after.prompts[0].text
    after.check_same(before.identity())
    for other in (load(dated + " "), load(dated, system="Be brief."), load(dated, instruction="Now.")):
        with pytest.raises(DatasetError, match="restore the rows of dataset.path and the keys of prompt"):
            other.check_same(before.identity())


@pytest.mark.skipif(not DATA.is_dir(), reason="no data sets: set SLIPSTREAM_DATA to their folder")
@pytest.mark.parametrize(
    ("name", "num_rows"),
    [("gsm8k/train", 7473), ("math_500/test", 500), ("aime24/test", 30), ("amc23/test", 40), ("mawps/singleop", 562)],
)
def test_public_data_sets_are_read_as_they_are(name: str, num_rows: int) -> None:
    rows = scan_rows(DATA / f"{name}.jsonl")
    assert len({row.query_id for row in rows}) == len(rows) == num_rows
    assert all(row.solutions[0].startswith("\\boxed{") for row in rows)


def test_bytes_that_are_not_text_are_named_by_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes(b'{"input": "x", "target": 1}\n{"input": "\xff\xfe", "target": 1}\n')
    with pytest.raises(DatasetError, match=r"d\.jsonl:2: not UTF-8"):
        scan_rows(path)
