"""The test double of a SGLang server answers as the recorded real server did; with a SGLang here, the record is fresh.

After a change of the recorder or of SGLang: `python tests/helpers/sglang_double/record.py 1` and `2`, with the
environment variables of helpers/sglang_environment.py.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from helpers.sglang_double import model
from helpers.sglang_double.recorder import Recorder, stored
from helpers.sglang_double.server import SGLangDouble
from helpers.sglang_environment import PYTHON, TWO_RANKS, WHY_NOT, environment, running_server, settings_for


def compare(recorded: list[dict[str, Any]], transcript: list[dict[str, Any]]) -> None:
    """Call by call, so that the first difference is shown and not two files."""
    for expected, found in zip(recorded, transcript, strict=False):
        assert found == expected, found["name"]
    assert len(transcript) == len(recorded)


@pytest.mark.parametrize("tp", [1, 2])
def test_the_double_answers_every_call_as_the_real_server_did(tp: int, tmp_path: Path) -> None:
    with SGLangDouble(tp=tp) as double:
        transcript = Recorder(double.url, tp=tp, folder=tmp_path).record()
    compare(json.loads(stored(tp).read_text()), json.loads(json.dumps(transcript)))


@pytest.mark.skipif(PYTHON is None, reason=WHY_NOT)
@pytest.mark.parametrize("tp", [1, 2])
def test_the_real_server_still_answers_as_it_was_recorded(tp: int, tmp_path: Path) -> None:
    env = environment() | (TWO_RANKS if tp > 1 else {})
    settings = settings_for(model.write(tmp_path / "model"), tmp_path / "generator-0.log", tp=tp, env=env)
    with running_server(settings) as server:
        transcript = Recorder(server.endpoint.url, tp=tp, folder=tmp_path).record()
    compare(json.loads(stored(tp).read_text()), json.loads(json.dumps(transcript)))
