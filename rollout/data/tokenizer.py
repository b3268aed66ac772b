"""The tokenizer of a Hugging Face folder, loaded without the modelling code of transformers.

AutoTokenizer imports transformers.generation for one base class that only models with code of their own need. That
loads torch's compiler and torch.distributed.tensor, a third of the start of the process that samples. Here the class is
imported when such a model is loaded.
"""

import functools
import sys
from pathlib import Path
from types import ModuleType
from typing import Protocol

import transformers.generation
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers.utils import chat_template_utils

from rollout.data.source import DatasetError
from rollout.types import Tokenizer

_CLASS = "GenerationMixin"
_READER = "add_generation_mixin_to_remote_model"
_INTEGER_BITS = 4096


class _NotImported:
    """Stands for GenerationMixin while transformers.models.auto is imported."""


class _Environment(ImmutableSandboxedEnvironment):
    """Environment of chat templates that refuses large integers: Python may compute one for minutes, and handles no
    signal meanwhile."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Context, operator: str, left: object, right: object) -> object:
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
            if bits > _INTEGER_BITS:
                raise OverflowError(f"it computes an integer of more than {_INTEGER_BITS} bits")
        return super().call_binop(context, operator, left, right)


# What apply_chat_template compiles with.
vars(chat_template_utils)["ImmutableSandboxedEnvironment"] = _Environment


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Return the tokenizer of the folder `path`, as AutoTokenizer.from_pretrained does. Code in the folder is not
    run. Raises DatasetError where its files cannot be used."""
    try:
        tokenizer = _auto_tokenizer().from_pretrained(path, trust_remote_code=False)
        tokenizer(["1"])  # some settings are used only now
        return tokenizer
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # whatever the files hold; also PanicException, which is no Exception
        why = f"{type(error).__name__}: {error}; see tokenizer_config.json, or download the tokenizer again"
        raise DatasetError(f"{path}: the tokenizer cannot be loaded: {why}", setting="model") from error


class _Loader(Protocol):
    """What is used of AutoTokenizer."""

    def from_pretrained(self, path: str | Path, *, trust_remote_code: bool) -> Tokenizer: ...


def _auto_tokenizer() -> _Loader:
    generation = transformers.generation
    if "transformers.models.auto.auto_factory" in sys.modules or _CLASS in vars(generation):
        from transformers import AutoTokenizer

        return AutoTokenizer
    setattr(generation, _CLASS, _NotImported)
    try:
        from transformers import AutoTokenizer
    finally:
        delattr(generation, _CLASS)
    _import_when_called(sys.modules["transformers.models.auto.auto_factory"])
    return AutoTokenizer


def _import_when_called(factory: ModuleType) -> None:
    """Let the one function that reads GenerationMixin import it first."""
    function = getattr(factory, _READER)

    @functools.wraps(function)
    def call(model_class: type) -> type:
        setattr(factory, _CLASS, getattr(transformers.generation, _CLASS))
        return function(model_class)

    setattr(factory, _READER, call)
