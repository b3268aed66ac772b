"""Lengths of answers: lognormal, and cut at the longest that a run allows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist

SPREAD = 0.8
"""Standard deviation of the logarithm, where none is given."""
_NORMAL = NormalDist()


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """A distribution of lengths with a given mean."""

    mean: float
    longest: int
    spread: float = SPREAD
    """Standard deviation of the logarithm before the cut; 0: all have the mean."""

    @cached_property
    def median(self) -> float:
        """The median that has this mean after the cut."""
        if self.are_alike:
            return min(self.mean, float(self.longest))
        low, high = math.log(self.mean) - self.spread**2, math.log(self.longest) + 20 * self.spread
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if self._power(1, math.exp(middle)) < self.mean else (low, middle)
        return math.exp(low)

    @property
    def are_alike(self) -> bool:
        """Whether all have the same length."""
        return not self.spread or self.mean >= self.longest

    @property
    def mean_square(self) -> float:
        return self.median**2 if self.are_alike else self._power(2, self.median)

    @property
    def mean_begun(self) -> float:
        """Tokens that an answer under way has on average: long ones are under way for longer."""
        return self.mean_square / self.mean / 2

    def of_normal(self, drawn: float) -> float:
        """Return the length that belongs to a number drawn from the standard normal distribution."""
        return self.median if self.are_alike else min(float(self.longest), self.median * math.exp(self.spread * drawn))

    def share_beyond(self, tokens: float) -> float:
        """Return the share of answers that have more than so many tokens, above 0 and below `longest`."""
        if self.are_alike:
            return float(tokens < self.median)
        return 1 - _NORMAL.cdf(math.log(tokens / self.median) / self.spread)

    def _power(self, power: int, median: float) -> float:
        """Return the mean of length ** power."""
        s, cut = self.spread, (math.log(self.longest) - math.log(median)) / self.spread
        below = median**power * math.exp((power * s) ** 2 / 2) * _NORMAL.cdf(cut - power * s)
        return below + self.longest**power * (1 - _NORMAL.cdf(cut))

    def longest_of(self, count: int) -> float:
        """Return about the longest of so many answers."""
        return self.of_normal(_NORMAL.inv_cdf(1 - 1 / max(2, count)))
