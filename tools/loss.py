"""Print advantages, loss and gradients of an algorithm for given log-probabilities.

    python -m tools.loss CASE.json                        # or: ... < CASE.json
    python -m tools.loss --from-run FOLDER --step 7       # a step that a run saved under monitor.save_batches

CASE is {"algorithm": NAME, "settings": {KEY: VALUE}, "sequences": [SEQUENCE, ...]}. A SEQUENCE has one number per token
under "logprobs" and, as far as the algorithm needs them, under "old_logprobs", "rollout_logprobs", "ref_logprobs",
"values", "entropy" and "versions"; "mask" (true or 1: trained; default: all); "reward"; "group" (any name; default: a
group of its own); "truncated" (default false). "advantage", a number or one per token, replaces the computed one.
Settings are keys of the section `algorithm`; keys of other sections are written with their path, as in "ppo.kl_ctl".
Without them, ppo.kl_ctl is 0, and ppo.adv_norm is false unless the algorithm sets it. Advantages and losses come from
the code that trains, in float64. The result is JSON: advantages (one per sequence, or a list per token), loss, grads (d
loss / d logprobs), metrics, weights (the factor that corrections multiply the loss of each token by) and token_weights
(its share in the loss). "version" beside "sequences" is that of the trainer's weights; default: that of the newest
token. Sequences of mix and chord with "demonstration": true come last; steps that a run saved have none.

{"algorithm": "dpo", "settings": {"beta": 0.1, "loss": "ipo"}} takes pairs: groups of two sequences with "logprobs" and
"ref_logprobs", of which the one with the higher "reward" is the chosen one. Settings are keys of the section `dpo`.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from core.algorithms import PRESETS
from core.algorithms.base import FIELDS
from core.algorithms.corrections import correction_weights
from core.algorithms.losses import policy_terms
from core.algorithms.policy_gradient import PolicyGradient
from core.algorithms.saved_steps import step_file
from core.config.algorithm import build_algorithm, check_algorithm
from core.config.experiments import PPOMATHConfig
from mcore_adapter.data.batch import sequence_of_token
from mcore_adapter.data.sequences import Sequences
from mcore_adapter.data.weights import weigh_tokens
from mcore_adapter.forward import ModelOutput
from tools.loss_case import Tokens
from tools.loss_pairs import compute_pairs


def compute(case: Mapping[str, Any]) -> dict[str, Any]:
    """Return the result of a CASE, see above. Raises ValueError that names the key, the rule and the value."""
    with _in_float64():
        return _compute(case)


def _compute(case: Mapping[str, Any]) -> dict[str, Any]:
    tokens = Tokens.read(case)
    if case.get("algorithm") == "dpo":
        return compute_pairs(case, tokens)
    sampled = tokens.sampled
    config = _config(case, sampled)
    algorithm = build_algorithm(config)
    if "state" in case:
        algorithm.load_state_dict(case["state"])
    batch = sampled.batch()
    packed = batch.to_packed()
    needed = {FIELDS[name]: sampled.required(name) for name in sorted(algorithm.passes)}
    ages = batch.token_ages(int(case.get("version", batch.versions.max())))
    known = {**packed.fields, **needed, "loss_mask": packed.loss_mask, "ages": ages}
    trained_on, figures = algorithm.advantages(batch, known)
    packed = packed.with_fields(**{**needed, **trained_on, **sampled.given_advantages()})
    packed = tokens.with_demonstrations(packed)
    weighed, divisors = weigh_tokens(packed, algorithm.token_weights)
    logprobs = tokens.required("logprobs").requires_grad_()
    entropy = tokens.required("entropy").requires_grad_() if algorithm.needs_entropy else None
    lens = packed.seq_lens
    sequences = Sequences(of_token=sequence_of_token(lens), count=len(lens))
    fields = {**weighed.fields, "loss_mask": weighed.loss_mask}
    loss, metrics = algorithm.loss(ModelOutput(logprobs=logprobs, entropy=entropy), fields, sequences)
    loss = loss / divisors.loss
    loss.backward()
    assert logprobs.grad is not None, "the loss depends on the log-probabilities"
    return {
        "algorithm": config.algorithm_name,
        "advantages": tokens.advantages(weighed.fields["advantages"]),
        "loss": loss.item(),
        "grads": tokens.cut(logprobs.grad),
        "metrics": figures | {name: float(value.detach()) / divisors.metrics for name, value in metrics.items()},
        "weights": tokens.cut(_correction(algorithm, logprobs.detach(), fields, sequences)),
        "token_weights": tokens.cut(weighed.fields["token_weights"] / divisors.loss),
    }


def _config(case: Mapping[str, Any], tokens: Tokens) -> PPOMATHConfig:
    """Build the configuration that trains so. Raises ValueError for settings that a run would refuse."""
    given = case.get("settings", {})
    if not isinstance(given, dict):
        raise ValueError(f"settings: must be an object of keys and values, got {given!r}")
    tree: dict[str, Any] = {
        "experiment_name": "loss", "trial_name": "loss", "dataset": {"path": "none"},
        "demonstrations": {"path": "none"},
        "algorithm": {"name": case.get("algorithm")},
        "ppo": {
            "kl_ctl": 0.0, "disable_value": not tokens.has("values"),
            "ppo_n_minibatches": 2 if tokens.has("old_logprobs") else 1,
        },
        "group_size": min(Counter(tokens.groups).values()),
    }  # fmt: skip
    preset = PRESETS.get(str(case.get("algorithm")))
    if preset is None or "ppo.adv_norm" not in preset.values:
        tree["ppo"]["adv_norm"] = False
    for key, value in given.items():
        *path, last = key.split(".") if "." in key or key == "group_adv_norm" else ("algorithm", key)
        section = tree
        for part in path:
            section = section.setdefault(part, {})
        section[last] = value
    try:
        config = PPOMATHConfig.model_validate(tree)
    except ValidationError as error:
        lines = [f"settings: {'.'.join(map(str, e['loc']))}: {e['msg']}, got {e['input']!r}" for e in error.errors()]
        raise ValueError("\n".join(lines)) from None
    if problems := [str(problem) for problem in check_algorithm(config)]:
        raise ValueError("\n".join(problems))
    return config


def _correction(algorithm: Any, logprobs: Tensor, fields: Mapping[str, Tensor], sequences: Sequences) -> Tensor:
    """Compute what corrections multiply the loss of each token by, 0 for tokens that they drop: [T]; 1 for other
    algorithms."""
    if not isinstance(algorithm, PolicyGradient):
        return fields["loss_mask"].double()
    terms = policy_terms(ModelOutput(logprobs=logprobs), fields, sequences, algorithm.settings)
    weight, kept = correction_weights(terms, fields, algorithm.settings)
    return weight * kept


@contextmanager
def _in_float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _read(path: Path | None, run: Path | None, step: int) -> str:
    """Return the text of a case: a file, standard input, or a saved step. Raises ValueError where there is no
    such step."""
    if run is not None:
        found = sorted(run.rglob(step_file(Path("batches"), step).as_posix()))
        if len(found) != 1:
            raise ValueError(
                f"--from-run {run}: {len(found)} files of step {step} below this folder, expected 1; name the logs of "
                "a run with monitor.save_batches"
            )
        return gzip.decompress(found[0].read_bytes()).decode()
    return path.read_text(encoding="utf-8") if path and str(path) != "-" else sys.stdin.read()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; 2 where the input is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", nargs="?", type=Path, help="JSON file; default: standard input")
    parser.add_argument("--from-run", type=Path, help="folder of a run: its logs, or one above them")
    parser.add_argument("--step", type=int, help="with --from-run: the step, counted from 1 as in the metrics")
    options = parser.parse_args(arguments)
    if (options.from_run is None) != (options.step is None) or (options.from_run and options.case):
        parser.error("--from-run and --step belong together, and take the place of a file")
    try:
        case = json.loads(_read(options.case, options.from_run, options.step))
        if not isinstance(case, dict):
            raise ValueError("the input must be a JSON object with algorithm, settings and sequences")
        result = compute(case)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
