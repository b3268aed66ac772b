"""Backend and device of every role: what is chosen, why, and how the start-up table and the log show it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from allocation import Allocation, AllocationError
from core import placement, quickstart
from core.checks import run_checks
from core.checks.rules import config_warnings, load_config
from core.config.parsing.problems import ConfigError
from core.placement import resolve_allocation
from helpers.config_inputs import fake_gpus, write_run
from rollout.inference.backend import Capabilities
from rollout.inference.mock import MockBackend
from rollout.inference.registry import BACKENDS, choose_transport

SFT = "experiment_name: s\ntrial_name: t\nmodel: {path: m}\ndataset: {train_path: d, train_bs_n_seqs: 8}\n"


@pytest.fixture(autouse=True)
def fresh_query(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The GPUs of this machine are looked up once a process, and no cluster is joined by accident."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    placement._num_gpus.cache_clear()
    yield
    placement._num_gpus.cache_clear()


def allocated(folder: Path, *overrides: str) -> Allocation:
    loaded = load_config("ppo-math", write_run(folder), overrides)
    assert run_checks(loaded) == []
    return resolve_allocation(loaded.config)


def sft(folder: Path, *overrides: str) -> Allocation:
    (folder / "sft.yaml").write_text(SFT)
    return resolve_allocation(load_config("sft", folder / "sft.yaml", overrides).config)


def refused(folder: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        load_config("ppo-math", write_run(folder), overrides)
    return str(error.value)


ONE_GPU = "0, GPU-aa, H, 4, 141000"
TWO_GPUS = (ONE_GPU, "1, GPU-bb, H, 4, 141000")
SERVERS = "allocation_mode=sglang.d1m1p1+d1m1p1"


@pytest.mark.parametrize(
    ("overrides", "generator", "trainer", "transport"),
    [
        (["allocation_mode=embedded.d1m1p1+d1m1p1"], "cpu", "cpu", "local"),
        (["allocation_mode=mock.d1m1p1+d1m1p1"], "cpu", "cpu", "local"),
        (["allocation_mode=mock.d1m1p1+d1m1p1", "launch.trainer_device=cuda"], "cpu", "cuda", "local"),
        (
            ["allocation_mode=embedded.d1m1p1", "n_gpus_per_node=1", "launch.trainer_device=cuda"],
            "cpu",
            "cuda",
            "local",
        ),
        ([SERVERS], "cuda", "cuda", "nccl"),
        ([SERVERS, "launch.trainer_device=cpu"], "cuda", "cpu", "disk"),
        ([SERVERS, "generator.device=cpu"], "cpu", "cpu", "nccl"),
        ([SERVERS, "actor.sglang.device=cpu"], "cpu", "cpu", "nccl"),
        ([SERVERS, "generator.device=cpu", "launch.trainer_device=cuda"], "cpu", "cuda", "disk"),
        (["allocation_mode=sglang.d1m1p1", "n_gpus_per_node=1"], "cuda", "cuda", "ipc"),
        (["allocation_mode=sglang.d1m1p1", "n_gpus_per_node=1", "launch.trainer_device=cpu"], "cuda", "cpu", "disk"),
    ],
)
def test_the_devices_of_generators_and_trainer_are_chosen_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], generator: str, trainer: str, transport: str
) -> None:
    """Each of them passes every check of a dry run."""
    fake_gpus(tmp_path, monkeypatch, *TWO_GPUS)
    allocation = allocated(tmp_path, *overrides)
    assert {name: role.device for name, role in allocation.roles.items()} == {
        name: generator if name == "actor_gen" else trainer for name in allocation.roles
    }
    assert choose_transport("auto", allocation).name == transport
    shared = len(allocation.generator.slots) + len(allocation.trainer.slots) > allocation.n_gpus_per_node
    assert allocation.shares_gpus == (shared and generator == trainer == "cuda")
    sides = {"cuda": set(allocation.generator.slots)} if generator == "cuda" else {"cuda": set()}
    assert set(allocation.gpu_slots) == sides["cuda"] | (set(allocation.trainer.slots) if trainer == "cuda" else set())


def test_only_the_gpus_that_a_role_computes_on_must_be_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpus(tmp_path, monkeypatch, ONE_GPU)
    allocated(tmp_path, SERVERS, "launch.trainer_device=cpu")
    loaded = load_config("ppo-math", write_run(tmp_path), [SERVERS])
    (problem,) = run_checks(loaded)
    assert "allocation_mode requires GPU 1, this machine has 1" in problem.message


@pytest.mark.parametrize(
    ("cards", "backend", "device", "why"),
    [
        (
            (),
            "embedded",
            "cpu",
            "no backend is named and this machine has no GPU: embedded; embedded generators run on ",
        ),
        ((ONE_GPU,), "sglang", "cuda", "no backend is named and this machine has 1 GPU: sglang; SGLang servers run on"),
    ],
)
def test_what_the_machine_decides_is_said_with_the_reason(tmp_path, monkeypatch, cards, backend, device, why) -> None:
    fake_gpus(tmp_path, monkeypatch, *(cards or (":",)))
    if not cards:
        monkeypatch.setattr(placement, "query_gpus", lambda: [])
    row = allocated(tmp_path, "allocation_mode=d1m1p1", "n_gpus_per_node=1").table()[0]
    assert (row.backend, row.device) == (backend, device) and row.why.startswith(why)
    trainer = sft(tmp_path).trainer
    assert (trainer.device, trainer.reason) == (device, why.split(" and ")[1].split(":")[0])


def test_a_run_of_several_nodes_is_not_taken_for_one_of_this_host(tmp_path, monkeypatch) -> None:
    """A recipe for a cluster, checked where there is no GPU: its trainer is not that of a CPU."""
    monkeypatch.setattr(placement, "query_gpus", lambda: [])
    several = ("n_nodes=2", "n_gpus_per_node=1", "allocation_mode=d2m1p1")
    assert sft(tmp_path, *several).trainer.on_gpu
    assert not sft(tmp_path, *several, "launch.trainer_device=cpu").trainer.on_gpu
    loaded = load_config("sft", tmp_path / "sft.yaml", [*several, "model.path=/none"])
    found = {problem.key: problem.of_host for problem in run_checks(loaded)}
    assert found["launch.ray_address"] and found["model.path"], "both are of other machines"


def test_a_backend_is_suggested_with_the_layout_that_needs_one(tmp_path: Path) -> None:
    joined = ["launch.ray_address=head:6379", "n_nodes=1", "n_gpus_per_node=8"]
    message = refused(tmp_path, *joined, "allocation_mode=d8m1p1")
    assert message.endswith("nearest: sglang.d8m1p1 or embedded.d8m1p1")
    mapped = ["actor_infer.device_mapping=[0,1,2,3]", "actor_train.device_mapping=[4,5,6,7]"]
    message = refused(tmp_path, *joined, *mapped)
    assert "actor_infer.layout: names no backend" in message, "the key is spelled as it was given"
    assert message.endswith("nearest: sglang.d4m1p1 or embedded.d4m1p1")


@pytest.mark.parametrize(
    "joined", ["launch.ray_address=head:6379", "external_configs.envs.RAY_ADDRESS=head:6379", "environment"]
)
def test_with_a_joined_cluster_the_gpus_of_this_machine_decide_nothing(tmp_path, monkeypatch, joined: str) -> None:
    monkeypatch.setattr(placement, "query_gpus", lambda: pytest.fail("looked at this machine"))
    overrides = [joined]
    if joined == "environment":
        monkeypatch.setenv("RAY_ADDRESS", "head:6379")
        overrides = []
    message = refused(tmp_path, "allocation_mode=d1m1p1", "n_gpus_per_node=1", *overrides)
    assert "allocation_mode: 'd1m1p1': names no backend for the generators, and the run joins a Ray cluster" in message
    assert "head:6379" in message and "sglang.d1m1p1 or embedded.d1m1p1" in message
    mapped = ["actor_gen.device_mapping=[0]", "actor_train.device_mapping=[1]"]
    assert "names no backend" in refused(tmp_path, *mapped, *overrides)
    assert allocated(tmp_path, "allocation_mode=mock.d1m1p1+d1m1p1", *overrides).trainer.device == "cpu"
    with pytest.raises((ConfigError, AllocationError), match=r"launch.trainer_device.*auto.*cuda or cpu"):
        sft(tmp_path, *overrides)
    assert sft(tmp_path, "launch.trainer_device=cuda", *overrides).trainer.on_gpu


def test_a_device_that_a_backend_cannot_run_on_is_refused(tmp_path: Path) -> None:
    message = refused(tmp_path, "allocation_mode=mock.d1m1p1+d1m1p1", "generator.device=cuda")
    assert "generator.device: 'cuda': mock generators run on cpu; nearest: auto" in message, message


@pytest.mark.parametrize("asked", ["nccl", "ipc"])
def test_memory_of_different_devices_is_not_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    fake_gpus(tmp_path, monkeypatch, *TWO_GPUS)
    message = refused(tmp_path, SERVERS, "launch.trainer_device=cpu", f"push.type={asked}")
    assert f"push.type: {asked} needs both sides on one kind of device" in message


def test_jobs_whose_generators_cannot_join_one_group_are_refused(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpus(tmp_path, monkeypatch, *TWO_GPUS)
    job = ("mode=explore", "experience.store=sqlite", "experience.path=e.db", "synchronizer.method=nccl")
    assert "nccl: the generators compute on cuda, the trainer on cpu; write folder" in refused(
        tmp_path, *job, SERVERS, "launch.trainer_device=cpu"
    )
    assert "nccl: servers and trainer share GPUs; write folder" in refused(
        tmp_path, *job, "allocation_mode=sglang.d2m1p1|d2m1p1"
    )


def test_training_on_gpus_has_the_numbers_of_gpus_whatever_samples(tmp_path, monkeypatch) -> None:
    fake_gpus(tmp_path, monkeypatch, *TWO_GPUS)
    allocated(tmp_path, "allocation_mode=mock.d1m1p1+d1m1p1", "launch.trainer_device=cuda", "actor.fp8=true")
    assert "fp8=true requires GPUs" in refused(tmp_path, SERVERS, "launch.trainer_device=cpu", "actor.fp8=true")


FP8 = "generator.weight_format=fp8_block"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["allocation_mode=mock.d1m1p1+d1m1p1"], "fp8_block needs SGLang servers on GPUs, the generator is mock"),
        ([SERVERS, "generator.device=cpu"], "fp8_block needs generators on GPUs, these compute on cpu; write auto"),
        ([SERVERS, "push.type=disk", "push.changes=always"], "push.changes: always, but with generator.weight_format"),
        (
            [SERVERS, "generator.dtype=float32"],
            "fp8_block needs bfloat16 for what is not quantized, got float32; write",
        ),
        ([SERVERS, "actor.sglang.quantization=fp8"], "actor.sglang.quantization: cannot be set: generator.weight_for"),
        ([SERVERS, "generator.flags.load-format=auto"], "generator.flags.load-format: cannot be set: generator.weight"),
    ],
)
def test_fp8_generators_are_refused_where_the_format_or_its_weights_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], message: str
) -> None:
    fake_gpus(tmp_path, monkeypatch, *TWO_GPUS)
    assert message in refused(tmp_path, FP8, *overrides)
    load_config("ppo-math", write_run(tmp_path), overrides)  # without FP8 nothing of this is refused


def test_fp8_generators_of_a_model_that_blocks_do_not_divide_are_refused_with_the_size(tmp_path, monkeypatch) -> None:
    fake_gpus(tmp_path, monkeypatch, *TWO_GPUS)

    def found(*overrides: str) -> str:
        loaded = load_config("ppo-math", write_run(tmp_path), [SERVERS, *overrides])
        return "\n".join(map(str, run_checks(loaded)))

    assert "generator.weight_format: fp8_block needs sizes divisible by 128" in found(FP8)
    assert "fp8_block" not in found()


@pytest.mark.parametrize(
    ("correction", "warned"), [("none", True), ("bypass", True), ("decoupled", False), ("tis", False)]
)
def test_fp8_generators_without_an_importance_weight_are_warned_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, correction: str, warned: bool
) -> None:
    fake_gpus(tmp_path, monkeypatch, *TWO_GPUS)
    words = [SERVERS, f"algorithm.correction={correction}"]
    for chosen, expected in (([*words, FP8], warned), (words, False)):
        config = load_config("ppo-math", write_run(tmp_path), chosen).config
        assert any("write algorithm.correction=tis" in text for text in config_warnings(config)) is expected


def test_fp8_weights_that_nothing_compares_are_warned_about(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpus(tmp_path, monkeypatch, *TWO_GPUS)
    for words, expected in (([FP8, "push.verify=never"], True), (["push.verify=never"], False), ([FP8], False)):
        config = load_config("ppo-math", write_run(tmp_path), [SERVERS, *words]).config
        assert any("write push.verify=first" in text for text in config_warnings(config)) is expected


def test_table_and_log_of_a_dry_run_show_backend_device_and_reason(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    path = write_run(tmp_path)
    words = ["ppo-math", "--config", str(path), "--dry-run", SERVERS, "generator.device=cpu"]
    assert quickstart.main(words) == 0
    shown = capsys.readouterr().out
    head = next(line for line in shown.splitlines() if line.startswith("┃ role"))
    assert [cell.strip() for cell in head.strip("┃ ").split("┃")][:4] == ["role", "backend", "layout", "device"]
    row = next(line for line in shown.splitlines() if line.startswith("│ actor_gen"))
    assert [cell.strip() for cell in row.strip("│ ").split("│")][:4] == ["actor_gen", "sglang", "d1m1p1", "cpu"]
    assert "quickstart INFO: actor_gen: sglang on cpu (generator.device=cpu)" in shown
    assert (
        "INFO: actor_train, actor_inf: megatron on cpu (launch.trainer_device=auto: where the generators compute)"
        in shown
    )


class Narrow(MockBackend):
    """A backend that can do less than any that there is."""

    label = "narrow generator"
    capabilities = Capabilities(devices=("cuda",), transports=("disk",), weight_formats=("float32",))


def test_another_backend_is_checked_by_its_capabilities_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpus(tmp_path, monkeypatch, *TWO_GPUS)
    monkeypatch.setitem(BACKENDS, "mock", Narrow())
    apart = ["allocation_mode=mock.d1m1p1+d1m1p1", "actor.bf16=false"]
    allocation = allocated(tmp_path, *apart)
    assert (allocation.generator.device, choose_transport("auto", allocation).name) == ("cuda", "disk")
    assert "narrow generators hold weights in float32, not in bfloat16" in refused(tmp_path, apart[0])
    shared = ["allocation_mode=mock.d1m1p1", "n_gpus_per_node=1", "actor.bf16=false"]
    assert "narrow generators cannot leave the GPUs to the trainer" in refused(tmp_path, *shared)
    assert "nccl transfers weights to SGLang servers; with narrow generators use disk" in refused(
        tmp_path, *apart, "push.type=nccl"
    )
