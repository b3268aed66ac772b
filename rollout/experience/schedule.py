"""How the stream of prompts is cut into epochs and steps."""

from __future__ import annotations

from dataclasses import dataclass

ENDLESS = 2**63 - 1
"""`total_epochs` of a schedule without an end."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """An epoch visits every prompt once, in ceil(num_prompts / batch_size) steps; its last batch may be smaller.

    Positions in the stream and steps count from 0, except in `position`."""

    num_prompts: int
    """Prompts of one epoch."""
    batch_size: int
    """Prompts of one step."""
    total_epochs: int = ENDLESS
    total_steps_limit: int | None = None
    """Ends the run before its epochs do."""

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.num_prompts // self.batch_size)

    @property
    def total_steps(self) -> int:
        steps = self.steps_per_epoch * self.total_epochs
        return steps if self.total_steps_limit is None else min(steps, self.total_steps_limit)

    @property
    def num_epochs(self) -> int:
        """Epochs that the run begins."""
        return -(-self.total_steps // self.steps_per_epoch)

    def steps_of_epoch(self, epoch: int) -> int:
        """Return how many steps of `epoch`, which counts from 1, the run has; fewer where it ends within."""
        return min(self.steps_per_epoch, self.total_steps - (epoch - 1) * self.steps_per_epoch)

    @property
    def total_prompts(self) -> int:
        return self.first_prompt_of(self.total_steps)

    def first_prompt_of(self, step: int) -> int:
        """Return the position at which `step` begins, also beyond the last step."""
        epoch, within = divmod(step, self.steps_per_epoch)
        return epoch * self.num_prompts + min(within * self.batch_size, self.num_prompts)

    def consumed_before(self, step: int) -> int:
        """Return how many prompts steps 0..step-1 consume together; nothing is consumed after the last step."""
        return self.first_prompt_of(min(step, self.total_steps))

    def batch_of(self, step: int) -> int:
        """Return how many prompts `step` consumes; 0 after the last step."""
        return self.consumed_before(step + 1) - self.consumed_before(step)

    def step_of(self, position: int) -> int:
        """Return the step to which the prompt at `position` nominally belongs: the number of whole steps before it."""
        epoch, within = divmod(position, self.num_prompts)
        return epoch * self.steps_per_epoch + within // self.batch_size

    def position(self, step: int) -> tuple[int, int]:
        """Return (epoch, step of the epoch) of global step `step`; all three count from 1."""
        epoch, epoch_step = divmod(step - 1, self.steps_per_epoch)
        return epoch + 1, epoch_step + 1
