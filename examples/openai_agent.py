"""Train an unmodified agent program: it talks to the policy through the openai package.

    pip install openai
    python examples/openai_agent.py            # CPU, about a minute

The program asks for numbers twice in one conversation, and its reward is the share of sevens in both answers.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import slipstream

TEMPLATE = "{% for m in messages %}{{ m.content }}{{ eos_token if m.role == 'assistant' }}{% endfor %}"
"""The vocabulary of this model is digits; models that were trained for chats have a template of their own."""


async def agent(row: dict[str, Any], endpoint: Any) -> float:
    """Return the reward of one sample. `endpoint.openai`: arguments of the client."""
    from openai import AsyncOpenAI

    messages: list[Any] = [{"role": "user", "content": row["prompt"]}]
    texts = []
    async with AsyncOpenAI(**endpoint.openai) as client:
        for _ in range(2):
            answer = (await client.chat.completions.create(model="policy", messages=messages)).choices[0].message
            texts.append(answer.content or "")
            messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": "="}]
    text = "".join(texts)
    return text.count("7") / max(len(text), 1)


def main() -> None:
    """Train for 25 steps and print the mean reward of the first and the last ones."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/openai_agent"), help="folder to write to")
    output = parser.parse_args().output.absolute()
    files = slipstream.make_demo_data(output, seed=1)
    config = {
        "experiment_name": "openai-agent",
        "trial_name": "sevens",
        "exp_ctrl": {"total_train_epochs": 1, "total_train_steps": 25},
        "actor": {"path": str(files.model), "optimizer": {"lr": 2e-3}},
        "dataset": {"path": str(files.train), "max_prompt_len": 8, "train_bs_n_seqs": 8},
        "prompt": {"chat_template": TEMPLATE, "instruction": ""},
        "group_size": 8,
        "group_adv_norm": True,
        "ppo": {"gen": {"max_new_tokens": 6}, "ppo_n_minibatches": 1, "kl_ctl": 0.0, "disable_value": True},
        "workflow": {"type": "endpoint", "options": {"context_tokens": 64}},
        "external_configs": {"cluster_config": {"fileroot": str(output)}},
    }
    run = slipstream.train(config, **{"workflow.options.program": agent})
    rewards = [row["task_reward"] for row in run.metrics()]
    print(f"mean reward of steps 1 to 3: {sum(rewards[:3]) / 3:.2f}; of the last 3: {sum(rewards[-3:]) / 3:.2f}")


if __name__ == "__main__":
    main()
