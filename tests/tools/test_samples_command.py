"""The command that shows what a run sampled."""

import json
from pathlib import Path

import pytest

from core.monitoring.samples import Sample, SampleFile, Turn
from helpers.chat_tokenizer import chat_tokenizer
from helpers.stores import episode, tags
from rollout.experience import EveryEpisode, open_store
from tools.samples import main


def sample(step: int, query: str, reward: float, answer: str, **more: object) -> Sample:
    values: dict = {
        "step": step, "query_id": query, "episode": f"s/{query}/{step}", "index": 0, "prompt": f"What is {query}?",
        "answer": answer, "reward": reward, "finish_reason": "stop", "prompt_tokens": 3, "answer_tokens": len(answer),
        "oldest_version": step - 1, "newest_version": step, "notable": (), **more,
    }  # fmt: skip
    return Sample(**values)


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    """Two steps of the same two prompts."""
    folder = tmp_path / "logs" / "me" / "sums" / "first"
    file = SampleFile(folder, continue_after=0, max_bytes=10**9, keep=2)
    file.write(
        [
            sample(1, "1+1", 0.0, "It is three", notable=("worst",)),
            sample(1, "2+2", 1.0, "It is four", notable=("best",)),
        ]
    )
    file.write([
        sample(2, "1+1", 1.0, "Two, I see", notable=("best",)),
        sample(2, "3+3", 0.5, "Six or " + "seven " * 300, finish_reason="length", notable=("longest",)),
    ])  # fmt: skip
    file.close()
    return folder


@pytest.fixture
def rows(logs: Path, capsys: pytest.CaptureFixture[str]):
    """The answers that arguments select."""

    def select(*arguments: str) -> list[str]:
        assert main([str(logs), *arguments, "--json"]) == 0
        return [json.loads(line)["answer"][:10] for line in capsys.readouterr().out.splitlines()]

    return select


def test_without_conditions_the_last_step_is_shown(logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(logs.parents[2])]) == 0, "the folder may be above that of the run"
    shown = capsys.readouterr().out
    assert "step 2 (best)" in shown and "What is 1+1?" in shown and "Two, I see" in shown
    assert "reward 0.500" in shown and "(length)" in shown and "characters ...]" in shown
    assert "three" not in shown and "2 of 2 answers shown" in shown
    assert main([str(logs), "--full", "--limit", "1", "--sort", "length"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("seven") == 300 and "1 of 2 answers shown; --limit 0 shows all" in shown


def test_conditions_select_by_step_reward_end_prompt_text_and_rank(rows) -> None:
    assert rows("--step", "1") == ["It is thre", "It is four"]
    assert rows("--step", "1..2", "--reward", ">=0.5") == ["It is four", "Two, I see", "Six or sev"]
    assert rows("--step", "1..2", "--reward", "<0.5") == ["It is thre"]
    assert rows("--finish", "length") == ["Six or sev"]
    assert rows("--step", "1..2", "--query", "1+1") == ["It is thre", "Two, I see"]
    assert rows("--step", "1..2", "--search", "IT IS t") == ["It is thre"]
    assert rows("--step", "1..2", "--search", r"2\+2") == ["It is four"], "prompts are searched too"
    assert rows("--step", "1..2", "--best", "--worst") == ["It is thre", "It is four", "Two, I see"]
    assert rows("--step", "1..2", "--sort", "reward") == ["It is four", "Two, I see", "Six or sev", "It is thre"]
    assert rows("--step", "1..2", "--limit", "0") == rows("--step", "1..2")


def test_answers_of_evaluations_are_shown_and_selected(
    logs: Path, rows, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    file = SampleFile(logs, continue_after=2, max_bytes=10**9, keep=2)
    file.write([sample(2, "1+1", 0.0, "Hm. 1 or 2", evaluation="hard"), sample(2, "9+9", 1.0, "18", evaluation="easy")])
    file.close()
    assert main([str(logs)]) == 0
    assert "step 2, evaluation hard" in capsys.readouterr().out
    monkeypatch.setenv("COLUMNS", "30")
    assert main([str(logs), "--of", "hard"]) == 0
    assert "prompt 1+1, answer 0" in " ".join(capsys.readouterr().out.replace("│", "").split())
    monkeypatch.setenv("COLUMNS", "200")
    assert rows("--of", "training") == ["Two, I see", "Six or sev"]
    assert rows("--of", "evaluation") == ["Hm. 1 or 2", "18"] and rows("--of", "easy") == ["18"]
    assert len(rows()) == 4
    assert main([str(logs), "--of", "none"]) == 2
    said = "there are no samples of --of none; there are some of easy, evaluation, hard, training"
    assert said in capsys.readouterr().err


def test_two_steps_stand_side_by_side_with_equal_prompts_in_a_row(logs: Path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main([str(logs), "--step", "1", "--against", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any("It is three" in line and "Two, I see" in line for line in lines)
    assert any("It is four" in line and "Six or" in line for line in lines), "what has no partner follows"
    assert "sums/first: step 1, 2 answers, mean reward 0.500" in lines[1] and "mean reward 0.750" in lines[1]
    assert lines[-1] == "2 of 2 rows shown, 1 of them with the same prompt on both sides"
    for limit, number in (("1", 1), ("0", 2)):
        assert main([str(logs), "--step", "1", "--against", "2", "--limit", limit]) == 0
        shown = capsys.readouterr().out
        assert ("It is four" in shown) == (number == 2) and "It is three" in shown
        assert shown.splitlines()[-1].startswith(f"{number} of 2 rows shown")


def test_turns_of_an_environment_are_marked_and_no_text_controls_the_terminal(tmp_path, capsys) -> None:
    turns = (Turn(by="model", text="call\x1b[2J"), Turn(by="environment", text="42"))
    file = SampleFile(tmp_path, continue_after=0, max_bytes=10**9, keep=2)
    file.write([sample(1, "q", 1.0, "call\x1b[2J42", turns=turns)])
    file.close()
    assert main([str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "[model] call\\x1b[2J" in shown and "[environment] 42" in shown and "\x1b[2J" not in shown


def test_what_does_not_exist_is_named(logs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(*arguments: str) -> str:
        assert main([*arguments]) == 2
        return capsys.readouterr().err

    assert "no samples.jsonl there or below; give the log folder of a run" in refused(str(tmp_path / "nope"))
    assert "there are no samples of steps 7 to 9" in refused(str(logs), "--step", "7..9")
    assert "Add --step N" in refused(str(logs), "--against", "2")
    (logs.with_name("second")).mkdir()
    (logs.with_name("second") / "samples.jsonl").write_text('{"loss": 1}\n')
    assert "2 runs are below it" in refused(str(tmp_path))
    assert "not a file of samples" in refused(str(logs.with_name("second")))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--step", "x"], "'x' is no step and no range of steps; write 10 or 10..20"),
        (["--reward", "half"], "'half' is no condition; write '>0.5', '<=0' or '=1'"),
        (["--search", "("], "'(' is no regular expression"),
    ],
)
def test_a_bad_argument_is_one_line(arguments: list[str], message: str, logs: Path, capsys) -> None:
    with pytest.raises(SystemExit) as end:
        main([str(logs), *arguments])
    assert end.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["sqlite", "file"])
def test_a_store_shows_every_answer_whose_tokens_it_has(kind: str, tmp_path, capsys) -> None:
    path, model = tmp_path / "store", tmp_path / "model"
    chat_tokenizer().save_pretrained(model)
    store = open_store(kind, str(path))
    for number, version in ((0, 0), (1, 2), (2, 2)):
        assert store.open(tags(number, version), EveryEpisode()) == "open"
        store.put(episode(number, version, rewards=(0.0, 1.0)))
    assert store.open(tags(3, 2), EveryEpisode()) == "open", "it is sampled"
    store.close()
    given = [str(path), "--tokenizer", str(model), "--json"]

    def shown(*arguments: str) -> list[tuple[int, str, float]]:
        assert main([*given, *arguments]) == 0
        rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        return [(row["step"], row["episode"], row["reward"]) for row in rows]

    assert shown() == [(3, "q1", 0.0), (3, "q1", 1.0), (3, "q2", 0.0), (3, "q2", 1.0)], "the last step"
    assert shown("--step", "1..9", "--reward", ">0") == [(1, "q0", 1.0), (3, "q1", 1.0), (3, "q2", 1.0)]
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "config.yaml").write_text(
        f"actor: {{path: {model}}}\nexperience: {{store: {kind}, path: {path}}}\n", encoding="utf-8"
    )
    given = [str(logs), "--store", "--json"]
    assert len(shown("--best")) == 1
    assert main([str(path)]) == 2
    assert "name the folder of the model that sampled it with --tokenizer" in capsys.readouterr().err
