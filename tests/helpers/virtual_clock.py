"""The virtual clock of simulations, for tests."""

import asyncio

from core.planning.simulation import VirtualClockLoop, run_virtual

__all__ = ["VirtualClockLoop", "run_virtual", "settle"]


async def settle() -> None:
    """Let everything that can run without the clock moving run."""
    for _ in range(6):
        await asyncio.sleep(0)
