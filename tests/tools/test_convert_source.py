"""What `tools.convert` takes as a checkpoint."""

from pathlib import Path

import pytest

from tools.convert import _source


@pytest.mark.parametrize("layout", ["iter_0000100/mp_rank_00", "mp_rank_00"])
def test_a_checkpoint_of_megatron_lm_is_named_as_one(tmp_path: Path, layout: str) -> None:
    (tmp_path / layout).mkdir(parents=True)
    with pytest.raises(ValueError, match=r"is a checkpoint of Megatron-LM .*with the project that wrote it"):
        _source(tmp_path, "actor", to_megatron=False)


def test_a_folder_of_something_else_is_met_with_the_flag_for_hugging_face_folders(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no metadata.json.*add --to-megatron"):
        _source(tmp_path, "actor", to_megatron=False)


@pytest.mark.parametrize("steps", [(8, 9, 10), (99, 100), (2, 1)])
def test_of_several_recover_checkpoints_the_one_of_the_last_step_is_taken(
    tmp_path: Path, steps: tuple[int, ...]
) -> None:
    for step in steps:
        for engine in ("actor", "critic"):
            folder = tmp_path / f"globalstep{step}" / engine
            folder.mkdir(parents=True)
            (folder / "metadata.json").write_text("{}")
    for engine in ("actor", "critic"):
        assert _source(tmp_path, engine, to_megatron=False) == tmp_path / f"globalstep{max(steps)}" / engine
