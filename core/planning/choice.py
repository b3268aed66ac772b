"""allocation_mode=search: the keys that stand in its place when a configuration is loaded."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from allocation import GPU, AllocationError
from core.config.load import LoadedConfig
from core.config.parsing.problems import ConfigError, Problem
from core.planning.gpus import PlanError, gpu_of_machine
from core.planning.lengths import Lengths
from core.planning.rates import Calibration, calibration_of
from core.planning.scene import Scene, scene_of
from core.planning.search import Found, Metric, Proposal, Spec, nothing_fits, search
from rollout.inference.registry import DEFAULT_BACKEND

logger = logging.getLogger(__name__)

Loader = Callable[[Sequence[str]], LoadedConfig]
"""Loads a configuration with these overrides after its own. Raises ConfigError."""


def searched(load: Loader) -> tuple[str, ...]:
    """Return the overrides of the fastest allocation of the GPUs of a configuration, whose allocation_mode is search.
    Raises ConfigError."""
    try:
        gpu = gpu_of_machine()
        if gpu is None:
            raise PlanError("this machine has no GPU; slipstream plan --search --gpu H100 proposes layouts anywhere")
        scene = scene_of(load([unplaced(load)]).config, gpu)
        calibration = calibration_of(gpu.name)
        if calibration is None:
            raise PlanError(f"no calibration for {gpu.name}; slipstream plan --calibrate measures it")
        num_gpus = scene.n_nodes * scene.n_gpus_per_node
        found = proposals(load, scene, calibration, usual_lengths(scene), num_gpus=num_gpus, most=1)
        if not found.best:
            raise PlanError(nothing_fits(scene, num_gpus))
    except (PlanError, AllocationError) as error:
        message = f"search: {error}; or write the layouts, or heuristic"
        raise ConfigError([Problem(key="allocation_mode", message=message)]) from None
    best = found.best[0]
    logger.info("allocation_mode=search: %s; %s", " ".join(best.overrides), best.lines[0])
    return best.overrides


def unplaced(load: Loader) -> str:
    """Return an allocation_mode for a search to begin with, which suits any batch. Raises PlanError for a run without
    servers."""
    config = load(["allocation_mode=heuristic"]).config
    if config.TRAINER_ONLY:
        raise PlanError("this experiment has no servers, and nothing to search for")
    others = config.n_nodes * config.n_gpus_per_node - 1
    side = f"allocation_mode={DEFAULT_BACKEND[GPU]}.d{max(1, others)}m1p1"
    return f"{side}+d1m1p1" if others else side


def usual_lengths(scene: Scene) -> Lengths:
    """Return the lengths of answers that are assumed where none are given: a third of the longest on average."""
    return Lengths(mean=max(1, scene.answer_tokens // 3), longest=max(1, scene.answer_tokens))


def proposals(
    load: Loader, scene: Scene, calibration: Calibration, answers: Lengths, *,
    num_gpus: int, metric: Metric = "tokens", fixed: Spec | None = None, most: int = 3,
) -> Found:  # fmt: skip
    """Search for allocations that a run with this configuration would start with. Raises PlanError."""

    def accepts(proposal: Proposal) -> bool:
        try:
            return scene_of(load(proposal.overrides).config, scene.gpu).actor.layout == proposal.scene.actor.layout
        except (ConfigError, PlanError, AllocationError):
            return False

    return search(
        scene, calibration, answers, num_gpus=num_gpus, accepts=accepts, metric=metric, fixed=fixed, most=most
    )
