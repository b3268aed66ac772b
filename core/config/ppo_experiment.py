"""The configuration tree of `ppo-math`."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain, count
from pathlib import Path
from typing import ClassVar, Self

from pydantic import model_validator

from allocation import GENERATOR_ROLE, TRAINER_ROLE
from config_schema.needs import Value, equals, fact, given, refused_without
from config_schema.section import Section, Violation, key, section
from core.config.algorithm import AlgorithmConfig, AlgorithmSettings, Correction, part_problems
from core.config.common import (
    CommonExperimentConfig,
    GenerationRoleConfig,
    Judged,
    MFCConfig,
    ModelTrainEvalConfig,
    ModelUse,
    RunIdentity,
    Summary,
    no_evaluation_data,
    reference_with_values,
    too_small_microbatches,
    untrained_model,
)
from core.config.parsing.problems import Problem, masked_urls
from core.config.ppo import (
    CRITIC,
    PAIRS,
    REFERENCE,
    SHOWN,
    DataSection,
    DemonstrationConfig,
    PPOHyperparameters,
    PromptOnlyDatasetConfig,
    SetConfig,
    StalenessConfig,
    TaskSetConfig,
)
from core.config.presets import PRESETS, with_preset
from core.config.runtime import (
    APART,
    AuxiliaryConfig,
    BenchConfig,
    EvaluationConfig,
    EvaluationSetConfig,
    ExperienceConfig,
    PushConfig,
    SamplesConfig,
    ServeConfig,
    SynchronizerConfig,
    WorkflowConfig,
)
from rollout.data.encoder import PromptFormat
from rollout.data.rows import PreferenceFields
from rollout.data.source import DataSource
from rollout.inference.backend import FlagValue, GeneratorConfig, WeightFormat
from rollout.rewards.config import RewardConfig
from rollout.rewards.load import judged_by_math
from rollout.types import SamplingParams

_REFERENCE = (REFERENCE | PAIRS).else_("it has no reference model")


class PPOMATHOptions(Section):
    """Keys of `ppo-math` alone."""

    actor: ModelTrainEvalConfig = section(ModelTrainEvalConfig, "The policy")
    critic: ModelTrainEvalConfig = section(
        ModelTrainEvalConfig, "The value model", needs=CRITIC, type={"is_critic": True}
    )
    ref: ModelTrainEvalConfig = section(ModelTrainEvalConfig, "The reference policy", needs=_REFERENCE)
    actor_train: MFCConfig = section(MFCConfig, "Training of the actor")
    critic_train: MFCConfig = section(MFCConfig, "Training of the critic", needs=CRITIC)
    actor_gen: GenerationRoleConfig = section(GenerationRoleConfig, "Slots of the generators")
    actor_inf: MFCConfig = section(MFCConfig, "Log-probabilities at the start of a batch (old_logprobs)")
    critic_inf: MFCConfig = section(MFCConfig, "The critic's values", needs=CRITIC)
    ref_inf: MFCConfig = section(MFCConfig, "Log-probabilities of the reference policy", needs=_REFERENCE)
    dataset: PromptOnlyDatasetConfig = key(description="Prompts to train on")
    task_sets: dict[str, TaskSetConfig] = key({}, "Sets of prompts by name, in place of dataset.path")
    ppo: PPOHyperparameters = section(PPOHyperparameters, "Advantages and loss of PPO and the other algorithms")
    group_size: int = key(1, "Completions sampled per prompt", ge=1, first=True)
    group_adv_norm: bool = key(
        False,
        "Normalize advantages within each group of completions (GRPO)",
        needs=equals("algorithm.advantage", "gae") & refused_without("group_size > 1"),
    )
    staleness: StalenessConfig = section(StalenessConfig, "Bound on the age of the weights that sampled a batch")
    algorithm: AlgorithmConfig = section(AlgorithmConfig, "Algorithm, off-policy correction, KL divergence, entropy")
    demonstrations: DemonstrationConfig = section(
        DemonstrationConfig, "Expert data or preferences beside rollouts", needs=SHOWN
    )
    generator: GeneratorConfig = section(GeneratorConfig, "Generators of all backends")
    experience: ExperienceConfig = section(ExperienceConfig, "Where episodes are kept")
    synchronizer: SynchronizerConfig = section(SynchronizerConfig, "Weights between a train job and explore jobs")
    auxiliary: AuxiliaryConfig = section(AuxiliaryConfig, "A frozen model beside the policy, such as a judge")
    serve: ServeConfig = section(ServeConfig, "Address and weights of a serve job")
    bench: BenchConfig = section(BenchConfig, "Models that a bench job evaluates")
    workflow: WorkflowConfig = section(WorkflowConfig, "Workflow")
    reward: RewardConfig = section(RewardConfig, "Scoring of completions")
    samples: SamplesConfig = section(SamplesConfig, "Answers of training as text")
    push: PushConfig = section(PushConfig, "Weight updates, sent by the trainer to the generators")
    evaluation: EvaluationConfig = section(
        EvaluationConfig,
        "Evaluation during training",
        needs=(given("evaluation.path") | given("evaluation.sets")) & fact("an evaluation that is due"),
    )


class PPOMATHConfig(CommonExperimentConfig, PPOMATHOptions):
    """`ppo-math`: asynchronous PPO on problems with verifiable answers."""

    NAME: ClassVar[str] = "ppo-math"
    RUN: ClassVar[str] = "core.experiments.ppo:run_ppo"
    TRAINER_ONLY: ClassVar[bool] = False
    LENGTH_KEYS: ClassVar[tuple[str, ...]] = ("dataset.max_prompt_len", "ppo.gen.max_new_tokens")
    EVALUATION_KEY: ClassVar[str] = "evaluation.path"

    @model_validator(mode="before")
    @classmethod
    def _fill_preset(cls, tree: object) -> object:
        """Fill in what algorithm.name stands for; keys that are given win."""
        return with_preset(tree) if isinstance(tree, Mapping) else tree

    def rules(self, at: str) -> Iterator[Violation]:
        yield from super().rules(at)
        yield from too_small_microbatches(self.roles, self.max_seqlen, self.LENGTH_KEYS)
        yield from () if self.evaluates else no_evaluation_data(self.exp_ctrl, self.EVALUATION_KEY)
        if self.group_adv_norm and self.group_size == 1:
            yield Violation(
                ("group_adv_norm", "group_size"),
                "group_adv_norm=true normalizes within a group and requires group_size of at least 2, got 1",
            )
        yield from self._data_rules()
        yield from untrained_model("actor", self.actor)
        yield from reference_with_values(self.ref)
        yield from self._critic_rules() if self.uses_critic else ()
        yield from self._store_rules()
        yield from self._replay_rules() if self.experience.replays else ()

    def _data_rules(self) -> Iterator[Violation]:
        if self.dataset.path and self.task_sets:
            yield Violation(
                ("dataset.path", "task_sets"), "must not be given with task_sets; make it one of them, or remove it"
            )
        elif not self.dataset.path and not self.task_sets:
            yield Violation(
                ("dataset.path", "task_sets"), "required: write the prompts to train on, or several sets in task_sets"
            )
        longest = self.ppo.gen.max_new_tokens
        for name, one in self.task_sets.items():
            if one.max_new_tokens is not None and one.max_new_tokens > longest:
                yield Violation(
                    (f"task_sets.{name}.max_new_tokens", "ppo.gen.max_new_tokens"),
                    f"{one.max_new_tokens} must be at most ppo.gen.max_new_tokens={longest}, the limit of all sets",
                )

    def _store_rules(self) -> Iterator[Violation]:
        yield from self.experience.job_rules(self.mode, self.synchronizer)
        if self.staleness.in_order and self.experience.over_rollout.is_on:
            message = (
                "in_order trains prompts in their order, so a step cannot leave out its slowest; write one of them"
            )
            yield Violation(("experience.over_rollout.ratio", "staleness.in_order"), message)
        yield from self._train_batch_rules()
        if self.job == "train" and not self.recovers:
            yield Violation(
                ("mode", "recover_mode", "exp_ctrl.benchmark_steps"),
                "mode=train needs recover checkpoints, which record the trained episodes of the store; write "
                "recover_mode=auto",
            )
        if self.job == "bench" and (self.bench.is_empty or not self.evaluates):
            yield Violation(
                ("bench.models", "evaluation.path"), "required with mode=bench: models, and sets to evaluate them on"
            )
        if self.job in APART:
            yield from self.synchronized.rules_within(self.staleness.max_staleness + 1)

    def _train_batch_rules(self) -> Iterator[Violation]:
        given = self.experience.train_batch_size
        if given is None:
            return
        if given % self.group_size:
            below = given - given % self.group_size
            near = " or ".join(str(size) for size in (below, below + self.group_size) if size)
            yield Violation(
                ("experience.train_batch_size", "group_size"),
                f"a step trains on whole groups, and {given} answers are no multiple of group_size={self.group_size}; "
                f"nearest: {near}",
            )
        for name, one in self.task_sets.items():
            if one.group_size not in (None, self.group_size):
                yield Violation(
                    ("experience.train_batch_size", f"task_sets.{name}.group_size"),
                    f"counts answers of groups of group_size={self.group_size}, and task_sets.{name} has groups of "
                    f"{one.group_size}; remove it, and write the prompts of a step as dataset.train_bs_n_seqs",
                )

    def _replay_rules(self) -> Iterator[Violation]:
        bound, of_new, key = self.replay_max_age, self.staleness.max_staleness, "experience.replay.max_age"
        if bound == 0:
            yield Violation(
                (key, "staleness.max_staleness"),
                "null stands for max_staleness=0, and replayed tokens are at least one step old; write a number",
            )
        elif bound > of_new and self.correction == "none":
            yield Violation(
                (key, "algorithm.correction"),
                f"{bound} is above staleness.max_staleness={of_new}, and algorithm.correction=none weighs old tokens "
                "as new ones; write algorithm.correction=decoupled, or a lower max_age",
            )

    @property
    def ends_slow_prompts(self) -> bool:
        """True if the sampling of prompts that take long is ended."""
        return self.workflow.dynamic_timeout is not None

    def rules_of_turns(self) -> Iterator[Violation]:
        """Yield what generators contradict that share GPUs with the trainer."""
        limit, staleness = self.workflow.dynamic_timeout, self.staleness.max_staleness
        if limit is not None and staleness > 0:
            yield Violation(
                ("workflow.dynamic_timeout", "allocation_mode", "staleness.max_staleness"),
                f"dynamic_timeout={limit:g} with max_staleness={staleness} would end prompts as slow that an update "
                "has paused, as generators share GPUs with the trainer; write null, + for GPUs of their own in "
                "allocation_mode, or max_staleness=0",
            )

    @property
    def replay_max_age(self) -> int:
        """Largest age of replayed tokens in steps."""
        return self.experience.oldest_replayed(default=self.staleness.max_staleness)

    def masked(self) -> Self:
        """Return the same without secrets, that of experience.path included."""
        store = self.experience.model_copy(update={"path": masked_urls(self.experience.path)})
        return super().masked().model_copy(update={"experience": store})

    @property
    def auxiliary_model(self) -> str:
        """Folder of the auxiliary model; empty: there is none."""
        return self.auxiliary.path

    @property
    def num_auxiliary_servers(self) -> int:
        """Generators that serve the auxiliary model."""
        return self.auxiliary.num_servers if self.auxiliary_model else 0

    @property
    def experience_path(self) -> str:
        path = self.experience.path
        return path if not path or "://" in path else str(Path(path).expanduser().absolute())

    @property
    def is_synchronous(self) -> bool:
        """True if trainer and generators take turns: every token is sampled by the weights that it trains."""
        return self.staleness.max_staleness == 0

    @property
    def server_flags(self) -> dict[str, Mapping[str, FlagValue]]:
        """Flags of the servers by the section that has them; the later section wins."""
        return {"actor.sglang": self.actor.sglang, "generator.flags": self.generator.flags}

    @property
    def merged_flags(self) -> dict[str, FlagValue]:
        """Flags of the servers, of both sections."""
        return {**self.actor.sglang, **self.generator.flags}

    @property
    def steps_ahead(self) -> int:
        """How many steps after the version that samples it a prompt may be due."""
        fixed = self.synchronized.steps_ahead if self.job in APART else None
        return self.staleness.max_staleness if fixed is None else fixed

    @property
    def loaded_models(self) -> list[tuple[str, str]]:
        """The folders of models, with their keys, that a job loads in place of actor.path."""
        if self.job == "bench":
            return [("bench.models", model) for model in self.bench.models]
        if self.job == "serve" and self.serve.model and not self.serve.follow:
            return [("serve.model", self.serve.model)]
        return []

    @property
    def weights_folder(self) -> str:
        """Folder of the weights that a train job publishes."""
        given, store = self.synchronizer.folder, self.experience_path
        if "://" in store and not given:
            return ""
        return str(Path(given).expanduser().absolute() if given else Path(store).parent / "weights")

    def _critic_rules(self) -> Iterator[Violation]:
        if not self.critic.has_folder and not self.critic.init_critic_from_actor:
            yield Violation(
                ("critic.path", "critic.init_critic_from_actor", "ppo.disable_value"),
                "required with a critic: the folder of a value model; or initialize it from the actor with "
                "critic.init_critic_from_actor=true; or train without one with ppo.disable_value=true",
            )
        if not self.critic.optimizer.trains:
            yield Violation(("critic.optimizer.type",), "the critic is trained; write adam, or ppo.disable_value=true")

    def warnings(self) -> Iterator[str]:
        yield from self.ppo.gen.warnings()
        quantizes, algorithm = self.generator.quantizes, self.algorithm
        if quantizes and self.correction in ("none", "bypass"):
            yield (
                f"{self.generator.format_setting}: completions come from weights that are rounded to FP8, and "
                f"algorithm.correction={self.correction} has no importance weight between them and the trainer's; "
                "write algorithm.correction=tis"
            )
        if quantizes and self.push.never_verifies:
            yield (
                f"push.verify=never: with {self.generator.format_setting}, the formats of the servers' weights are "
                "not checked; write push.verify=first"
            )
        if self.uses_reference and algorithm.has_flat_kl:
            yield (
                "algorithm.kl_estimator=k1: in the loss its gradient has zero mean on policy; write "
                "algorithm.kl_gradient=k2 for the gradient of the KL divergence"
            )

    @property
    def algorithm_name(self) -> str:
        """A key of PRESETS, or package.module:Class."""
        return self.algorithm.name or "ppo"

    @property
    def uses_critic(self) -> bool:
        name = self.algorithm.name
        # An unknown name has none: the error about the name is the only one that helps.
        of_preset = (name is None or name in PRESETS) and self.algorithm.uses_values
        has_critic = of_preset or (name is not None and ":" in name)
        return self.ppo.has_values and has_critic

    @property
    def uses_reference(self) -> bool:
        return self.ppo.kl_ctl > 0 or self.algorithm.mixes_pairs

    @property
    def preset(self) -> Mapping[str, Value]:
        """Keys that algorithm.name sets, and their values."""
        return PRESETS[self.algorithm_name].values if self.algorithm_name in PRESETS else {}

    @property
    def own_algorithm(self) -> str | None:
        """The import path of an algorithm of the user."""
        return None if self.algorithm.name in PRESETS else self.algorithm.name

    @property
    def algorithm_settings(self) -> AlgorithmSettings:
        """What an algorithm reads of the configuration, with what null leaves open filled in."""
        decided = {
            "correction": self.correction,
            "disable_value": not self.uses_critic,
            "value_norm": self.ppo.value_norm and self.uses_critic,
            "group_adv_norm": self.group_adv_norm,
            "max_new_tokens": self.ppo.gen.max_new_tokens,
        }
        ppo, algorithm = self.ppo.model_dump(exclude={"gen"}), self.algorithm.model_dump(exclude={"name", "options"})
        return AlgorithmSettings.model_validate({**ppo, **algorithm, **decided})

    @property
    def num_minibatches(self) -> int:
        """Minibatches of a step."""
        return self.ppo.ppo_n_minibatches

    @property
    def algorithm_case(self) -> tuple[str | None, dict[str, object]]:
        """Name and settings as those of a case of `python -m tools.loss`, without the entropy bonus: no entropy is
        saved."""
        ppo = {f"ppo.{key}": value for key, value in self.ppo.model_dump(exclude={"gen"}).items()}
        return self.algorithm.name, {
            **self.algorithm.model_dump(exclude={"name"}),
            "entropy_coeff": 0.0,
            **ppo,
            "ppo.gen.max_new_tokens": self.ppo.gen.max_new_tokens,
            "staleness.max_staleness": self.staleness.max_staleness,
            "group_adv_norm": self.group_adv_norm,
        }

    @property
    def in_turns(self) -> Self:
        """The same run with trainer and generators in turns, that is, with max_staleness=0."""
        return self.model_copy(update={"staleness": self.staleness.model_copy(update={"max_staleness": 0})})

    @property
    def has_groups(self) -> bool:
        """True if a prompt has several completions."""
        return self.group_size > 1

    def part_problems(self) -> Iterator[Problem]:
        """Yield combinations of parts of the algorithm that compute nothing sensible."""
        yield from self.algorithm.stray_options()
        yield from part_problems(
            self.algorithm_settings,
            name=self.algorithm_name,
            has_groups=self.has_groups,
            is_synchronous=self.is_synchronous,
        )
        if self.algorithm.mixes_demonstrations:
            by_name = "algorithm.demonstration_weight" in self.preset
            for broken in self.demonstrations.problems(
                self.demonstrations_per_step,
                num_minibatches=self.num_minibatches,
                wanted_by=f"algorithm.name={self.algorithm_name}" if by_name else "it",
            ):
                yield Problem(key=broken.keys[0], message=broken.message)

    @property
    def algorithm_keys(self) -> dict[str, Section]:
        """Sections that an algorithm reads, by the prefix of their keys; none without algorithm.name."""
        return {} if self.algorithm.name is None else {"ppo.": self.ppo, "algorithm.": self.algorithm, "": self}

    @property
    def differences(self) -> tuple[str, ...]:
        """Defaults that decide how this run trains and that the schema of the tutorials does not have: what they are
        here, and there."""
        if self.is_synchronous or "max_staleness" in self.staleness.model_fields_set:
            return ()
        bound = f"staleness.max_staleness={self.staleness.max_staleness} (there: synchronous, 0)"
        if self.correction != "decoupled" or self.algorithm.name is not None:
            return (bound,)
        cap = self.algorithm.behave_imp_weight_cap
        return bound, f"algorithm.correction=decoupled with behave_imp_weight_cap={cap} (there: none)"

    @property
    def critic_path(self) -> str:
        return self.critic.folder_or_of(self.actor)

    @property
    def ref_path(self) -> str:
        return self.ref.folder_or_of(self.actor)

    @property
    def correction(self) -> Correction:
        """Off-policy correction; where it is not given, the staleness bound decides."""
        return self.algorithm.correction or ("bypass" if self.is_synchronous else "decoupled")

    @property
    def max_seqlen(self) -> int:
        """Longest possible sequence, prompt and answer, in tokens."""
        return self.dataset.max_prompt_len + self.ppo.gen.max_new_tokens

    @property
    def roles(self) -> dict[str, MFCConfig]:
        """The trainer's uses of models that this run has, by role."""
        roles = {"actor_train": self.actor_train, "actor_inf": self.actor_inf}
        if self.uses_critic:
            roles |= {"critic_train": self.critic_train, "critic_inf": self.critic_inf}
        if self.uses_reference:
            roles |= {"ref_inf": self.ref_inf}
        return roles

    @property
    def batch_roles(self) -> tuple[str, ...]:
        return tuple(self.roles)

    @property
    def placed_roles(self) -> dict[str, GenerationRoleConfig]:
        return {GENERATOR_ROLE: self.actor_gen, **self.roles}

    @property
    def models(self) -> dict[str, ModelTrainEvalConfig]:
        return {"actor": self.actor, "critic": self.critic, "ref": self.ref}

    @property
    def model_uses(self) -> tuple[ModelUse, ...]:
        policy = (GENERATOR_ROLE, TRAINER_ROLE, "actor_inf")
        uses = [ModelUse(key="actor", section=self.actor, path=self.model_folder, roles=policy, tokenizer=True)]
        if self.uses_critic:
            value = ("critic_train", "critic_inf")
            uses.append(ModelUse(key="critic", section=self.critic, path=self.critic_path, roles=value))
        if self.uses_reference:
            uses.append(ModelUse(key="ref", section=self.ref, path=self.ref_path, roles=("ref_inf",)))
        return tuple(uses)

    @property
    def batch_size(self) -> int:
        answers = self.experience.train_batch_size
        return self.dataset.train_bs_n_seqs if answers is None else max(1, answers // self.group_size)

    @property
    def batch_key(self) -> str:
        answers = self.experience.train_batch_size
        return "dataset.train_bs_n_seqs" if answers is None else "experience.train_batch_size"

    @property
    def synchronized(self) -> SynchronizerConfig:
        """The section `synchronizer` with its counts in training steps, rounded up, in place of those of explore
        jobs."""
        given, prompts = self.synchronizer, self.dataset.train_bs_n_seqs
        steps = {name: -(-getattr(given, name) * prompts // self.batch_size) for name in ("interval", "offset")}
        return given.model_copy(update=steps)

    @property
    def batch_shape(self) -> dict[str, int]:
        return {
            "train_bs_n_seqs": self.batch_size,
            "group_size": self.group_size,
            "ppo_n_minibatches": self.num_minibatches,
        }

    @property
    def trained_tokens(self) -> tuple[int, int]:
        """Tokens of the longest (prompt, answer) of a batch."""
        return self.dataset.max_prompt_len, self.ppo.gen.max_new_tokens

    @property
    def prompt_format(self) -> PromptFormat:
        """How prompts are written; those that reward.function=math judges ask for a box."""
        return self.prompt.prompt_format(boxed=judged_by_math(self.reward.spec))

    @property
    def sets(self) -> dict[str, TaskSetConfig]:
        """Every set of prompts to train on, by name, with what its nulls stand for but `workflow` and `system`."""
        if self.task_sets:
            return {name: self._filled(one) for name, one in self.task_sets.items()}
        data = self.dataset
        alone = TaskSetConfig.model_validate(data.model_dump(include=set(TaskSetConfig.model_fields)))
        return {data.source(data.path).name: self._filled(alone)}

    def _filled(self, one: TaskSetConfig) -> TaskSetConfig:
        of_run: dict[str, Value] = {
            "order": "shuffled" if self.shuffle_dataset else "sequential",
            "group_size": self.group_size,
            "reward": self.reward.spec,
            "right_at": self._right_at(one.reward),
            **self.ppo.gen.of_sets,
        }
        return one.model_copy(update={name: value for name, value in of_run.items() if getattr(one, name) is None})

    @property
    def right_rewards(self) -> dict[str, float | None]:
        """The reward from which an answer is right, by each of several task sets."""
        return {name: one.right_at for name, one in self.sets.items() if self.task_sets}

    def _right_at(self, own: str | None) -> float | None:
        """Return the reward of a right answer by a set's own function; `own` None: by that of the run."""
        return self.reward.threshold if own is None else RewardConfig(function=own).threshold

    @property
    def evaluation_sets(self) -> dict[str, EvaluationSetConfig]:
        """Every evaluation set by the name of its metrics, numbered where two are the same, with what its nulls stand
        for but `workflow` and `system`."""
        given, found = self.evaluation, dict[str, EvaluationSetConfig]()
        data = given.model_dump(include=set(DataSection.model_fields))
        for path in given.paths:
            one = EvaluationSetConfig.model_validate({**data, "path": path})
            name = self.held_out(one).name
            names = chain([name], (f"{name}-{number}" for number in count(len(found))))
            found[next(free for free in names if free not in found.keys() | given.sets)] = self._measured(one)
        return found | {name: self._measured(one) for name, one in given.sets.items()}

    def _measured(self, one: EvaluationSetConfig) -> EvaluationSetConfig:
        given = self.evaluation
        of_all: dict[str, Value] = {
            "num_prompts": given.num_prompts,
            "repeat": given.repeat,
            "max_new_tokens": given.max_new_tokens or self.ppo.gen.max_new_tokens,
            "temperature": given.temperature,
            "top_p": 1.0,
            "top_k": -1,
            "reward": self.reward.spec,
            "right_at": self._right_at(one.reward),
        }
        return one.model_copy(update={name: value for name, value in of_all.items() if getattr(one, name) is None})

    def held_out(self, one: EvaluationSetConfig) -> DataSource:
        """Return the source of an evaluation set."""
        return replace(one.source(one.path), hints=self.dataset.columns, prefer="test")

    @property
    def placed_sets(self) -> Iterator[tuple[str, TaskSetConfig | EvaluationSetConfig, DataSource]]:
        """Yield section, settings and source of each of `sets` and `evaluation_sets`."""
        for name, one in self.sets.items():
            yield f"task_sets.{name}" if self.task_sets else "dataset", one, one.place
        for name, held_out in self.evaluation_sets.items():
            at = f"evaluation.sets.{name}" if name in self.evaluation.sets else "evaluation"
            yield at, held_out, self.held_out(held_out)

    def judged_by_math(self, one: SetConfig) -> bool:
        """Return whether math judges a set: its rows need solutions, and its prompts ask for a box."""
        return judged_by_math(self.set_reward(one))

    def set_reward(self, one: SetConfig) -> str:
        """Return what scores the completions of a set."""
        return one.reward or self.reward.spec

    @property
    def own_sets(self) -> dict[str, SetConfig]:
        """Every set with settings of its own by its section."""
        train: dict[str, SetConfig] = {f"task_sets.{name}": one for name, one in self.task_sets.items()}
        return train | {f"evaluation.sets.{name}": one for name, one in self.evaluation.sets.items()}

    @property
    def rewards(self) -> dict[str, str]:
        """What scores completions, by key: of the run, and of sets with a reward of their own."""
        own = {f"{at}.reward": one.reward for at, one in self.own_sets.items() if one.reward}
        return {"reward.function": self.reward.spec, **own}

    def set_format(self, one: SetConfig) -> PromptFormat:
        """Return how the prompts of a set are written."""
        written = self.prompt.prompt_format(boxed=self.judged_by_math(one))
        return written if one.system is None else replace(written, system=one.system)

    def set_sampling(
        self, one: TaskSetConfig | EvaluationSetConfig, stop: tuple[int, ...], pause: tuple[int, ...]
    ) -> SamplingParams:
        """Return how completions for one of `sets` or `evaluation_sets` are sampled. `stop`: end tokens of the
        tokenizer; `pause`: tokens of ppo.gen.stop."""
        own = one.model_dump(include={"temperature", "top_p", "top_k", "max_new_tokens"})
        if isinstance(one, TaskSetConfig):
            own["min_new_tokens"] = self.ppo.gen.min_new_tokens
        return SamplingParams(**own, stop_token_ids=stop, pause_token_ids=pause)

    @property
    def sampling(self) -> Self:
        """The configuration itself, as it has generators."""
        return self

    @property
    def longest_sequences(self) -> dict[str, tuple[int, int]]:
        """Key of the longest answer -> tokens of the longest (prompt, answer) that generators sample."""
        answers = {"ppo.gen": self.ppo.gen.max_new_tokens, "evaluation": self.evaluation.max_new_tokens}
        answers |= {f"evaluation.sets.{name}": one.max_new_tokens for name, one in self.evaluation.sets.items()}
        prompt = self.dataset.max_prompt_len
        return {f"{key}.max_new_tokens": (prompt, longest) for key, longest in answers.items() if longest is not None}

    @property
    def identity(self) -> RunIdentity:
        return self._identity(
            batch_size=self.batch_size,
            group_size=self.group_size,
            algorithm="preset" if self.algorithm_name in PRESETS else self.algorithm_name,
        )

    def generator_dtype(self, *, on_gpu: bool) -> WeightFormat:
        """Return the format of the generators' weights, with a trainer on GPUs or on the CPU."""
        return self.generator.dtype or self.actor.dtype(on_gpu=on_gpu)

    @property
    def evaluates(self) -> bool:
        return bool(self.evaluation.paths or self.evaluation.sets)

    @property
    def summary(self) -> Summary:
        return Summary(
            model=self.model_folder,
            optimizer=self.actor.optimizer.about,
            batch=f"{self.batch_size} prompts × {self.group_size} answers a step",
            sampled=(f"{self.ppo.gen.max_new_tokens} tokens an answer", f"reward {self._given_by}"),
            algorithm=self.algorithm_name,
        )

    @property
    def _given_by(self) -> str:
        """What gives the reward: a reward function, or a workflow that may give its own."""
        types = dict.fromkeys(self.workflow.types)
        own = [f"by {name}" for name in types if name not in ("math", "tools")]
        return " or ".join([*own, self.reward.spec] if types.keys() != {"environment"} else own)

    @property
    def judged_by(self) -> Judged:
        gen = self.ppo.gen
        return Judged(self.workflow, self.reward.spec, self.reward.threshold, gen.max_new_tokens, gen.stop)

    @property
    def data_sources(self) -> tuple[tuple[str, DataSource], ...]:
        return tuple((f"{at}.path", source) for at, _, source in self.placed_sets)

    @property
    def demonstration_pairs(self) -> PreferenceFields | None:
        """Columns of the pairs beside rollouts. None: the rows are prompts with answers."""
        return self.demonstrations.pair_columns if self.algorithm.mixes_pairs else None

    @property
    def demonstrations_per_step(self) -> int:
        """Demonstrations of a step, beside its completions: rows with one answer, or pairs."""
        if not self.algorithm.mixes_demonstrations or not self.demonstrations.are_given:
            return 0
        answers = 1 if self.demonstration_pairs is None else 2
        return self.demonstrations.beside(self.batch_size * self.group_size / answers)

    def max_tokens_per_mb(self, role: str) -> int:
        """Return the maximum of tokens of one forward pass of `role` (a key of `roles`)."""
        return self.roles[role].most_tokens(self.actor_train, self.max_seqlen)
