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
token.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
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
from core.data.rollout_batch import RolloutBatch
from mcore_adapter.data.batch import sequence_of_token
from mcore_adapter.data.sequences import Sequences
from mcore_adapter.data.weights import weigh_tokens
from mcore_adapter.forward import ModelOutput

PER_TOKEN = ("logprobs", "old_logprobs", "rollout_logprobs", "ref_logprobs", "values", "entropy", "versions")
KEYS = (*PER_TOKEN, "mask", "reward", "group", "truncated", "advantage")


def compute(case: Mapping[str, Any]) -> dict[str, Any]:
    """Return the result of a CASE, see above. Raises ValueError that names the key, the rule and the value."""
    with _in_float64():
        return _compute(case)


def _compute(case: Mapping[str, Any]) -> dict[str, Any]:
    tokens = _Tokens.read(case)
    config = _config(case, tokens)
    algorithm = build_algorithm(config)
    algorithm.load_state_dict(case.get("state", {}))
    batch = tokens.batch()
    packed = batch.to_packed()
    needed = {FIELDS[name]: tokens.required(name) for name in sorted(algorithm.passes)}
    ages = batch.token_ages(int(case.get("version", batch.versions.max())))
    known = {**packed.fields, **needed, "loss_mask": packed.loss_mask, "ages": ages}
    trained_on, figures = algorithm.advantages(batch, known)
    packed = packed.with_fields(**{**needed, **trained_on, **tokens.given_advantages()})
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


@dataclass(frozen=True, kw_only=True)
class _Tokens:
    """The sequences of a case, each behind one prompt token, laid end to end."""

    sequences: Sequence[Mapping[str, Any]]
    lens: Sequence[int]

    @classmethod
    def read(cls, case: Mapping[str, Any]) -> _Tokens:
        sequences = case.get("sequences")
        if not isinstance(sequences, list) or not sequences:
            raise ValueError(f"sequences: must be a list of at least one sequence, got {sequences!r}")
        for i, sequence in enumerate(sequences):
            _check(f"sequences[{i}]", sequence)
        return cls(sequences=sequences, lens=[len(s["logprobs"]) for s in sequences])

    @property
    def groups(self) -> list[str]:
        """The group of each sequence."""
        return [str(s.get("group", f"\0{i}")) for i, s in enumerate(self.sequences)]

    def has(self, name: str) -> bool:
        return all(name in s for s in self.sequences)

    def required(self, name: str) -> Tensor:
        """Return a value of every token, 0 for the prompts: [T]. Raises ValueError where a sequence has none."""
        if name == "old_logprobs" and not any(name in s for s in self.sequences):
            name = "logprobs"  # before the first update of a step they are the same
        for i, sequence in enumerate(self.sequences):
            if name not in sequence:
                raise ValueError(f"sequences[{i}].{name}: required by the algorithm with these settings; add it")
        return torch.from_numpy(self._column(name, 0.0))

    def _column(self, name: str, prompt: float) -> np.ndarray:
        return np.concatenate([[prompt, *map(float, s[name])] for s in self.sequences])

    def _mask(self) -> np.ndarray:
        rows = zip(self.sequences, self.lens, strict=True)
        return np.concatenate([[False, *map(bool, s.get("mask", [True] * n))] for s, n in rows])

    def given_advantages(self) -> dict[str, Tensor]:
        """Return the field of advantages, where the case has them."""
        if not any("advantage" in s for s in self.sequences):
            return {}
        rows = []
        for i, (sequence, n) in enumerate(zip(self.sequences, self.lens, strict=True)):
            if "advantage" not in sequence:
                raise ValueError(f"sequences[{i}].advantage: missing; give one for every sequence, or for none")
            given = sequence["advantage"]
            rows.append([0.0, *(given if isinstance(given, list) else [given] * n)])
        return {"advantages": torch.from_numpy(np.concatenate(rows).astype(np.float64) * self._mask())}

    def batch(self) -> RolloutBatch:
        """Build what the training loop takes from the rollout service, in float64."""
        lens = np.array(self.lens, np.int64) + 1
        names = self.groups
        groups = list(dict.fromkeys(names))
        behaviour = next(n for n in ("rollout_logprobs", "old_logprobs", "logprobs") if self.has(n))
        mask = self._mask()
        versions = self._column("versions", -1).astype(np.int32) if self.has("versions") else np.where(mask, 0, -1)
        ends = lens.cumsum()
        sampled = [np.flatnonzero(versions[end - n : end] >= 0) for end, n in zip(ends, lens, strict=True)]
        return RolloutBatch(
            token_ids=np.zeros(int(lens.sum()), np.int32),
            cu_seqlens=np.concatenate((np.zeros(1, np.int64), ends)),
            loss_mask=mask,
            rollout_logprobs=self._column(behaviour, 0.0) * mask,
            versions=versions.astype(np.int32),
            rewards=np.array([float(s.get("reward", 0.0)) for s in self.sequences]),
            group_ids=np.array([groups.index(name) for name in names]),
            prompt_lens=np.array([int(s[0]) if s.size else 1 for s in sampled]),
            no_eos=np.array([bool(s.get("truncated", False)) for s in self.sequences]),
            positions=np.arange(len(groups)),
        )

    def cut(self, values: Tensor) -> list[list[float]]:
        """Cut [T] into the values of each sequence without its prompt token."""
        return [part[1:].tolist() for part in values.double().split([n + 1 for n in self.lens])]

    def advantages(self, values: Tensor) -> list[float | list[float]]:
        """Cut [T] into the advantage of each sequence, a list per token where its trained tokens differ."""
        masks = self.cut(torch.from_numpy(self._mask()))
        out: list[float | list[float]] = []
        for advantages, mask in zip(self.cut(values), masks, strict=True):
            different = {a for a, trained in zip(advantages, mask, strict=True) if trained}
            out.append(different.pop() if len(different) == 1 else advantages if different else 0.0)
        return out


def _check(name: str, sequence: Any) -> None:
    """Raise ValueError for a sequence that has unknown keys, no log-probabilities, or lists of unequal length."""
    if not isinstance(sequence, dict) or not isinstance(sequence.get("logprobs"), list) or not sequence["logprobs"]:
        raise ValueError(f"{name}: must be an object with a list of at least one number under logprobs")
    for key in sequence:
        if key not in KEYS:
            raise ValueError(f"{name}.{key}: unknown key; use one of {', '.join(KEYS)}")
    count = len(sequence["logprobs"])
    for key in (*PER_TOKEN, "mask", "advantage"):
        value = sequence.get(key)
        if isinstance(value, list) and len(value) != count:
            raise ValueError(f"{name}.{key}: has {len(value)} values, logprobs has {count}; give one for each token")
        if value is not None and not isinstance(value, list) and key != "advantage":
            raise ValueError(f"{name}.{key}: must be a list of {count} values, got {value!r}")


def _config(case: Mapping[str, Any], tokens: _Tokens) -> PPOMATHConfig:
    """Build the configuration that trains so. Raises ValueError for settings that a run would refuse."""
    given = case.get("settings", {})
    if not isinstance(given, dict):
        raise ValueError(f"settings: must be an object of keys and values, got {given!r}")
    tree: dict[str, Any] = {
        "experiment_name": "loss", "trial_name": "loss", "dataset": {"path": "none"},
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
