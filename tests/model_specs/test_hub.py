"""Ids of models of the Hugging Face hub, with a cache that is made by hand and without a network."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from core.checks.rules import load_config
from core.config.parsing.problems import ConfigError
from helpers.source import ROOT
from model_specs import hub
from tools import arguments

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache as the library writes it: files are links to blobs, `main` and `v2` name the commit."""
    from huggingface_hub import constants

    folder = tmp_path / "hub/models--me--sums"
    snapshot, blobs = folder / "snapshots" / COMMIT, folder / "blobs"
    for made in (snapshot, blobs, folder / "refs"):
        made.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (blobs / name).write_text("{}")
        (snapshot / name).symlink_to(f"../../blobs/{name}")
    for revision in ("main", "v2"):
        (folder / "refs" / revision).write_text(COMMIT)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub._cached.cache_clear()
    hub._REFUSED.clear()
    return snapshot


@pytest.mark.parametrize("given", ["me/sums", "me/sums@v2", f"me/sums@{COMMIT}"])
def test_an_id_is_its_folder_in_the_cache(cache: Path, given: str) -> None:
    folder = hub.model_folder(given, weights=True)
    assert Path(folder) == cache
    assert hub.shown(folder) == f"me/sums@{COMMIT[:8]}"
    assert not hub.lacks_weights(folder)


def test_a_path_that_exists_is_no_id(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("me/sums").mkdir(parents=True)
    assert hub.model_folder("me/sums", weights=True) == "me/sums"
    for path in ("/no/model", "./me/other", "model", "a/b/c"):
        assert hub.model_folder(path, weights=True) == path


def test_every_key_of_a_model_takes_an_id(cache: Path) -> None:
    given = ["experiment_name=x", "dataset.path=x.jsonl", "ppo.disable_value=true", "ref.path=me/sums@v2"]
    config = load_config("ppo-math", None, [*given, "actor.path=me/sums", "bench.models=[me/sums]"]).config
    assert {use.key: use.path for use in config.model_uses} == {"actor": str(cache), "ref": str(cache)}
    assert config.bench.models == [str(cache)]
    supervised = load_config("sft", None, ["experiment_name=x", "dataset.train_path=x", "model.path=me/sums"]).config
    assert supervised.model.path == str(cache)


def test_a_dry_run_needs_no_weights_and_a_run_does(cache: Path) -> None:
    (cache / "model.safetensors").unlink()
    folder = hub.model_folder("me/sums", weights=False)
    assert hub.lacks_weights(folder)
    with pytest.raises(hub.HubError, match="no \\*.safetensors files"):
        hub.model_folder("me/sums", weights=True)


def test_an_unknown_model_is_one_line_with_the_way_out(cache: Path) -> None:
    import slipstream

    given = {"experiment_name": "x", "dataset.path": str(ROOT / "README.md"), "ppo.disable_value": True}
    with pytest.raises(ConfigError) as error:
        slipstream.load_config({**given, "ppo.kl_ctl": 0, "actor.path": "me/nothing@v3"})
    (line,) = [p.message for p in error.value.problems if p.key == "actor.path"]
    assert line.startswith("me/nothing@v3: no such folder")
    assert "hf download me/nothing --revision v3 --local-dir FOLDER" in line


def test_tools_take_ids(cache: Path) -> None:
    assert arguments.model()("me/sums") == cache
    with pytest.raises(arguments.argparse.ArgumentTypeError, match="hf download me/nothing"):
        arguments.model(weights=False)("me/nothing")


def test_a_hub_that_does_not_answer_ends_in_the_cache(cache: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        environment = {
            **os.environ,
            "HF_ENDPOINT": f"http://127.0.0.1:{silent.getsockname()[1]}",
            "HF_HUB_CACHE": str(cache.parents[2]),
            "HF_HUB_OFFLINE": "0",
        }
        code = (
            "from model_specs import hub; hub.HUB_SECONDS = 0.5\n"
            f"print(hub.model_folder('me/sums@{COMMIT}', weights=True)); hub.model_folder('me/nothing', weights=True)"
        )
        words = [sys.executable, "-c", code]
        done = subprocess.run(words, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == str(cache), done.stderr
    assert "hub (no answer within 0.5 s). Without a network: run `hf download me/nothing" in done.stderr
