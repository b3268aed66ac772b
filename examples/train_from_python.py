"""Fine-tune, then train by reinforcement learning, then use the model: all from Python.

    python examples/train_from_python.py        # CPU, about a minute and a half

Configurations are the YAML files of the command line; keyword arguments override single keys.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

import slipstream

CONFIGS = Path(__file__).parent / "configs"


def main() -> None:
    """Train on additions of two-digit numbers and print an answer of the trained model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/train_from_python"), help="folder to write to")
    output = parser.parse_args().output.absolute()
    slipstream.make_demo_data(output, seed=1)
    os.environ["SLIPSTREAM_DEMO"] = str(output)  # read by the configuration files

    steps = {"exp_ctrl.total_train_steps": 60, "exp_ctrl.save_freq_steps": 60}
    warm_up = slipstream.train(CONFIGS / "demo-sft.yaml", experiment="sft", **steps)
    print(f"loss of the warm-up: {warm_up.metrics()[0]['loss']:.2f} -> {warm_up.metrics()[-1]['loss']:.2f}")

    steps = {"exp_ctrl.total_train_steps": 20, "exp_ctrl.save_freq_steps": 20, "exp_ctrl.eval_freq_steps": None}
    run = slipstream.train(CONFIGS / "demo-ppo.yaml", **steps, **{"actor.path": str(warm_up.model)})
    steps_done = [row for row in run.metrics() if "task_reward" in row]  # evaluations have rows of their own
    for row in steps_done[::5]:
        print(f"reward {row['task_reward']:.3f}, staleness {row['staleness/mean']:.2f}")

    model = AutoModelForCausalLM.from_pretrained(run.model)
    tokenizer = AutoTokenizer.from_pretrained(run.model)
    prompt = tokenizer("12+34=", return_tensors="pt")
    answer = model.generate(prompt.input_ids, max_new_tokens=6, do_sample=False)
    print(tokenizer.decode(answer[0], skip_special_tokens=True))


if __name__ == "__main__":
    main()
