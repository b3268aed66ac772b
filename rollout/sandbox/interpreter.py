"""The level without processes of CPython: pydantic-monty, an interpreter of a subset of Python without host access."""

from __future__ import annotations


class Interpreter:
    """A pool of monty's workers. Raises ImportError or OSError where it is not installed."""

    def __init__(self, *, num_workers: int) -> None:
        import pydantic_monty

        self._monty = pydantic_monty
        self._pool = pydantic_monty.Monty(min_processes=num_workers, max_processes=num_workers)
        self._pool.__enter__()

    def run(self, code: str, *, seconds: float, memory_bytes: int, output_chars: int) -> tuple[str, str]:
        """Return (output, status) of code, as Sandbox.run does."""
        printed: list[str] = []
        room = output_chars

        def keep(_: object, text: str) -> None:
            nonlocal room
            if room > 0:
                printed.append(text[:room])
                room -= len(text)

        limits = self._monty.ResourceLimits(
            max_feed_duration_secs=seconds, max_memory=memory_bytes, max_total_sleep_secs=seconds
        )
        status = "ok"
        try:
            with self._pool.checkout(limits=limits) as session:
                value = session.feed_run(code, print_callback=keep)
            if value is not None:
                keep("stdout", f"{value!r}\n")
        except self._monty.MontyCrashedError as error:
            status = "crashed"
            keep("stderr", f"{error}\n")
        except self._monty.MontyError as error:
            status = "timeout" if str(error).startswith("TimeoutError: feed time limit") else "error"
            keep("stderr", f"{error}\n")
        return "".join(printed), status

    def close(self) -> None:
        """End the workers."""
        self._pool.__exit__(None, None, None)
