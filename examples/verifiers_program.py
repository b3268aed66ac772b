"""Train on an environment of `verifiers` (https://github.com/PrimeIntellect-ai/verifiers, 0.4), which runs in an
interpreter of its own and finds the policy where an agent program does (docs/agents.md):

    slipstream train --config run.yaml workflow.type=endpoint reward.function=verifiers_program:reward \\
        'workflow.options.command="/path/to/verifiers/bin/python verifiers_program.py env.json"'

The file is an [env] block of verifiers as JSON, such as {"taskset": {"id": "my_taskset"}, "agent": {"runtime": {"type":
"subprocess"}, "harness": {"id": "bash"}}}. Task number `task_index` of the taskset is played, a column of the data set;
what its rewards sum up to is the reward.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from itertools import islice
from pathlib import Path
from typing import Any


def reward(prompt: object, text: str) -> float:
    """Return the number that the program below prints last; a taskset may print before it."""
    return float(text.splitlines()[-1])


async def play(row: dict[str, Any], block: dict[str, Any]) -> float:
    """Play one task and return its reward."""
    import verifiers.v1 as vf
    from verifiers.v1.utils.loaders import load_environment, resolve_env_config

    env = load_environment(resolve_env_config(block))
    task = next(islice(env.taskset, int(row["task_index"]), None))
    client = vf.EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY")
    async with env.serving():
        episode = await env.run_episode(task, vf.ModelContext(model="policy", client=client))
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        raise RuntimeError(f"task {row['task_index']}: {errors}")
    return sum(trace.reward for trace in episode.traces)


if __name__ == "__main__":
    print(asyncio.run(play(json.load(sys.stdin), json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))))
