"""What the documents tell a user to do: files, modules and make targets that they name exist, and a recipe followed top
to bottom trains the model that it speaks of."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from config_schema.section import all_keys
from core.config.experiments import EXPERIMENTS
from core.config.migrate import systems
from core.config.presets import PRESETS
from rollout.inference.registry import BACKENDS

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", *(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))]
LOG_BOOK = [f"benchmarks/{p.name}" for p in (ROOT / "benchmarks").glob("*.md")]
FOLDERS = "allocation|benchmarks|core|docs|examples|mcore_adapter|model_specs|rollout|slipstream|tests|tools|tracing"


@pytest.mark.parametrize("document", sorted(DOCUMENTS))
def test_what_a_document_names_exists(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    places = {(ROOT / document).parent / link for link in re.findall(r"\]\((?!\w+://)([^)#]+)", text)}
    places |= {ROOT / module.replace(".", "/") for module in re.findall(rf"python -m ((?:{FOLDERS})[\w.]*\w)", text)}
    places |= {ROOT / path.rstrip(".*") for path in re.findall(rf"(?<![\w/}}])((?:{FOLDERS})/[\w./*-]+)", text)}
    places -= {ROOT / path for path in re.findall(r"^`([\w/.]+)`[^\n]*:\n\n```", text, re.MULTILINE)}  # files to write
    assert [str(p) for p in places if not list(ROOT.glob(f"{p.resolve().relative_to(ROOT)}*"))] == []
    targets = re.findall(r"(?:^    |`)make ([a-z]+)", text, re.MULTILINE)
    assert [t for t in targets if f"\n{t}:" not in (ROOT / "Makefile").read_text()] == []


def test_the_site_of_the_documentation_is_built_and_each_of_its_links_leads_somewhere(tmp_path: Path) -> None:
    mkdocs = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    built = subprocess.run(mkdocs, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    assert (tmp_path / "site" / "configuration" / "index.html").is_file()


def test_no_file_has_the_marks_of_a_merge_that_was_not_finished() -> None:
    found = subprocess.run(["git", "grep", "-nE", "^(<{7}|>{7}) "], cwd=ROOT, capture_output=True, text=True)
    assert found.returncode in (0, 1), found.stderr
    assert found.stdout == ""


def test_the_commands_about_real_data_train_the_models_that_they_speak_of() -> None:
    text = (
        (ROOT / "docs" / "first-run.md")
        .read_text(encoding="utf-8")
        .partition("\n## Real data")[2]
        .partition("\n## ")[0]
    )
    lines = [line.removeprefix("    ") for line in text.splitlines() if line.startswith("    ")]
    script = 'python() { echo "${SLIPSTREAM_MODEL:-}: $*"; }\n' + "\n".join(lines)
    done = subprocess.run(["bash", "-euc", script], cwd=ROOT, capture_output=True, text=True, check=True)
    model_of = {config: model for model, config in re.findall(r"(.*): .*--config examples/configs/(\S+)", done.stdout)}
    assert model_of["sft-mawps.yaml"] == "runs/mawps/model"
    assert model_of["ppo-mawps.yaml"].startswith("runs/mawps/checkpoints/")


def test_the_glossary_is_in_alphabetical_order_and_its_cross_references_exist() -> None:
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    terms = re.findall(r"^- \*\*(.+?)\*\*", text, re.MULTILINE)
    assert len(terms) > 40 and terms == sorted(terms, key=str.lower)
    references = re.findall(r"See (?:also )?\*(.+?)\*", text)
    assert references and {r.capitalize() for r in references} <= set(terms)


@pytest.mark.parametrize("document", sorted(DOCUMENTS + LOG_BOOK))
def test_a_link_to_a_heading_leads_to_one(document: str) -> None:
    folder = (ROOT / document).parent
    for path, anchor in re.findall(r"\]\((?!\w+://)([^)#]*)#([^)]+)\)", (ROOT / document).read_text(encoding="utf-8")):
        target = (folder / path if path else ROOT / document).read_text(encoding="utf-8")
        headings = re.findall(r"^#+ (.+)$", target, re.MULTILINE)
        assert anchor in {re.sub(r"[^\w -]", "", h).strip().lower().replace(" ", "-") for h in headings}, anchor


def test_the_label_of_a_benchmark_has_at_most_ten_words() -> None:
    text = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    labels = [line.split("|")[1].split() for line in text.splitlines() if line.startswith("| ")]
    assert len(labels) > 60 and [" ".join(label) for label in labels if len(label) > 10] == []


def test_the_figures_of_the_readme_stand_in_the_benchmarks() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8").partition("\n## Figures\n")[2].partition("\n## ")[0]
    rows = [line.split("|")[2:] for line in readme.splitlines() if line.startswith("| [")]
    figures = {figure for row in rows for figure in re.findall(r"\d[\d,.]*\d", "|".join(row))}
    benchmarks = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert len(rows) == 6 and {f for f in figures if not re.search(rf"(?<![\d,.]){re.escape(f)}", benchmarks)} == set()


def test_the_page_of_benchmarks_stays_one_page() -> None:
    assert len((ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8").splitlines()) <= 200


def test_the_paths_through_the_source_name_what_their_files_define_in_few_files() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").partition("\n## Three paths")[2]
    prompt, weight, key = re.split(r"^- ", text.partition("\n## ")[0], flags=re.MULTILINE)[1:]
    for path in (prompt, weight):
        named = re.findall(r"`([A-Z]\w+)(?:\.\w+)?`[^`]*(?:`\w+`[^`]*)?\(`([\w/]+\.py)`\)", path)
        assert {file for _, file in named} == set(re.findall(r"[\w/]+\.py", path))
        assert [pair for pair in named if f"class {pair[0]}" not in (ROOT / pair[1]).read_text(encoding="utf-8")] == []
    assert [len(set(re.findall(r"[\w/]+\.py", path))) for path in (prompt, weight, key)] == [8, 6, 2]


def test_the_comparison_says_of_slipstream_what_the_code_has() -> None:
    row = _comparison()["Slipstream"]
    generators = {word.lower() for word in re.findall(r"\w+", re.sub(r"\(.*?\)", "", row["generation"]))}
    assert generators == BACKENDS.keys() - {"mock"}
    assert set(re.findall(r"`(\w+)`", row["staleness"])) <= {
        key.rpartition(".")[2] for key in all_keys(EXPERIMENTS["ppo-math"])
    }
    others = ", ".join(name.upper() for name in EXPERIMENTS if name != "ppo-math")
    assert row["algorithms"] == f"{len(PRESETS)} presets; {others}"
    assert f"[{len(PRESETS)} algorithms]" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_comparison_names_the_key_of_another_project_that_is_translated_to_ours() -> None:
    tables = {system.name.partition(" (")[0]: system.keys for system in systems()}
    named = [
        (project, key)
        for project, row in _comparison().items()
        for key in re.findall(r"`(\w+_\w+)`", row["staleness"])
        if project in tables
    ]
    assert [project for project, _ in named] == ["AReaL", "ROLL", "TRL", "NeMo-RL", "SkyRL"]
    for project, key in named:
        (target,) = {value for name, value in tables[project].items() if name.rpartition(".")[2] == key}
        assert target.partition(" ")[0] == "staleness.max_staleness", (project, key)


def test_the_readme_lists_the_projects_of_the_comparison() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    listed = re.findall(r"covers ((?:.|\n)+?)\.\n", readme)[0]
    assert re.split(r",\s+|\s+and\s+", listed) == [project for project in _comparison() if project != "Slipstream"]


def _comparison() -> dict[str, dict[str, str]]:
    """The rows of the comparison by project, each with its cells by column."""
    text = (ROOT / "docs" / "comparison.md").read_text(encoding="utf-8")
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    columns, _, *rows = lines
    return {re.sub(r"\[(.*)\]\(.*\)", r"\1", row[0]): dict(zip(columns, row, strict=True)) for row in rows}
