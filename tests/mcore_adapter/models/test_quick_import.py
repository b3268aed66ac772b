"""Megatron is imported without torch's compiler, which its functions load when they are called."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch

import mcore_adapter

SHOW = """
import sys
import mcore_adapter.engine, torch
optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
optimizer.load_state_dict(optimizer.state_dict())
optimizer.zero_grad()
print("megatron.core" in sys.modules, "torch._dynamo" in sys.modules, torch.compile.__module__)
"""


def test_the_engine_and_optimizers_load_megatron_and_no_compiler() -> None:
    done = subprocess.run([sys.executable, "-c", SHOW], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False", "torch"]


class OnGPU(torch.Tensor):
    """A tensor that says that it is on a GPU."""

    is_cuda = True


def test_a_function_is_compiled_once_with_its_options_at_its_first_call_on_a_gpu() -> None:
    compiled: list[dict[str, Any]] = []

    def compiler(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        compiled.append(options)
        return lambda *args, **kwargs: ("compiled", function(*args, **kwargs))

    def decorate(**options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        return mcore_adapter._compiled_when_called(compiler, **options)

    @decorate(mode="fast")
    def double(number: torch.Tensor) -> int:
        """Return twice the number."""
        return 2 * int(number)

    assert double.__name__ == "double"
    assert [double(torch.tensor(2)), double(number=torch.tensor(3))] == [4, 6] and not compiled, "not on the CPU"
    on_gpu = [torch.tensor(n).as_subclass(OnGPU) for n in (2, 3)]
    assert [double(on_gpu[0]), double(number=on_gpu[1])] == [("compiled", 4), ("compiled", 6)]
    assert compiled == [{"mode": "fast"}]
