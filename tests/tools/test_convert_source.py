"""What `tools.convert` takes as a checkpoint."""

from pathlib import Path

import pytest

from tools.convert import _parser, _source


@pytest.mark.parametrize("layout", ["iter_0000100/mp_rank_00", "mp_rank_00"])
def test_a_checkpoint_of_megatron_lm_is_named_as_one(tmp_path: Path, layout: str) -> None:
    (tmp_path / layout).mkdir(parents=True)
    with pytest.raises(ValueError, match=r"is a checkpoint of Megatron-LM .*with the project that wrote it"):
        _source(tmp_path, "actor", to_megatron=False)


def test_a_folder_of_something_else_is_met_with_the_flag_for_hugging_face_folders(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no metadata.json.*add --to-megatron"):
        _source(tmp_path, "actor", to_megatron=False)


@pytest.mark.parametrize("steps", [(8, 9, 10), (99, 100), (2, 1)])
def test_of_several_recover_checkpoints_the_one_of_the_last_step_is_taken(tmp_path, steps: tuple[int, ...]) -> None:
    for step in steps:
        for engine in ("actor", "critic"):
            folder = tmp_path / f"globalstep{step}" / engine
            folder.mkdir(parents=True)
            (folder / "metadata.json").write_text("{}")
    for engine in ("actor", "critic"):
        assert _source(tmp_path, engine, to_megatron=False) == tmp_path / f"globalstep{max(steps)}" / engine


def test_the_only_engine_of_a_recover_checkpoint_is_taken_without_its_name(tmp_path: Path) -> None:
    folder = write_engine(tmp_path / "globalstep3", "default")
    assert _parser().parse_args(["--checkpoint_path", "c", "--output_path", "o"]).engine is None
    for engine in (None, "default"):
        assert _source(tmp_path, engine, to_megatron=False) == folder
        assert _source(tmp_path / "globalstep3", engine, to_megatron=False) == folder
    with pytest.raises(ValueError, match="globalstep3 has no engine actor: default; give --engine default$"):
        _source(tmp_path, "actor", to_megatron=False)


def test_of_several_engines_the_actor_is_taken_or_one_must_be_named(tmp_path: Path) -> None:
    for engine in ("first", "second"):
        write_engine(tmp_path, engine)
    with pytest.raises(
        ValueError, match="has several engines and no actor: first, second; give --engine first or second$"
    ):
        _source(tmp_path, None, to_megatron=False)
    actor = write_engine(tmp_path, "actor")
    assert _source(tmp_path, None, to_megatron=False) == actor


def write_engine(checkpoint: Path, engine: str) -> Path:
    folder = checkpoint / engine
    folder.mkdir(parents=True)
    (folder / "metadata.json").write_text("{}")
    return folder
