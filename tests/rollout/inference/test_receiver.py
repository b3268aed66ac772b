"""The receiver of weights by broadcast answers holders of its key alone."""

import aiohttp
import pytest

from rollout.inference.receiver import BroadcastReceiver


@pytest.mark.parametrize("given", [None, "Bearer other", "Bearer \xff"])
async def test_a_call_without_the_key_is_refused(given: str | None) -> None:
    endpoint = await BroadcastReceiver("generator-0", "127.0.0.1", timeout_seconds=60.0).start()
    key = {} if given is None else {"Authorization": given}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{endpoint.url}/destroy_weights_update_group", json={"group_name": "g"}, headers=key) as answer,
    ):
        assert (answer.status, (await answer.json())["success"]) == (401, False)
