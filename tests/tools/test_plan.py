"""`slipstream plan`, as a user calls it."""

import contextlib
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from core.checks.rules import load_config
from core.planning.memory import plan_memory
from core.planning.rates import FOLDER, calibration_of, write_calibration
from core.planning.scene import find_gpu, scene_of
from helpers.plan_recipe import write_recipe
from tools.bench import SHAPES, SLICE
from tools.plan import main, memory_table, show


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return write_recipe(tmp_path, SHAPES["7B"])


def test_the_plan_needs_neither_torch_nor_ray(recipe: Path) -> None:
    program = (
        "import sys; from tools.plan import main; code = main(sys.argv[1:]); "
        "heavy = {'torch', 'ray', 'megatron', 'transformers'} & set(sys.modules); "
        "print(heavy or 'light', file=sys.stderr); sys.exit(code)"
    )
    words = [sys.executable, "-c", program, "--config", str(recipe), "--gpu", "H100"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert (done.returncode, done.stderr.strip()) == (0, "light"), done.stderr
    assert "actor update" in done.stdout and "It fits" in done.stdout


@pytest.mark.parametrize("mode", ["heuristic", "d16m1p1"])
def test_a_plan_for_a_gpu_computes_there_where_no_backend_is_named(mode: str, recipe: Path, capsys) -> None:
    words = ["--config", str(recipe), "--gpu", "H100", f"allocation_mode={mode}"]
    main(words)
    assert "in GiB (H100, 79.1 GiB)" in capsys.readouterr().out
    recipe.write_text(f"{recipe.read_text()}launch: {{trainer_device: cpu}}\n")
    main(words)
    assert "in GiB (CPU" in capsys.readouterr().out


def test_json_has_what_the_table_has(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config", str(recipe), "--gpu", "H100", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    phase = plan["ranks"][0]["phases"][0]
    assert plan["fits"] and phase["name"] == "actor update"
    parts = phase["parts"]
    assert phase["total"] == pytest.approx(sum(parts.values()), abs=99)
    assert phase["total"] - phase["allocated"] == pytest.approx(
        parts["allocator slack"] + parts["context"] + parts["NCCL"], abs=99
    )
    assert main([str(recipe), "--gpu", "H100"]) == 0
    assert f" {phase['allocated'] / 2**30:.1f} " in capsys.readouterr().out


CRITIC = ("ppo.kl_ctl=0.1", "ppo.disable_value=false", "critic.init_critic_from_actor=true", "algorithm.name=ppo")


@pytest.mark.parametrize(
    "words",
    [
        ("actor.fp8=true", "actor.grad_reduce_in_fp32=false"),
        ("allocation_mode=sglang.d8m1p1|d4m1p2", "n_nodes=1", "actor.optimizer.offload=true", *CRITIC),
        ("actor.gradient_checkpointing=auto", "actor_train.mb_spec.max_tokens_per_mb=131072"),
        ("allocation_mode=embedded.d1m1p1+d1m1p1", "n_nodes=1", "n_gpus_per_node=2"),
    ],
)
def test_the_columns_of_the_table_add_up(words: tuple[str, ...], recipe: Path, capsys) -> None:
    gpu = replace(find_gpu("H100"), host_bytes=2000 * 2**30)
    scene = scene_of(load_config("ppo-math", recipe, words).config, gpu)
    plan = plan_memory(scene)
    arriving = [replace(phase, parts={**phase.parts, "from the host": 2.0**30}) for phase in plan.ranks[0].phases]
    plan = replace(plan, ranks=(replace(plan.ranks[0], phases=tuple(arriving)), *plan.ranks[1:]))
    phases = [phase for rank in plan.ranks for phase in rank.phases]
    columns = {str(column.header): list(column.cells) for column in memory_table(plan, "Memory").columns}
    rows = [i for i, name in enumerate(columns["phase"]) if not str(name).startswith("stage ")]
    assert len(rows) == len(phases)
    names = list(columns)[1:]
    first = names.index("peak")
    for i, phase in zip(rows, phases, strict=True):
        sizes = [float(str(columns[name][i]) or 0) for name in names]
        assert sizes[first] == pytest.approx(sum(sizes[:first])) == pytest.approx(phase.allocated / 2**30, abs=0.051)
        assert sizes[-1] == pytest.approx(phase.total / 2**30, abs=0.051)
        if names[-1] == "total":
            assert sizes[-1] == pytest.approx(sum(sizes[first:-1]))
    show(scene, plan, Console(width=200))
    shown = capsys.readouterr().out.splitlines()
    legend = shown[shown.index(next(line for line in shown if line.startswith("peak, their sum"))) :]
    assert legend[1].startswith("total: ") == (names[-1] == "total") and max(map(len, legend[:2])) < 81


def test_host_memory_of_a_node_is_compared_with_what_it_has(recipe: Path, capsys) -> None:
    words = ["--config", str(recipe), "--gpu", "H200"]
    assert main([*words, "--json"]) == 0
    host = json.loads(capsys.readouterr().out)["host"]
    assert host["limit"] is None and host["bytes"] == sum(host["parts"].values())
    needs = host["bytes"] / 2**30
    assert main([*words, "--host-gib", f"{needs + 1:.1f}"]) == 0
    assert f"about: {needs:.1f} of {needs + 1:.1f} GiB" in capsys.readouterr().out
    assert main([*words, "--host-gib", f"{needs - 20:.1f}"]) == 1
    shown = capsys.readouterr().out
    assert "It does not fit: 20 GiB of host memory are missing" in shown
    assert "\n  recover_mode=disabled: " in shown


def test_a_search_proposes_nothing_that_a_host_does_not_hold(recipe: Path, capsys) -> None:
    words = ["--config", str(recipe), "--gpu", "H100", "--search", "--gpus", "8", "dataset.train_bs_n_seqs=16"]
    assert main([*words, "--json"]) == 0
    free = [found["host_bytes"] for found in json.loads(capsys.readouterr().out)]
    limit = min(free) + (max(free) - min(free)) / 2
    assert main([*words, "--json", "--host-gib", f"{limit / 2**30}"]) == 0
    assert max(free) > limit >= max(found["host_bytes"] for found in json.loads(capsys.readouterr().out))
    for gib, fixed, way in (
        ("40", [], "set recover_mode=disabled, which takes less."),
        ("9", ["--fix", "d2m2p1"], "use nodes with more."),
    ):
        assert main([*words, "--host-gib", gib, *fixed]) == 1
        shown = capsys.readouterr().out
        assert " GiB of host memory a node are too few: " in shown and shown.strip().endswith(way), shown
    assert main([*words, "--host-gib", "40", "recover_mode=disabled"]) == 0
    assert " GiB of host memory a node\n" in capsys.readouterr().out


def test_the_table_of_memory_fits_a_terminal_and_has_large_numbers_whole(recipe: Path, capsys) -> None:
    words = ["allocation_mode=sglang.d8m1p1|d4p2m1", "n_nodes=1", "staleness.max_staleness=0", *CRITIC]
    words += ["actor.optimizer.offload=true", "critic.optimizer.offload=true"]
    plan = plan_memory(scene_of(load_config("ppo-math", recipe, words).config, find_gpu("H100")))
    peak = plan.ranks[0].phases[0].allocated / 2**30
    for factor, whole in ((1, f" {peak:.1f} "), (1000, f" {1000 * peak:.0f} ")):
        ranks = [
            replace(rank, phases=[replace(p, parts={k: factor * v for k, v in p.parts.items()}) for p in rank.phases])
            for rank in plan.ranks
        ]
        Console(width=80).print(memory_table(replace(plan, ranks=ranks), "Memory"))
        table = capsys.readouterr().out
        assert "critic optimizer" in table and "sampling" in table and whole in table and "…" not in table


def test_a_plan_that_does_not_fit_ends_with_1(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config", str(recipe), "--gpu", "H100", "allocation_mode=sglang.d15m1p1+d1m1p1"]) == 1
    shown = capsys.readouterr().out
    assert "It does not fit" in shown and "actor.optimizer.offload=true" in shown


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--gpus", "64"], "--gpus 64: has no effect without --search"),
        (["--metric", "cost"], "--metric cost: has no effect without --search"),
        (["--fix", "d8m1p2"], "--fix d8m1p2: has no effect without --search"),
        (["--output", "/tmp"], "--output /tmp: has no effect without --simulate STEPS"),
        (["--sglang-python", "/py"], "--sglang-python /py: has no effect without --calibrate FILE"),
        (["--search", "--simulate", "20"], "--simulate: not with a search"),
        (["allocation_mode=search", "--simulate", "20"], "--simulate: not with a search"),
        (["allocation_mode=embedded.d8m1p1+d8m1p1", "--search"], "write allocation_mode=search"),
        (["--mean-tokens", "999999"], "--mean-tokens 999999: the longest answer has"),
    ],
)
def test_options_without_effect_are_refused(words: list[str], error: str, recipe: Path, capsys) -> None:
    assert main(["--config", str(recipe), "--gpu", "H100", *words]) == 2
    assert error in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fixed", "error"),
    [
        ("sglang.d4m2p1+actor_train:d4m1p1", "names actor_train; a search places all roles"),
        ("sglang.d9m2q1", "error: --fix='sglang.d9m2q1': "),
        ("embedded.d8m1p1", "embedded generates on the CPU, and a search places servers on GPUs; write sglang.d8m1p1"),
        ("sglang.d9m2p1", "takes 18 GPUs, and there are 16; write --gpus 18, or another layout"),
        ("sglang.d4m2p1+d4m1p1", "takes 12 GPUs, and there are 16; write --gpus 12, or another layout"),
        ("sglang.d4m2p1|d8m2p1", "layouts on the same GPUs (|) take 8 and 16"),
        ("sglang.d4m3p1", "m3 must divide num_attention_heads=28; nearest: m = 2 or 4"),
        ("d2m8p1", "m8 must divide num_attention_heads=28; nearest: m = 4"),
        ("d3m1p1", "must be a multiple of ppo_n_minibatches=4 x 3 = 12"),
    ],
)
def test_layouts_that_cannot_be_fixed_say_why(fixed: str, error: str, recipe: Path, capsys) -> None:
    assert main(["--config", str(recipe), "--gpu", "H100", "--gpus", "16", "--search", "--fix", fixed]) == 2
    assert error in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "error"),
    [("x", "'x' is no number"), ("nan", "nan must be from 0 to 3"), ("3.1", "3.1 must be from 0 to 3")],
)
def test_a_spread_is_a_number_between_bounds(text: str, error: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--spread", text])
    assert end.value.code == 2 and f"argument --spread: {error}" in capsys.readouterr().err


def test_bad_input_ends_with_2(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, error in (
        (["--gpu", "B300"], "--gpu B300: unknown"),
        (["--gpu", "H100", "actor.path=/nowhere"], "actor.path: /nowhere: no such folder"),
        (["--gpu", "H100", "ppo.gen.max_new_tokenz=3"], "did you mean"),
        (["--gpu", "H100", "nonsense"], "nonsense: must be an experiment, as the first word (ppo-math, sft, dpo)"),
        (["--gpu", "H100", "allocation_mode=sglang.d4m3p1+d4m1p1"], "actor_gen:d4m3p1 of "),
        (
            ["--gpu", "H100", "ppo.gen.max_new_tokens=40000", "actor_train.mb_spec.max_tokens_per_mb=50000"],
            "max_position_embeddings=32768",
        ),
    ):
        assert main(["--config", str(recipe), *words]) == 2
        assert error in capsys.readouterr().err


def test_a_run_without_servers_has_the_time_of_its_trainer(recipe: Path, tmp_path: Path, capsys) -> None:
    path = tmp_path / "sft.yaml"
    path.write_text(
        f"{{experiment_name: a, trial_name: b, n_gpus_per_node: 8, allocation_mode: d8m1p1, "
        f"model: {{path: {recipe.parent}/model}}, "
        "dataset: {train_path: x.jsonl, max_seqlen: 4096, train_bs_n_seqs: 64}}"
    )
    assert main(["sft", "--config", str(path), "--gpu", "H200", "--mean-tokens", "2048"]) == 0
    shown = capsys.readouterr().out
    assert "A step with sequences of 2,048 tokens on average" in shown and "trained tokens/s" in shown
    assert main(["sft", str(path), "--gpu", "H200", "--mean-tokens", "5000"]) == 2
    error = "the longest sequence has 4096 tokens; write at most that, or set dataset.max_seqlen"
    assert error in capsys.readouterr().err
    long = ["dataset.max_seqlen=40000", "allocation.mb_spec.max_tokens_per_mb=40000"]
    assert main(["sft", str(path), "--gpu", "H200", *long]) == 2
    error = "the longest sequence has 40000 tokens, max_position_embeddings=32768; lower dataset.max_seqlen, or take"
    assert error in capsys.readouterr().err


def test_servers_that_do_not_hold_the_model_have_no_times(recipe: Path, capsys) -> None:
    words = ["--config", str(recipe), "--gpu", "B200:14", "--calibration", str(FOLDER / "H200.json")]
    assert main(words) == 1
    assert "No time: it needs servers that hold the model" in capsys.readouterr().out
    assert main([*words, "--simulate", "8"]) == 2
    assert "--simulate: " in capsys.readouterr().err


def test_a_search_prints_a_line_to_copy_and_why_others_lose(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--config", str(recipe), "--gpu", "H100", "--gpus", "32", "--fix", "sglang.d8m2p1"]
    assert main([*words[:-2], "allocation_mode=search"]) == 0
    assert "\nNext: sglang." in capsys.readouterr().out
    assert main([*words, "--search"]) == 0
    assert "\n   allocation_mode=sglang.d8m2p1+" in capsys.readouterr().out
    assert main([*words[:-1], "d1m1p1", "--search"]) == 1
    assert "with the layout of --fix fits in memory" in capsys.readouterr().out
    words[3], words[-1] = "H100:1000", "sglang.d4m1p1"
    assert main([*words, "--search"]) == 1, "28 GPUs are left"
    assert "No layout beside that of --fix divides model, batch and the other GPUs" in capsys.readouterr().out


def test_a_plan_of_a_proposal_has_its_figures_to_the_last_digit(recipe: Path, capsys) -> None:
    words = ["--config", str(recipe), "--gpu", "H200", "--json", "--mean-tokens", "2000"]
    assert main([*words, "--search", "--gpus", "4", "--fix", "d2m1p1", "staleness.max_staleness=2"]) == 0
    found = json.loads(capsys.readouterr().out)
    for proposal in found:
        assert main([*words, "staleness.max_staleness=2", *proposal["overrides"]]) == 0
        plan = json.loads(capsys.readouterr().out)
        assert plan["seconds"] == proposal["seconds"]
        assert max(p["total"] for rank in plan["ranks"] for p in rank["phases"]) == proposal["peak_bytes"]
    assert len(found) == 2


def test_a_search_for_cost_leaves_out_half_nodes_and_keeps_sides_apart(recipe: Path, capsys) -> None:
    words = ["--config", str(recipe), "--gpu", "H100", "--search", "--metric", "cost", "--json"]
    words += ["dataset.train_bs_n_seqs=24", "--gpus"]
    assert main([*words, "24", "--fix", "sglang.d8m2p1+d4m2p1"]) == 0, "12 are a node and a half"
    assert json.loads(capsys.readouterr().out)
    assert main([*words, "16", "--fix", "sglang.d4m2p1+d4m2p1"]) == 0
    modes = [found["overrides"][0] for found in json.loads(capsys.readouterr().out)]
    assert modes and not any("|" in mode for mode in modes)


def test_a_calibration_of_another_gpu_gives_times(recipe: Path, tmp_path, capsys) -> None:
    assert main(["--config", str(recipe), "--gpu", "B200:178"]) == 0
    assert "No calibration for B200: memory only." in capsys.readouterr().out
    known = calibration_of("H200")
    assert known is not None
    path = tmp_path / "b200.json"
    write_calibration(replace(known, gpu="B200", gib=178.0), path)
    assert main(["--config", str(recipe), "--calibration", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "(B200, 178.0 GiB)" in shown and "trained tokens/s" in shown
    assert "The trainer computes " in shown and "Answers by staleness: " in shown and "checkpoint stops" in shown
    assert "Times use rates" not in shown
    words = ["--config", str(recipe), "--gpu", "H100", "--calibration", str(path)]
    for more in ([], ["--search", "--gpus", "2", "--fix", "d1m1p1"], ["--simulate", "8"]):
        main([*words, *more])
        assert "Times use rates of B200, not of H100." in capsys.readouterr().out, more
    main([*words, "--json"])
    assert json.loads(capsys.readouterr().out)["rates"] == "B200"
    write_calibration(replace(known, gpu="CPU of 2 cores", gib=0.0), path)
    assert main(["--config", str(recipe), "--calibration", str(path)]) == 2
    assert "rates of a CPU of 2 cores, but the trainer computes on GPUs" in capsys.readouterr().err
    path.write_text("{}")
    assert main(["--config", str(recipe), "--calibration", str(path)]) == 2
    assert "write a new one with slipstream plan --calibrate" in capsys.readouterr().err


def test_a_simulation_prints_what_faults_cost_and_draws(recipe: Path, tmp_path, capsys) -> None:
    words = ["--config", str(recipe), "--gpu", "H200", "--simulate", "12", "--output", str(tmp_path / "pictures")]
    assert main([*words, "dataset.train_bs_n_seqs=16", "ppo.ppo_n_minibatches=1"]) == 0
    shown = capsys.readouterr().out
    assert "as planned" in shown and "at half speed" in shown
    assert {file.name for file in (tmp_path / "pictures").iterdir()} == {"timeline.png", "simulation.png"}


def test_simulated_steps_as_json_are_all_that_stdout_gets(recipe: Path, tmp_path, capsys) -> None:
    words = ["--config", str(recipe), "--gpu", "H200", "--simulate", "8", "--json", "--output", str(tmp_path / "new")]
    assert main([*words, "dataset.train_bs_n_seqs=16", "ppo.ppo_n_minibatches=1"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["as planned"]["steps"] and "timeline.png" in shown.err


def test_a_calibration_that_cannot_be_kept_is_refused_before_it_is_measured(tmp_path, capsys) -> None:
    for path in (tmp_path, tmp_path / "none" / "rates.json"):
        assert main(["--calibrate", str(path)]) == 2
        assert f"--calibrate {path}: cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "unused"),
    [(["--search", "--gpus", "3"], "--search"), (["--json"], "--json"), (["sft", "a.b=1"], "sft a.b=1")],
)
def test_a_calibration_refuses_what_it_does_not_read(words: list[str], unused: str, tmp_path, capsys) -> None:
    assert main(["--calibrate", str(tmp_path / "none" / "rates.json"), *words]) == 2
    assert f"error: {unused}: has no effect with --calibrate" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("nodes", "gpus", "placed"),
    [
        ("n_nodes=4 n_gpus_per_node=4", 12, "n_nodes=3 n_gpus_per_node=4"),
        ("n_nodes=4 n_gpus_per_node=4", 2, "n_nodes=1 n_gpus_per_node=2"),
        ("n_nodes=1 n_gpus_per_node=2", 16, "n_nodes=2 n_gpus_per_node=8"),
    ],
)
def test_a_search_keeps_the_nodes_of_the_recipe(nodes: str, gpus: int, placed: str, recipe: Path, capsys) -> None:
    words = ["--config", str(recipe), "--gpu", "H200", "--gpus", str(gpus), "--search", *nodes.split()]
    assert main([*words, "dataset.train_bs_n_seqs=12"]) == 0
    assert f" {placed} " in capsys.readouterr().out
    assert main([*words[:4], "--gpus", "18", "--search", "n_nodes=4", "n_gpus_per_node=4"]) == 2
    assert "nodes have 4 GPUs each (n_gpus_per_node); write 16 or 20" in capsys.readouterr().err


def test_one_gpu_can_be_searched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--config", str(write_recipe(tmp_path, SHAPES["1.5B"])), "--gpu", "H200", "--search", "--gpus", "1"]
    assert main(words) == 0
    assert "\n   allocation_mode=sglang.d1m1p1|d1m1p1 n_nodes=1 n_gpus_per_node=1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("metric", "key", "shown"),
    [
        ("cost", "tokens_per_second_per_gpu", "{:,.0f} tokens/s of a GPU"),
        ("latency", "latency_seconds", "{:.0f} s from answer to update"),
    ],
)
def test_the_figure_that_ranks_is_shown(metric: str, key: str, shown: str, recipe: Path, capsys) -> None:
    words = ["--config", str(recipe), "--gpu", "H200", "--gpus", "2", "--search", "--fix", "sglang.d1m1p1+d1m1p1"]
    words += ["staleness.max_staleness=2", "--mean-tokens", "1"]
    assert main([*words, "--metric", metric, "--json"]) == 0
    best, *_ = json.loads(capsys.readouterr().out)
    tokens, step, gpus = best["tokens_per_second"], best["seconds"]["step"], int(best["overrides"][2].split("=")[1])
    assert best[key] == pytest.approx(tokens / gpus if metric == "cost" else 3 * step)
    assert main([*words, "--metric", metric]) == 0
    out = capsys.readouterr().out
    assert f"\n1. {shown.format(best[key])}, {tokens:,.0f} trained tokens/s: " in out
    assert (" on at most 2 H200, of " in out) == (metric == "cost") and "; answers of 1 token on average:" in out


def test_times_of_fp8_updates_say_that_they_are_those_of_bfloat16(recipe: Path, capsys) -> None:
    words, note = ["--config", str(recipe), "--gpu", "H100"], "No rates of FP8 are known: times use those of bfloat16."
    assert main(words) == 0
    assert note not in capsys.readouterr().out
    main([*words, "actor.fp8=true"])
    assert note in capsys.readouterr().out


def test_lines_are_wrapped_on_a_terminal_and_whole_in_a_pipe(recipe: Path) -> None:
    words = [sys.executable, "-m", "tools.plan", "--config", str(recipe), "--gpu", "H100"]
    root, width = Path(__file__).parents[2], 84
    piped = subprocess.run(words, capture_output=True, text=True, check=True, cwd=root).stdout
    assert max(map(len, piped.splitlines())) > 150
    terminal, end = os.openpty()
    environment = {**os.environ, "COLUMNS": str(width), "TERM": "xterm"}
    with subprocess.Popen(words, stdout=end, cwd=root, env=environment) as process:
        os.close(end)
        shown = b""
        with contextlib.suppress(OSError):  # of a terminal whose other end is closed
            while part := os.read(terminal, 4096):
                shown += part
    os.close(terminal)
    text = re.sub(r"\x1b\[[0-9;]*m", "", shown.decode())
    lines = text.splitlines()
    assert process.returncode == 0 and max(map(len, lines)) <= width
    assert any(line.startswith("  ") and "trained tokens/s" in line for line in lines), lines
    assert "".join(text.split()) == "".join(piped.split()), "nothing is lost"


def test_a_proposal_says_what_the_worst_routing_lacks_as_its_plan_does(tmp_path: Path, capsys) -> None:
    words = [str(write_recipe(tmp_path, SLICE)), "--calibration", str(FOLDER / "H200.json"), "--gpu"]
    searched = ["--search", "--gpus", "8", "--fix", "sglang.d4m1p1+d4m1p1e4"]
    for gib, lacks in ((38, True), (40, False)):
        assert main([*words, f"X:{gib}", *searched]) == 0
        shown = capsys.readouterr().out
        keys = re.findall(r"^   (allocation_mode=.*)$", shown, re.MULTILINE)[0].split()
        assert main([*words, f"X:{gib}", *keys, "--json"]) == 0
        planned = json.loads(capsys.readouterr().out)["worst_routing"]
        missing = planned["peak_bytes"] / 2**30 - gib
        assert (f"; with the worst routing {missing:.1f} GiB are missing\n" in shown) == lacks == (missing > 0)
        assert ("worst routing" in shown) == lacks
    assert main([*words, "X:40", *searched, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["worst_routing"] == planned
