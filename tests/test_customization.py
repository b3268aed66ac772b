"""The files of docs/customization.md, written to an empty folder: each does what the page says of it."""

import asyncio
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import model_specs.families
from allocation import GENERATOR_BACKENDS
from core.algorithms.build import build_algorithm, check_algorithm
from core.checks import run_checks
from core.checks.rules import load_config, unused_keys
from core.config.experiments import PPOMATHConfig
from core.data.rollout_batch import RolloutBatch
from helpers.batches import batch_of, by_answer
from helpers.tiny_models import SHAPE
from mcore_adapter.data.batch import ModelOutput, Sequences, sequence_of_token, weigh_tokens
from model_specs.families import parse_config
from model_specs.tensors import hf_shapes
from model_specs.untrusted import ModelConfigError
from rollout.data.rows import scan_rows
from rollout.inference.backend import BackendSettings
from rollout.inference.mock import MockGenerator
from rollout.inference.registry import BACKENDS
from rollout.plugins import load_plugin
from rollout.rewards.pool import RewardPool
from rollout.types import GenerateRequest, Prompt, SamplingParams
from rollout.workflows import make_workflow
from tools.demo.data import make_tokenizer

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "customization.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"^`([\w/.]+)`[^\n]*:\n\n```\w+\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))
"""Path -> content of every code block."""
PROMPT = Prompt(
    query_id="q", index=0, task="math", text="47", token_ids=np.array([6, 9], np.int32), solutions=("\\boxed{47}",)
)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model and data, written by the page's own command."""
    folder = tmp_path_factory.mktemp("page")
    [(module, words)] = re.findall(r"^    python -m (tools\S+) ([^#\n]+)", PAGE, re.MULTILINE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "argv", [module, *words.split()])
        importlib.import_module(module).main()
    return folder / "demo"


@pytest.fixture
def folder(tmp_path: Path, demo: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder of a user who has copied every file of the page that stays outside the repository."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("my_reward", "my_algorithm", "my_average", "my_sequence_ratio", "my_workflow"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    for path, text in FILES.items():
        if "/" not in path:
            (tmp_path / path).write_text(text)
    (tmp_path / "demo").symlink_to(demo)
    return tmp_path


def checked(file: str, overrides: Sequence[str] = ()) -> PPOMATHConfig:
    loaded = load_config("ppo-math", Path(file), list(overrides))
    assert [str(problem) for problem in run_checks(loaded)] == []
    assert isinstance(loaded.config, PPOMATHConfig)
    return loaded.config


def test_every_code_block_of_the_page_is_a_named_file_and_every_command_starts_something() -> None:
    assert len(FILES) == PAGE.count("\n```") / 2
    commands = re.findall(r"^    (?:slipstream|python -m) .*", PAGE, re.MULTILINE)
    assert len(commands) == 10


def test_what_a_user_writes_outside_the_repository_imports_the_public_package_alone() -> None:
    for path, text in FILES.items():
        if path.endswith(".py") and "/" not in path:
            of_project = re.findall(
                r"^from ((?:slipstream|core|rollout|mcore_adapter|tools)\S*) import", text, re.MULTILINE
            )
            assert of_project == ["slipstream"], path


def test_the_commands_of_the_page_load_and_pass_every_check(folder: Path) -> None:
    """Those of a backend and a family need files in the repository; the tests below add them."""
    commands = re.findall(r"--config (\w+\.yaml) ?([^\n#]*)", PAGE)
    own = [(file, words.split()) for file, words in commands if "allocation_mode" not in words and "/path" not in words]
    assert len(own) == 7
    for file, overrides in own:
        checked(file, overrides)


def test_the_reward_scores_a_completion_in_a_worker(folder: Path) -> None:
    async def score() -> list[float]:
        async with RewardPool("my_reward:share_of_sevens", num_workers=1) as pool:
            return await pool.score_many(PROMPT, ["7171", "", "11"])

    assert asyncio.run(score()) == [0.5, 0.0, 0.0]
    assert load_plugin("my_reward:share_of_sevens", kind="reward", arguments=("prompt", "text"))(PROMPT, "77") == 1.0


def test_the_algorithm_computes_the_advantages_and_the_loss_of_its_formula(folder: Path) -> None:
    config = checked("algorithm.yaml")
    assert list(check_algorithm(config)) == [] and list(unused_keys(config)) == []
    algorithm = build_algorithm(config)
    assert algorithm.passes == frozenset() and algorithm.critic is None
    batch, fields = batch_of([1.0, 0.0], [0.5, 0.5])
    trained, metrics = algorithm.advantages(batch, fields)
    assert by_answer(batch, trained["advantages"]) == [[1.0, 1.0], [-1.0, -1.0], [0.0, 0.0], [0.0, 0.0]]
    assert metrics["task_reward"] == 0.5
    logprobs = torch.linspace(-3.0, -1.0, len(fields["loss_mask"]), requires_grad=True)
    weights = fields["loss_mask"].float()
    output = ModelOutput(logprobs=logprobs)
    sequences = Sequences(of_token=torch.arange(4).repeat_interleave(3), count=4)
    loss, _ = algorithm.loss(output, {**fields, **trained, "token_weights": weights}, sequences)
    loss.backward()
    assert logprobs.grad is not None
    assert torch.equal(logprobs.grad, -trained["advantages"] * weights)


def test_the_moving_average_continues_from_its_state(folder: Path) -> None:
    [words] = re.findall(r"--config run.yaml (.*MovingAverage.*)", PAGE)
    first, second = (build_algorithm(checked("run.yaml", words.split())) for _ in range(2))
    batch, fields = batch_of([1.0, 0.5], [0.0, 0.5])
    trained, _ = first.advantages(batch, fields)
    assert by_answer(batch, trained["advantages"]) == [[1.0, 1.0], [0.5, 0.5], [0.0, 0.0], [0.5, 0.5]]
    state = json.loads(json.dumps(first.state_dict()))
    assert state["average"] == pytest.approx(0.05) and len(state) > 1
    second.load_state_dict(state | {"steps": 7})
    assert second.state_dict()["steps"] == 7, "the state of the base class continues too"
    trained, _ = second.advantages(batch, fields)
    assert by_answer(batch, trained["advantages"])[0] == pytest.approx([0.95, 0.95])


def test_with_a_reference_the_algorithm_subtracts_the_kl_divergence(folder: Path) -> None:
    algorithm = build_algorithm(checked("algorithm.yaml", ["ppo.kl_ctl=0.5"]))
    assert algorithm.passes == {"old_logprobs", "ref_logprobs"}
    batch, fields = batch_of([1.0, 0.0])
    passes = {"old_logprobs": torch.zeros(6), "ref_logprobs": torch.tensor([0.0, 0, 0, 0, -1.0, -1.0])}
    trained, _ = algorithm.advantages(batch, {**fields, **passes})
    # The second answer loses 2 tokens x 0.5 x 1 nat: scores 1 and -1, mean 0, scale 2.
    assert by_answer(batch, trained["advantages"]) == [[2.0, 2.0], [-2.0, -2.0]]


def test_the_sequence_ratio_has_the_gradient_of_gspo(folder: Path) -> None:
    """With a ratio inside the range: -A r / L of each trained token, divided by the number of sequences."""
    algorithm = build_algorithm(checked("run.yaml", ["algorithm.name=my_sequence_ratio:SequenceRatio"]))
    assert algorithm.passes == {"old_logprobs"} and algorithm.unit == "group" and not algorithm.weighs_alike
    batch, fields = batch_of([1.0, 0.0], lens=[3, 1])
    passes = {"old_logprobs": torch.full((len(fields["loss_mask"]),), -1.0)}
    trained, _ = algorithm.advantages(batch, {**fields, **passes})
    weighted, divisors = weigh_tokens(batch.to_packed(), algorithm.token_weights)
    assert divisors.loss == pytest.approx(2.0)
    weights = weighted.fields["token_weights"]
    output = ModelOutput(logprobs=torch.full_like(passes["old_logprobs"], -0.9999).requires_grad_())
    sequences = Sequences(of_token=sequence_of_token(weighted.seq_lens), count=2)
    loss, _ = algorithm.loss(output, {**fields, **passes, **trained, "token_weights": weights}, sequences)
    loss.backward()
    assert output.logprobs is not None and output.logprobs.grad is not None
    expected = -trained["advantages"] * weights * torch.tensor(1e-4).exp()
    assert expected.count_nonzero() == 4
    torch.testing.assert_close(output.logprobs.grad, expected)


@pytest.mark.parametrize("kind", [RolloutBatch, ModelOutput])
def test_the_attributes_that_the_page_describes_exist(kind: type) -> None:
    section = PAGE.partition(f"`slipstream.{kind.__name__}`")[2].partition("\n\n`")[0]
    described = re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)
    assert len(described) >= 3 and all(name in dir(kind) or name in kind.__dataclass_fields__ for name in described)


class EndsOf(MockGenerator):
    """A mock generator that keeps the requests."""

    def __init__(self, model: str) -> None:
        super().__init__(model)
        self.requests: list[GenerateRequest] = []

    async def generate(self, request: GenerateRequest) -> Any:
        self.requests.append(request)
        return await super().generate(request)


class Pool:
    """A reward pool without processes: the length of each text."""

    async def score_many(self, prompt: Prompt, texts: Sequence[str]) -> list[float]:
        return [float(len(text)) for text in texts]


def test_the_workflow_samples_two_answers_and_trains_both(folder: Path) -> None:
    tokenizer, generator = make_tokenizer(), EndsOf("demo/model")
    workflow = make_workflow(
        "my_workflow:SecondAttempt",
        tokenizer=tokenizer,
        reward_pool=Pool(),
        sampling=SamplingParams(max_new_tokens=3, min_new_tokens=3),
        group_size=2,
        seed=1,
    )
    group = asyncio.run(workflow.run(PROMPT, generator))
    [between] = tokenizer.encode("=", add_special_tokens=False)
    assert len(group) == 2 and len({r.request_id for r in generator.requests}) == 4
    assert len({r.seed for r in generator.requests}) == 4
    for trajectory in group:
        assert trajectory.loss_mask.tolist() == [False] * 2 + [True] * 3 + [False] + [True] * 3
        assert trajectory.token_ids[5] == between and trajectory.token_ids.tolist()[:2] == [6, 9]
        assert trajectory.versions.tolist() == [-1, -1, 0, 0, 0, -1, 0, 0, 0]
        assert (trajectory.rollout_logprobs != 0).tolist() == trajectory.loss_mask.tolist()
        assert any(list(r.prompt_ids) == trajectory.token_ids[:6].tolist() for r in generator.requests)
        last = tokenizer.decode(trajectory.token_ids[6:], skip_special_tokens=True)
        assert (trajectory.reward, trajectory.metrics) == (len(last), {"num_tokens": 9})
    again = asyncio.run(workflow.run(PROMPT, generator))
    assert [t.token_ids.tolist() for t in again] == [t.token_ids.tolist() for t in group]
    assert len({r.request_id for r in generator.requests}) == 8


def write_modules(package: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the files of the page below `package` on its path; they stay outside the repository."""
    prefix = package.replace(".", "/") + "/"
    for name, text in FILES.items():
        if name.startswith(prefix):
            file = path / name.removeprefix(prefix)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
            monkeypatch.delitem(sys.modules, name.removesuffix(".py").replace("/", "."), raising=False)
    module = importlib.import_module(package)
    monkeypatch.setattr(module, "__path__", [*module.__path__, str(path)])


def test_the_backend_starts_and_samples(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_modules("rollout.inference", folder / "backend", monkeypatch)
    backend = importlib.import_module("rollout.inference.repeat").RepeatBackend()
    assert list(backend.refused_flags({"seed": 1})) == [("seed", "the repeating generator has no flags")]

    async def sample() -> Any:
        settings = BackendSettings(model_path="demo/model", dtype="float32", device="cpu")
        replica = await backend.start(settings)
        await replica.pause()
        await replica.resume(3)
        sampling = SamplingParams(max_new_tokens=2)
        replica.submit([GenerateRequest(request_id="a", prompt_ids=[5, 6, 7], sampling=sampling)])
        return await replica.drain()

    [(name, completion)] = asyncio.run(sample())
    assert (name, completion.token_ids.tolist(), completion.versions.tolist()) == ("a", [5, 6], [3, 3])


@pytest.fixture
def in_copy(tmp_path: Path, demo: Path) -> Callable[..., str]:
    """(module, words) -> what it prints in a copy of the repository with the backend, as the page describes it: a
    folder and an entry each in two files."""
    packages = ("allocation", "config_schema", "core", "mcore_adapter", "model_specs", "rollout", "tracing")
    for package in packages:
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    backend = tmp_path / "rollout" / "inference" / "repeat"
    backend.mkdir()
    for name in ("__init__.py", "generator.py"):
        (backend / name).write_text(FILES[f"rollout/inference/repeat/{name}"])
    layout, registry = tmp_path / "allocation" / "layout.py", backend.parent / "registry.py"
    layout.write_text(layout.read_text().replace('"embedded", "mock"', '"embedded", "mock", "repeat"'))
    entry = "from rollout.inference.repeat import RepeatBackend\n"
    found = registry.read_text().replace('    "mock": ', '    "repeat": RepeatBackend(),\n    "mock": ')
    registry.write_text(found.replace("from rollout.inference.sglang", f"{entry}from rollout.inference.sglang"))
    (tmp_path / "demo").symlink_to(demo)
    (tmp_path / "run.yaml").write_text(FILES["run.yaml"])
    env = os.environ | {"PYTHONPATH": str(tmp_path), "HOME": str(tmp_path), "MYPYPATH": str(tmp_path)}

    def run(*words: str) -> str:
        done = subprocess.run([sys.executable, "-m", *words], cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


@pytest.mark.nightly
def test_the_backend_is_typed(in_copy: Callable[..., str]) -> None:
    checked = ("rollout.inference.repeat", "rollout.inference.registry", "rollout.inference.repeat.generator")
    in_copy("mypy", "--follow-imports=silent", *(word for module in checked for word in ("-m", module)))


def test_the_backend_passes_a_dry_run(in_copy: Callable[..., str]) -> None:
    [words] = re.findall(r"^    python -m core.quickstart (.*repeat.*)$", PAGE, re.MULTILINE)
    shown = in_copy("core.quickstart", *words.split(), "--dry-run")
    assert "repeat on cpu" in shown and "Dry run: every check passed" in shown


def test_a_backend_and_a_family_are_entered_where_the_page_says() -> None:
    entered = set(re.findall(r"`(\w+)`[^`]{1,60}\(`([\w/]+\.py)`", PAGE))
    assert {("BACKENDS", "rollout/inference/registry.py"), ("Backend", "allocation/layout.py")} <= entered
    for name, path in entered:
        module = importlib.import_module(path.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
        assert hasattr(module, name), f"{path} has no {name}"
    assert set(GENERATOR_BACKENDS) == set(BACKENDS)


def test_the_family_reads_a_config_and_has_the_tensors_of_transformers(folder: Path, monkeypatch) -> None:
    from transformers import SeedOssConfig, SeedOssForCausalLM

    write_modules("model_specs.families", folder / "specs", monkeypatch)
    spec = importlib.import_module("model_specs.families.seed_oss").SEED_OSS
    monkeypatch.setitem(model_specs.families.FAMILIES, "seed_oss", spec)  # type: ignore[arg-type]
    for bias in (True, False):
        hf = SeedOssConfig(**SHAPE, attention_bias=bias, head_dim=16, tie_word_embeddings=False)
        config = parse_config(hf.to_dict())
        assert (config.qkv_bias, config.head_dim, config.tied) == (bias, 16, False)
        with torch.device("meta"):
            expected = {name: tuple(t.shape) for name, t in SeedOssForCausalLM(hf).state_dict().items()}
        assert hf_shapes(config, is_critic=False) == expected
    with pytest.raises(ModelConfigError, match="attention_out_bias=True is not supported"):
        parse_config({**hf.to_dict(), "attention_out_bias": True})


def test_the_readmes_script_loads_with_its_own_reward(tmp_path: Path, demo: Path) -> None:
    """The script itself runs, in a process of its own; only training is replaced by loading and checking."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    [script] = re.findall(r"^```python\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    shutil.copytree(demo / "model", tmp_path / "model")
    long_context = json.loads((tmp_path / "model" / "config.json").read_text()) | {"max_position_embeddings": 2048}
    (tmp_path / "model" / "config.json").write_text(json.dumps(long_context))
    script = script.replace("slipstream.train(", "slipstream.load_config(").replace("/path/to/model", "model")
    script = script.replace("run.model, run.samples()[-1].answer", "run.reward.function, run.algorithm.name")
    script = script.replace('    run.plot("reward.png")\n', "")
    (tmp_path / "train.py").write_text(script)
    [row] = re.findall(r"`(\{\"prompt\": .*?\})`", readme)
    (tmp_path / "prompts.jsonl").write_text(f"{row}\n" * 64)
    env = os.environ | {
        "PYTHONPATH": str(ROOT),
        "HOME": str(tmp_path),
        "XDG_STATE_HOME": str(tmp_path / "state"),
    }  # without the runs of whoever tests
    done = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert re.fullmatch(r"exact_[0-9a-f]{12}:exact grpo\n", done.stdout), done.stderr


def test_the_reward_of_the_readme_finds_the_answer_of_its_row(tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (row,) = re.findall(r"`(\{\"prompt\": [^`]*\})`", readme)
    (script,) = re.findall(r"^```python\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    (tmp_path / "prompts.jsonl").write_text(row + "\n")
    (read,) = scan_rows(tmp_path / "prompts.jsonl")
    defined: dict[str, Any] = {"__name__": "train"}
    exec(script, defined)
    prompt = Prompt(
        query_id="q", index=0, task="math", text=read.prompt, token_ids=np.array([6]), solutions=read.solutions
    )
    assert prompt.answers == ("46",)
    assert (defined["exact"](prompt, " 46\n"), defined["exact"](prompt, "47")) == (1.0, 0.0)
