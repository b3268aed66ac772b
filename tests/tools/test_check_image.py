"""The check of Dockerfiles on machines without docker: which steps run, how, and which end it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.check_image import Step, main, steps_of

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", ["cpu", "gpu"])
def test_every_instruction_of_the_shipped_images_is_one_that_the_check_does(name: str) -> None:
    steps = list(steps_of((ROOT / "docker" / f"{name}.Dockerfile").read_text()))
    assert steps[0].name == "FROM" and steps[-1].words.startswith("python -m core.quickstart --help")
    assert Step("COPY", ". .") in steps and not any("\\" in step.words for step in steps)


def dockerfile(folder: Path, *lines: str) -> str:
    path = folder / "Dockerfile"
    path.write_text("".join(f"{line}\n" for line in ("FROM debian:12", *lines)))
    return str(path)


def test_steps_run_in_order_with_variables_folders_and_the_files_of_the_repository(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    path = dockerfile(
        tmp_path,
        "# a comment",
        "ENV FIRST=one SECOND=/opt/two:$FIRST",
        "RUN apt-get update && false",
        "WORKDIR /opt/here",
        "COPY . .",
        f"RUN test -f setup.py && test -f core/quickstart.py && \\\n    echo $SECOND > {out} && pwd >> {out}",
    )
    assert main([path]) == 0
    second, here = out.read_text().splitlines()
    assert second.endswith("/opt/two:one") and not second.startswith("/opt") and second.startswith("/")
    assert here == second.replace("/two:one", "/here") and not Path(here).exists(), "the folder is gone"
    shown = capsys.readouterr().out
    assert "left out: packages of the distribution" in shown and shown.splitlines()[-1] == f"{path}: all 6 steps done"


def test_a_step_that_fails_is_named_with_its_last_lines_and_none_follows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = dockerfile(tmp_path, "RUN echo the reason; false; true", f"RUN touch {tmp_path}/never")
    assert main([path]) == 1
    assert capsys.readouterr().err.splitlines() == [
        "the reason", f"{path}: step 2 failed: RUN echo the reason; false; true"
    ]  # fmt: skip
    assert not (tmp_path / "never").exists()


def test_an_image_of_a_python_that_is_not_here_is_one_clear_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "Dockerfile"
    path.write_text("FROM python:3.99-slim\n")
    assert main([str(path)]) == 1
    assert "python:3.99-slim: this machine has no python3.99" in capsys.readouterr().err


def test_packages_are_only_resolved_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = dockerfile(
        tmp_path, "RUN echo pip install -e . > /opt/said; cat /opt/said; false", "RUN python -c 'import torch'"
    )
    assert main([path, "--resolve"]) == 1
    assert "pip install --dry-run -e ." in capsys.readouterr().err
    path = dockerfile(tmp_path, "RUN python -c 'import no_such_module'")
    assert main([path, "--resolve"]) == 0
    assert "left out: the packages are not installed (--resolve)" in capsys.readouterr().out


def test_an_unknown_instruction_is_refused_before_any_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = dockerfile(tmp_path, f"RUN touch {tmp_path}/never", "ADD x y")
    with pytest.raises(SystemExit):
        main([path])
    assert "ADD: this check does only FROM, ENV, WORKDIR, COPY, RUN" in capsys.readouterr().err
    assert not (tmp_path / "never").exists()


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_the_image_for_cpus_installs_and_starts() -> None:
    assert main([str(ROOT / "docker" / "cpu.Dockerfile")]) == 0
