"""A tokenizer is loaded without torch's compiler; models with code of their own still get all of transformers."""

import subprocess
import sys
from pathlib import Path

from tools.demo.data import make_tokenizer

SHOW = """
import sys
from rollout.data.tokenizer import load_tokenizer
tokenizer = load_tokenizer(sys.argv[1])
print(*tokenizer("1+2=")["input_ids"])
print(*sorted({"torch._dynamo", "torch.distributed.tensor", "transformers.modeling_utils"} & sys.modules.keys()))

import torch
from transformers import GenerationMixin
from transformers.models.auto import auto_factory

class FromTheHub(torch.nn.Module):
    def prepare_inputs_for_generation(self): ...

print(issubclass(auto_factory.add_generation_mixin_to_remote_model(FromTheHub), GenerationMixin))
"""


def test_a_tokenizer_loads_no_compiler_and_models_of_the_hub_can_generate(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    command = [sys.executable, "-c", SHOW, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    ids, heavy, can_generate = done.stdout.splitlines()
    assert [int(i) for i in ids.split()] == tokenizer("1+2=")["input_ids"]
    assert (heavy, can_generate) == ("", "True")
