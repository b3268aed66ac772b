"""No compiler is loaded with tokenizer or trainer; models with code of their own still get all of transformers."""

import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from rollout.data.tokenizer import load_tokenizer
from tools.demo.data import make_tokenizer

SHOW = """
import sys
from rollout.data.tokenizer import load_tokenizer
tokenizer = load_tokenizer(sys.argv[1])
print(*tokenizer("1+2=")["input_ids"])
print(*sorted({"torch._dynamo", "torch.distributed.tensor", "transformers.modeling_utils"} & sys.modules.keys()))

import mcore_adapter.engine, torch
optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
optimizer.load_state_dict(optimizer.state_dict())
optimizer.zero_grad()
print("megatron.core" in sys.modules, "torch._dynamo" in sys.modules, torch.compile.__module__)

from transformers import GenerationMixin
from transformers.models.auto import auto_factory

class FromTheHub(torch.nn.Module):
    def prepare_inputs_for_generation(self): ...

print(issubclass(auto_factory.add_generation_mixin_to_remote_model(FromTheHub), GenerationMixin))
"""


def test_tokenizer_and_engine_load_no_compiler_and_models_of_the_hub_can_generate(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    command = [sys.executable, "-c", SHOW, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    ids, heavy, engine, can_generate = done.stdout.splitlines()
    assert [int(i) for i in ids.split()] == tokenizer("1+2=")["input_ids"]
    assert (heavy, engine, can_generate) == ("", "True False torch", "True")


@pytest.mark.parametrize("declared", [["evil.Evil", None], ["evil.Evil", "evil.Evil"]])
def test_code_in_the_folder_of_a_tokenizer_is_not_run(tmp_path: Path, declared: list[str | None]) -> None:
    make_tokenizer().save_pretrained(tmp_path)
    touched = tmp_path / "touched"
    (tmp_path / "evil.py").write_text(f"open({str(touched)!r}, 'w')\nclass Evil: ...\n")
    for name in ("tokenizer_config.json", "config.json"):
        path = tmp_path / name
        written = json.loads(path.read_text()) if path.exists() else {"model_type": "evil"}
        code = {"AutoTokenizer": declared, "AutoConfig": "evil.Evil"}
        path.write_text(json.dumps(written | {"tokenizer_class": "Evil", "auto_map": code}))
    with suppress(ValueError):  # or a class of transformers itself
        load_tokenizer(tmp_path)
    assert not touched.exists()


@pytest.mark.parametrize(
    "expression",
    [
        "cycler.__init__.__globals__.os.mkdir('TOUCHED')",
        "''.__class__.__mro__[1].__subclasses__()[0].mkdir('TOUCHED')",
        "messages.append.__self__.__class__.__base__.__subclasses__()",
    ],
)
def test_a_chat_template_reaches_nothing_outside_of_itself(tmp_path: Path, expression: str) -> None:
    make_tokenizer().save_pretrained(tmp_path)
    touched = tmp_path / "touched"
    (tmp_path / "chat_template.jinja").write_text("{{ " + expression.replace("TOUCHED", str(touched)) + " }}")
    tokenizer = load_tokenizer(tmp_path)
    with pytest.raises(Exception, match="unsafe"):
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
    assert not touched.exists()
