"""The workflow of environments: the policy and a game or task answer each other until it is over."""

from importlib.util import find_spec

from pydantic import field_validator

from config_schema.section import Section, key
from rollout.data.encoder import Encoder
from rollout.environments.pool import EnvironmentPool
from rollout.environments.protocol import ADAPTERS, LIBRARIES, check_methods
from rollout.plugins import find_plugin
from rollout.programs import row_of
from rollout.rewards.pool import RewardPool
from rollout.sessions.bridge import Bridge
from rollout.trajectories import Conversation, all_of, sample_seed
from rollout.types import Prompt, Sampler, SamplingParams, Tokenizer, Trajectory


class EnvironmentWorkflow:
    """Runs an environment for each sample of a prompt. Its reward is the sum of the rewards of its steps.

    With a chat template, observations are the user's turns. Without one, they follow the prompt as they are."""

    class Config(Section):
        """What workflow.options may contain."""

        environment: str = key(
            description="package.module:Class, or textarena:ID, reasoning_gym:NAME, gymnasium:ID, openenv:URL"
        )
        max_turns: int = key(10, ge=1, description="Answers of the policy")
        num_workers: int = key(2, ge=1, description="Processes that hold the environments")
        setup_seconds: float = key(60.0, gt=0, description="Time limit of reset()")
        step_seconds: float = key(10.0, gt=0, description="Time limit of step()")
        context_tokens: int = key(4096, ge=1, description="Tokens of a conversation")

        @field_validator("environment")
        @classmethod
        def _check_environment(cls, environment: str) -> str:
            library = environment.partition(":")[0]
            if library not in ADAPTERS:
                found = find_plugin(environment, kind="environment")
                if isinstance(found, type):
                    check_methods(environment, found)
            elif library in LIBRARIES and find_spec(library) is None:
                raise ValueError(f"{environment}: {library} is not installed; pip install {library.replace('_', '-')}")
            return environment

    def __init__(
        self,
        *,
        tokenizer: Tokenizer,
        reward_pool: RewardPool,
        sampling: SamplingParams,
        group_size: int,
        seed: int,
        options: Config,
        encoder: Encoder | None = None,
    ) -> None:
        self._encoder = encoder or Encoder(tokenizer)
        self._bridge = Bridge(self._encoder)
        self._sampling, self._group_size, self._seed, self._options = sampling, group_size, seed, options
        self._pool = EnvironmentPool(
            options.environment, num_workers=options.num_workers, setup_seconds=options.setup_seconds,
            step_seconds=options.step_seconds,
        )  # fmt: skip

    async def run(self, prompt: Prompt, generator: Sampler) -> list[Trajectory]:
        """Return one trajectory for each sample. Samples of a prompt have the same environment. Raises
        EnvironmentFailure."""
        return await all_of(self._sample(prompt, generator, number) for number in range(self._group_size))

    async def close(self) -> None:
        """End the processes of the environments."""
        self._pool.close()

    async def _sample(self, prompt: Prompt, generator: Sampler, number: int) -> Trajectory:
        row = {**row_of(prompt), "solutions": prompt.solutions}
        async with self._pool.open(f"sample {number}") as environment:
            observation = await environment.reset(row, sample_seed(self._seed, prompt.epoch, prompt.index, 0))
            sample = Conversation(
                prompt, number=number, start=self._opening(prompt, observation),
                context_tokens=self._options.context_tokens,
                opening=f"the first observation of {self._options.environment}",
            )  # fmt: skip
            reward, num_turns, done = 0.0, 0, False
            while not sample.is_full:
                completion = await sample.answer(generator, self._sampling, seed=self._seed)
                num_turns += 1
                if sample.is_full:  # half an action is none
                    sample.sampled(completion, state=observation)
                    break
                text = self._bridge.text(completion.token_ids.tolist())
                state, action = observation, self._bridge.read(text, None)[1]
                observation, step_reward, done = await environment.step(action)
                sample.sampled(completion, reward=step_reward, state=state)
                reward += step_reward
                if done or num_turns == self._options.max_turns:
                    break
                sample.continue_with(self._following(text, completion.token_ids.tolist(), observation))
        metrics = {"num_turns": num_turns, "finished": done, "context_full": sample.is_full}
        return sample.build(reward, {name: float(value) for name, value in metrics.items()})

    def _opening(self, prompt: Prompt, observation: str) -> list[int]:
        if self._encoder.chat is not None:
            return self._bridge.prompt(({"role": "user", "content": observation},), None)
        return [*prompt.token_ids.tolist(), *self._encoder.tokenise([observation])[0]]

    def _following(self, answer: str, sampled: list[int], observation: str) -> list[int]:
        if self._encoder.chat is not None:
            new = ({"role": "user", "content": observation},)
            return self._bridge.following({"role": "assistant", "content": answer}, sampled, new, None)
        return list(self._encoder.tokenise([observation])[0])
