"""The endpoint writes the tokens that the package `renderers` writes, for the models that both know.

Templates are those that trl ships, and NAME.jinja in the folder $SLIPSTREAM_TEMPLATES for other names of renderers. The
tokenizer has the family's marks and merges that were learnt from texts like those of the conversations, so that texts
which are cut elsewhere have other tokens.
"""

import importlib.util
import json
import os
import random
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("renderers", reason="needs renderers and the templates of trl")
if importlib.util.find_spec("trl") is None:
    pytest.skip("needs the templates of trl", allow_module_level=True)

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rollout.data.encoder import Encoder, PromptFormat
from rollout.sessions.bridge import Bridge

FAMILIES = {
    "qwen3": ("qwen3", 3), "qwen3-vl": ("qwen3_vl", 3), "qwen3.5": ("qwen3_5_think", 3), "qwen3.6": ("qwen3_6", 3),
    "qwen3.8": ("qwen3_8", 3), "glm-4.5": ("glm4moe", 3), "nemotron-3": ("nemotron_3_nano", 3),
    "nemotron-3-ultra": ("nemotron_3_ultra", 3), "nemotron-3.5": ("nemotron_3_5_lightning", 3),
    "llama-3": ("llama3_2", 1), "gemma4": ("gemma4_v5", 0), "deepseek-r1": ("deepseekv3", 0),
}  # fmt: skip
"""Name in renderers: template in trl, and calls of tools in one answer. The endpoint knows no calls of Gemma, and after
results of tools trl's template of R1 opens no thoughts, which renderers does."""
_FOLDER = os.environ.get("SLIPSTREAM_TEMPLATES")
FAMILIES |= {
    path.stem: (str(path), 0 if path.stem in ("deepseek-v3", "kimi-k2.5") else 3)
    for path in sorted(Path(_FOLDER or "/dev/null").glob("*.jinja"))
}
"""Template of DeepSeek-V3: no calls beside a text. Kimi-K2.5: code of the model's folder writes the tools."""
_APART = ("kimi-k2", "laguna-xs.2")
"""Where renderers tokenises contents apart from the blanks before them, which differs where they begin with blanks."""
TEXTS = (
    "Hi.", "What is 2 + 2?", "  two  ", "ünïcödé 漢字 🎉", "line\n\nline\n", "\n\nfirst", "0", "a <b> c",
    '{"a": [1, 2]}', "def f(x):\n    return x", "Say it again, please.", "1,000.5",
)  # fmt: skip
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "A tool.",
            "parameters": {
                "type": "object",
                "properties": {"text": {"type": "string"}, "count": {"type": "integer"}},
                "required": ["text"],
            },
        },
    }
    for name in ("search", "get_weather")
]


def trl_template(name: str) -> str:
    """Return a template of trl, which is not imported."""
    spec = importlib.util.find_spec("trl")
    assert spec is not None
    [folder] = spec.submodule_search_locations or ()
    return Path(folder, "chat_templates", f"{name}.jinja").read_text(encoding="utf-8")


@dataclass(frozen=True)
class Family:
    """A family on both sides."""

    renderer: Any
    bridge: Bridge
    tokenizer: Any


class _Recorder:
    """A tokenizer that learns which marks a renderer asks for."""

    name_or_path, unk_token_id, eos_token_id, chat_template = "", None, 0, ""

    def __init__(self) -> None:
        self.marks: list[str] = []

    def convert_tokens_to_ids(self, token: str) -> int:
        self.marks.append(token)
        return len(self.marks)

    def encode(self, text: str, **ignored: object) -> list[int]:
        self.marks.append(text)
        return [len(self.marks)]


@cache
def family(name: str) -> Family:
    import renderers

    found = FAMILIES[name][0]
    template = Path(found).read_text(encoding="utf-8") if found.endswith(".jinja") else trl_template(found)
    recorder = _Recorder()
    config = renderers.config_from_name(name)
    config = type(config)(thinking_retention="all")  # of earlier turns, as sampled
    ends = renderers.create_renderer(recorder, config).get_stop_token_ids()
    marks = list(dict.fromkeys(recorder.marks))
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator([*TEXTS * 3, template], trainer)
    backend.add_special_tokens(marks)
    begin = next((mark for mark in marks if "bos" in mark or "begin" in mark), None)
    end = recorder.marks[ends[0] - 1]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=begin, eos_token=end, chat_template=template
    )
    renderer = renderers.create_renderer(tokenizer, config)
    with tempfile.TemporaryDirectory() as folder:
        ends = {"eos_token_id": renderer.get_stop_token_ids()}
        Path(folder, "generation_config.json").write_text(json.dumps(ends), encoding="utf-8")
        date = {"chat_options": {"date_string": config.date_string}} if hasattr(config, "date_string") else {}
        return Family(renderer, Bridge(Encoder(tokenizer, PromptFormat(**date), folder=folder)), tokenizer)


def check_conversation(name: str, seed: int) -> int:
    """Compare prompt and what follows each answer; return the number of answers."""
    model, rng, most_calls = family(name), random.Random(f"{name} {seed}"), FAMILIES[name][1]
    tools = rng.sample(TOOLS, rng.randint(1, 2)) if most_calls and rng.random() < 0.5 else None
    if tools and name == "kimi-k2":  # whose own code sorts them
        tools = json.loads(json.dumps(tools, sort_keys=True))
    messages = [{"role": "system", "content": _text(rng, name)}] if rng.random() < 0.4 else []
    messages.append({"role": "user", "content": _text(rng, name)})
    offered = tuple(tools) if tools else None
    ids = model.bridge.prompt(tuple(messages), offered)
    theirs = model.renderer.render_ids(messages, tools=tools, add_generation_prompt=True)
    assert ids == theirs, _differs(model, name, seed, messages, ids, theirs)
    for turn in range(rng.randint(1, 4)):
        calls = _calls(rng, tools, turn, most_calls, name) if tools and rng.random() < 0.6 else []
        answer = {"role": "assistant", "content": _text(rng, name), **({"tool_calls": calls} if calls else {})}
        said, end = answer["content"], model.renderer.get_stop_token_ids()[0]
        is_cut = rng.random() < 0.2  # by the limit of tokens
        if name.startswith("glm-"):  # the mark of the next turn ends it; renderers writes another one where it is cut
            is_cut = False
            end = model.tokenizer.convert_tokens_to_ids("<|observation|>" if calls else "<|user|>")
        if name == "laguna-xs.2":  # renderers leaves out the template's line break after an answer that is not cut
            is_cut = True
        if name == "glm-4.5":
            said = f"\n<think>Hm.</think>\n{said}"
        elif not model.tokenizer.decode(ids).rpartition("<think>")[2].strip():
            said = f"Hm.\n</think>\n\n{said}"
        sampled = model.tokenizer.encode(said, add_special_tokens=False) + ([] if is_cut else [end])
        new = [_result(rng, call, name) for call in calls] or [{"role": "user", "content": _text(rng, name)}]
        added = model.bridge.following(answer, sampled, tuple(new), offered)
        theirs = model.renderer.bridge_to_next_turn(ids, sampled, new, tools=tools)
        both = [*ids, *sampled, *added]
        assert theirs is not None, (
            f"refused {model.tokenizer.decode(ids[-5:])!r} {model.tokenizer.decode(sampled)!r} {new}"
        )
        assert both == theirs.token_ids, _differs(model, name, seed, [answer, *new], both, theirs.token_ids)
        ids = both
    return turn + 1


def _text(rng: random.Random, name: str) -> str:
    text = "".join(rng.choices(TEXTS, k=rng.choice((1, 1, 2, 4))))
    return text.lstrip() if name in _APART else text


def _calls(rng: random.Random, tools: list[Any], turn: int, most: int, family: str) -> list[dict[str, Any]]:
    return [
        {
            "id": f"call{turn:04}{i}",
            "type": "function",
            "function": {
                "name": rng.choice(tools)["function"]["name"],
                "arguments": {"text": _text(rng, family), "count": rng.randint(0, 99)},
            },
        }
        for i in range(rng.randint(1, most))
    ]


def _result(rng: random.Random, call: dict[str, Any], family: str) -> dict[str, Any]:
    name = call["function"]["name"]
    return {"role": "tool", "tool_call_id": call["id"], "name": name, "content": _text(rng, family)}


def _differs(model: Family, name: str, seed: int, messages: list[Any], own: list[int], theirs: list[int]) -> str:
    at = next((i for i, (a, b) in enumerate(zip(own, theirs, strict=False)) if a != b), min(len(own), len(theirs)))
    shown = [model.tokenizer.decode(ids[max(0, at - 12) : at + 12]) for ids in (own, theirs)]
    return f"{name}, seed {seed}: endpoint {shown[0]!r}, renderers {shown[1]!r}; {messages}"


@pytest.mark.parametrize("name", FAMILIES)
def test_conversations_have_the_tokens_of_renderers(name: str) -> None:
    assert sum(check_conversation(name, seed) for seed in range(12)) > 12


@pytest.mark.nightly
@pytest.mark.timeout(7200)
def test_a_hundred_thousand_conversations_have_the_tokens_of_renderers() -> None:
    for seed in range(100_000):
        check_conversation(sorted(FAMILIES)[seed % len(FAMILIES)], seed)
