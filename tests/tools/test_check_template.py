"""slipstream check-template says where a template rewrites what it has written, and how it writes calls of tools."""

from pathlib import Path

import pytest

from helpers.chat_tokenizer import chat_tokenizer
from tools.check_template import main

APPEND_ONLY = """{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}
{%- for c in m.tool_calls or [] %}<call>{"tool": "{{ c.function.name }}", "with": {{ c.function.arguments | tojson }}}
{%- endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    chat_tokenizer().save_pretrained(folder)
    return folder


def findings(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model: Path, *more: str
) -> dict[str, str]:
    monkeypatch.setattr("sys.argv", ["check-template", "--model", str(model), *more])
    assert main() == 0
    lines = [line.partition(":") for line in capsys.readouterr().out.splitlines()]
    return {name: finding.strip() for name, _, finding in lines}


def test_a_template_that_drops_thoughts_is_shown_with_the_reason(monkeypatch, capsys, model: Path) -> None:
    found = findings(monkeypatch, capsys, model)
    assert found["thoughts"].startswith("not possible: the chat template leaves out content of the assistant's turn")
    assert found["calls of tools"] == "JSON with name and arguments after '<tool_call>'"


def test_an_append_only_template_is_shown_as_such(monkeypatch, capsys, model: Path) -> None:
    found = findings(monkeypatch, capsys, model, "--chat_template", APPEND_ONLY)
    kinds = ("turns", "system", "thoughts", "tools", "parallel tools")
    assert {kind: found[kind] for kind in kinds} == dict.fromkeys(kinds, "append-only")
    assert found["calls of tools"] == "JSON with tool and with after '<call>'"


def test_a_folder_without_a_model_is_one_line(monkeypatch, capsys, tmp_path) -> None:
    monkeypatch.setattr("sys.argv", ["check-template", "--model", str(tmp_path)])
    assert main() == 2
    assert capsys.readouterr().err.startswith(f"error: --model {tmp_path}: ")
