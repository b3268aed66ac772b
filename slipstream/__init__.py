"""Reinforcement learning of language models on Megatron-core: the public Python API.

    import slipstream

    run = slipstream.train("examples/configs/ppo-gsm8k.yaml", trial_name="first", **{"ppo.kl_ctl": 0.0})
    print(run.metrics()[-1]["task_reward"])

Names are imported when they are first used, so `import slipstream` loads neither torch nor Ray.
"""

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from config_schema.section import Section as Section
    from config_schema.section import key as key
    from core.algorithms.base import Algorithm as Algorithm
    from core.algorithms.policy_gradient import PolicyGradient as PolicyGradient
    from core.config.algorithm import AlgorithmSettings as AlgorithmSettings
    from core.config.parsing.problems import ConfigError as ConfigError
    from core.data.rollout_batch import RolloutBatch as RolloutBatch
    from mcore_adapter.data.batch import ModelOutput as ModelOutput
    from mcore_adapter.data.batch import Sequences as Sequences
    from mcore_adapter.data.batch import sequence_mean as sequence_mean
    from rollout.journal import call_id as call_id
    from rollout.journal import recorded as recorded
    from rollout.programs import auxiliary as auxiliary
    from rollout.rewards.judge import Judge as Judge
    from rollout.sandbox.pool import Ran as Ran
    from rollout.sandbox.pool import run_python as run_python
    from rollout.types import Completion as Completion
    from rollout.types import GenerateRequest as GenerateRequest
    from rollout.types import Generator as Generator
    from rollout.types import Prompt as Prompt
    from rollout.types import Reward as Reward
    from rollout.types import Sampler as Sampler
    from rollout.types import SamplingParams as SamplingParams
    from rollout.types import Trajectory as Trajectory
    from rollout.types import Workflow as Workflow
    from rollout.workflows import TrajectoryBuilder as TrajectoryBuilder
    from rollout.workflows import sample_seed as sample_seed
    from slipstream.api import Run as Run
    from slipstream.api import RunError as RunError
    from slipstream.api import convert as convert
    from slipstream.api import evaluate as evaluate
    from slipstream.api import load_config as load_config
    from slipstream.api import train as train
    from tools.demo.data import make_demo_data as make_demo_data

__version__ = "0.1.0"

_HOME = {
    **dict.fromkeys(("Run", "RunError", "convert", "evaluate", "load_config", "train"), "slipstream.api"),
    **dict.fromkeys(
        (
            "Completion", "GenerateRequest", "Generator", "Prompt", "Reward", "Sampler", "SamplingParams", "Trajectory",
            "Workflow",
        ),
        "rollout.types",
    ),
    "Algorithm": "core.algorithms.base",
    "PolicyGradient": "core.algorithms.policy_gradient",
    "ConfigError": "core.config.parsing.problems",
    "AlgorithmSettings": "core.config.algorithm",
    **dict.fromkeys(("Section", "key"), "config_schema.section"),
    "ModelOutput": "mcore_adapter.data.batch",
    "RolloutBatch": "core.data.rollout_batch",
    "make_demo_data": "tools.demo.data",
    "Sequences": "mcore_adapter.data.batch",
    **dict.fromkeys(("call_id", "recorded"), "rollout.journal"),
    "auxiliary": "rollout.programs",
    "Judge": "rollout.rewards.judge",
    **dict.fromkeys(("Ran", "run_python"), "rollout.sandbox.pool"),
    **dict.fromkeys(("TrajectoryBuilder", "sample_seed"), "rollout.workflows"),
    "sequence_mean": "mcore_adapter.data.batch",
}  # fmt: skip
"""Public name -> the module that defines it."""

__all__ = ["__version__", *sorted(_HOME)]


_PACKAGES = ("allocation", "config_schema", "core", "mcore_adapter", "model_specs", "rollout", "tools", "tracing")


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    _refuse_hidden()
    found = globals()[name] = getattr(import_module(_HOME[name]), name)  # the next access does not come here
    return found


@cache
def _refuse_hidden() -> None:
    """Raise ImportError where another package has the name of one of Slipstream's and comes first on the path."""
    root = Path(__file__).resolve().parents[1]
    for name in _PACKAGES:
        spec = find_spec(name)
        place = spec and next(iter(spec.submodule_search_locations or ()), spec.origin)
        if place and Path(place).resolve() != root / name:
            raise ImportError(
                f"{place} has the name of Slipstream's package {name!r} and hides it: rename yours, or start the run "
                "with `slipstream train` in a shell"
            )


def __dir__() -> list[str]:
    return __all__
