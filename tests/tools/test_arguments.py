"""Bad arguments of the tools: exit code 2 and one line, before anything is imported or written."""

import importlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollout.data.tokenizer import load_tokenizer
from tools import scratch_model
from tools.bench import SHAPES
from tools.bench.__main__ import MEASUREMENTS, find


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": "1 + 1 =", "solutions": ["2"]}) + "\n")
    return path


def run(monkeypatch: pytest.MonkeyPatch, module: str, *words: str) -> int:
    """The exit code of a tool with these arguments, in this process."""
    monkeypatch.setattr(sys, "argv", [module, *words])
    try:
        return importlib.import_module(module).main() or 0
    except SystemExit as end:
        assert isinstance(end.code, int)
        return end.code


SLOW = ("torch", "megatron", "ray", "transformers", "matplotlib")
"""Libraries that take seconds to import."""
OWN = ("allocation", "config_schema", "core", "mcore_adapter", "model_specs", "rollout", "slipstream", "tools")


@pytest.fixture
def without_slow_libraries() -> Iterator[None]:
    """Import this project's modules anew in the test, and let an import of a slow library fail."""
    before = dict(sys.modules)
    for name in [name for name in before if name.partition(".")[0] in (*OWN, *SLOW)]:
        del sys.modules[name]
    sys.modules.update(dict.fromkeys(SLOW))
    yield
    sys.modules.clear()
    sys.modules.update(before)


@pytest.mark.parametrize(
    ("module", "words", "said"),
    [
        ("tools.bench.__main__", "cpu --only push", "--only push: not measured on cpu"),
        ("tools.bench.__main__", "cpu --output /proc/x", "argument --output: /proc/x: cannot write in /proc"),
        (
            "tools.bench.__main__",
            "gpu --trial --sglang-python /no/python --keep tests",
            "--keep tests: measurements start with an empty folder",
        ),
        ("tools.bench.__main__", "gpu --shape 2B", "argument --shape: invalid choice: '2B'"),
        ("tools.bench.__main__", "gpu", "gpu: nvidia-smi shows none on this host; write cpu, or add --trial"),
        ("tools.bench.__main__", "gpu --trial --sglang-python /no/python", "/no/python: no such interpreter"),
        ("tools.chaos.__main__", "--kills 0", "argument --kills: 0 must be at least 1"),
        ("tools.chaos.__main__", "--folder /etc/passwd", "is a file; name a folder"),
        ("tools.convert", "--checkpoint_path /no/folder --output_path /tmp/x", "--checkpoint_path=/no/folder: no such"),
        ("tools.curves", "compare /no/file", "/no/file: no recording"),
        ("tools.curves", "compare /dev/null", "/dev/null: no recording"),
        ("tools.curves", "record /no/file", "/no/file: no such folder"),
        ("tools.demo.__main__", "--steps 0", "argument --steps: 0 must be at least 1"),
        ("tools.demo.data", "--output /proc/x", "argument --output: /proc/x: cannot write in /proc"),
        ("tools.demo.plot", "/no/file --output x.png", "argument metrics: /no/file: no such file"),
        ("tools.eval.__main__", "--model_path m --output_path /etc/passwd", "is a file; name a folder"),
        ("tools.eval.__main__", "--model_path /no/model --output_path o", "--model_path /no/model: no such folder"),
        ("tools.eval.__main__", "compare /no/a /no/b", "/no/a: no such folder; give the --output_path"),
        ("tools.loss.__main__", "/no/file", "No such file or directory: '/no/file'"),
        ("tools.loss.__main__", "--from-run /tmp/none --step 3", "0 files of step 3 below this folder, expected 1"),
        ("tools.mutants", "--ids no-such-mutant", "no entry matches --ids and --area"),
        ("tools.samples", "/no/run --limit -1", "argument --limit: -1 must be at least 0"),
        ("tools.samples", "/no/run", "/no/run: no samples.jsonl there or below"),
        ("tools.scratch_model", "--data /no/file --output o", "argument --data: /no/file: no such file"),
        ("tools.setup_cluster", "", "the following arguments are required"),
        ("slipstream.cli", "eval --seed -1", "argument --seed: -1 must be from 0"),
    ],
)
@pytest.mark.usefixtures("without_slow_libraries")
def test_bad_input_is_refused_before_a_slow_library_is_imported(monkeypatch, capsys, module, words, said) -> None:
    monkeypatch.setattr(signal, "signal", lambda *args: None)
    monkeypatch.setenv("PATH", "/no/nvidia-smi")
    assert run(monkeypatch, module, *words.split()) == 2
    shown = capsys.readouterr().err
    assert said in shown.splitlines()[-1] and "usage:" not in shown


def test_every_measurement_is_found_and_every_shape_is_offered() -> None:
    for measurements in MEASUREMENTS.values():
        assert all(callable(find(place)) for place in measurements.values())
    assert list(SHAPES) == ["1.5B", "7B", "tiny"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--hidden-size", "100"], "error: --hidden-size 100 must be a multiple of twice --head-dim, 64; try 128"),
        (["--hidden-size", "0"], "argument --hidden-size: 0 must be at least 1"),
        (["--head-dim", "0"], "argument --head-dim: 0 must be at least 1"),
        (["--head-dim", "5", "--hidden-size", "10"], "error: --head-dim 5 must be even"),
        (["--num-layers", "-3"], "argument --num-layers: -3 must be at least 1"),
        (["--vocab-size", "10"], "argument --vocab-size: 10 must be at least 260"),
        (
            ["--seed", "99999999999999999999999"],
            "argument --seed: 99999999999999999999999 must be from 0 to 4294967295",
        ),
        (["--hidden-size", "640000", "--num-layers", "9999"], "of memory are free; choose smaller ones"),
        (["--output", "/proc/x"], "argument --output: /proc/x: cannot write in /proc"),
        (["--output", "DATA"], "is a file; name a folder"),
        (["--data", "/no/file"], "argument --data: /no/file: no such file"),
        (["--data", "FIFO"], "fifo: not a regular file"),
        (["--data", "BAD"], "error: --data: "),
    ],
)
def test_scratch_model_refuses_what_it_cannot_make(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str],
    said: str,
) -> None:  # fmt: skip
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "bad.jsonl").write_text("{nothing\n")
    places = {"DATA": str(data), "FIFO": str(tmp_path / "fifo"), "BAD": str(tmp_path / "bad.jsonl")}
    words = [places.get(word, word) for word in words]
    output = tmp_path / "model"
    monkeypatch.setattr(scratch_model, "make_model", lambda *args, **kwargs: pytest.fail("it was made"))
    assert run(monkeypatch, "tools.scratch_model", "--data", str(data), "--output", str(output), *words) == 2
    assert said in capsys.readouterr().err.splitlines()[-1]
    assert not output.exists()


def test_scratch_model_reads_any_column_and_makes_a_chat_model(tmp_path, monkeypatch, capsys) -> None:
    path = tmp_path / "own.csv"
    path.write_text("ask,level\nWhat is 1 plus 1?,easy\n")
    words = ["--data", str(path), "--output", str(tmp_path / "model"), "--num-layers", "1", "--hidden-size", "64"]
    assert run(monkeypatch, "tools.scratch_model", *words) == 2
    assert "name it with prompt_field" in capsys.readouterr().err
    assert run(monkeypatch, "tools.scratch_model", *words, "--prompt_field", "ask", "--chat") == 0
    tokenizer = load_tokenizer(tmp_path / "model")
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "1+1?"}], tokenize=False, add_generation_prompt=True
    )
    assert text == "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.eos_token == "<|im_end|>" and len(tokenizer(text)["input_ids"]) < len(text) - 20


def test_scratch_model_never_overwrites_a_model_that_it_did_not_write(tmp_path, data, monkeypatch, capsys) -> None:
    made: list[Path] = []
    monkeypatch.setattr(scratch_model, "make_model", lambda data, output, **shape: made.append(output) or 1)
    theirs, mine = tmp_path / "theirs", tmp_path / "mine"
    theirs.mkdir()
    (theirs / "config.json").write_text("{}")
    assert run(monkeypatch, "tools.scratch_model", "--data", str(data), "--output", str(theirs)) == 2
    assert "is not empty and was not written by this tool" in capsys.readouterr().err
    for _ in range(2):
        assert run(monkeypatch, "tools.scratch_model", "--data", str(data), "--output", str(mine)) == 0
    assert made == [mine, mine] and [path.name for path in theirs.iterdir()] == ["config.json"]
