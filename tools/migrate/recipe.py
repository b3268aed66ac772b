"""From translated values to a recipe that passes a dry run, but for paths that do not exist on this host."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_NAME = re.compile(r"[^A-Za-z0-9._+=-]+")
_LAYOUT = re.compile(r"([dptm])(\d+)")


def completed(ours: Mapping[str, Any], *, source: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return translated values without those that have no effect here, and with what a run needs. `source`: name for an
    experiment without one."""
    values = {"ppo.kl_ctl": 0.0, "experiment_name": source, **ours}
    for key in ("experiment_name", "trial_name"):
        if key in values:
            values[key] = _NAME.sub("-", str(values[key])).strip("-.") or source
    for key in [key for key in values if "_freq_" in key or key in ("recover_keep", "exp_ctrl.total_train_steps")]:
        if not isinstance(values[key], int | float) or values[key] <= 0:
            del values[key]  # -1: never
    if "evaluation.path" not in values:
        values = {key: v for key, v in values.items() if "eval_" not in key and not key.startswith("evaluation.")}
    apart = ("experience.", "synchronizer.") if values.get("mode", "both") == "both" else ()
    values = {key: v for key, v in values.items() if not (apart and key.startswith(apart[1]))}
    if values.get("algorithm.name", "ppo") == "ppo" and "critic.path" not in values:
        values["critic.init_critic_from_actor"] = True
    values["allocation_mode"] = _allocation(values, given)
    return values


def _allocation(values: Mapping[str, Any], given: Mapping[str, Any]) -> str:
    """Return half of the GPUs for generators and half for the trainer, or the layout that was given."""
    if isinstance(written := given.get("allocation_mode"), str):
        parts = [dict(_LAYOUT.findall(part.rpartition(".")[2])) for part in written.split("+")]
        sides = [f"d{p.get('d', 1)}m{p.get('t', p.get('m', 1))}p{p.get('p', 1)}" for p in parts]
        return f"sglang.{sides[0]}" + "".join(f"+{side}" for side in sides[1:2])
    gpus = int(values.get("n_nodes", 1)) * int(values.get("n_gpus_per_node", 2))
    return f"sglang.d{gpus // 2}m1p1+d{gpus - gpus // 2}m1p1" if gpus > 1 else "sglang.d1m1p1"


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by dotted key as sections."""
    tree: dict[str, Any] = {}
    for key, value in values.items():
        *sections, name = key.split(".")
        table = tree
        for section in sections:
            table = table.setdefault(section, {})
        table[name] = value
    return tree
