"""One worker: a process that holds environments and takes their steps, one after the other. Started by pool.py.

Over the socket come pickled (number of the environment, method, arguments); back goes (result, None) or (None, error).
"""

import pickle
import socket
import struct
import sys
import traceback

from rollout.environments.protocol import Environment, make_environment
from rollout.experience.serial import dumps, loads
from rollout.processes import die_with

LENGTH = struct.Struct("<Q")
"""Length of the pickle that follows."""
Result = tuple[str, float, bool, bytes | None] | None
"""Of reset() and step(): observation, reward, whether the episode is over, and the snapshot where there are any."""
MAX_SNAPSHOT_BYTES = 2**20


def main(argv: list[str]) -> None:
    """Run a worker. `argv`: file descriptor of the socket, environment, process id of the parent."""
    fd, spec, parent = int(argv[0]), argv[1], int(argv[2])
    die_with(parent)
    held: dict[int, Environment] = {}
    with socket.socket(fileno=fd) as channel, channel.makefile("rb") as stream:
        while header := stream.read(LENGTH.size):
            number, method, arguments = pickle.loads(stream.read(*LENGTH.unpack(header)))
            answer = pickle.dumps(_call(held, spec, number, method, arguments))
            channel.sendall(LENGTH.pack(len(answer)) + answer)


def _call(
    held: dict[int, Environment], spec: str, number: int, method: str, arguments: tuple[object, ...]
) -> tuple[Result, str | None]:
    try:
        if method in ("reset", "restore"):
            held[number] = make_environment(spec)
        environment = held.pop(number) if method == "close" else held[number]  # also where close() fails
        if method == "restore":
            arguments = (loads(arguments[0]),)  # type: ignore[arg-type] # what _snapshot() returned
        result = getattr(environment, method)(*arguments)
        if method == "reset":
            return (str(result), 0.0, False, _snapshot(environment)), None
        if method == "step":
            observation, reward, done = result
            return (str(observation), float(reward), bool(done), _snapshot(environment)), None
        return None, None
    except BaseException as error:  # noqa: BLE001 - user code: an environment must not end the others of its worker
        return None, "".join(traceback.format_exception(error, limit=-4))


def _snapshot(environment: Environment) -> bytes | None:
    """Return the state of an environment that has snapshots. Raises TypeError and ValueError for one not to store."""
    take = getattr(environment, "snapshot", None)
    if take is None:
        return None
    state = dumps(take())
    if len(state) > MAX_SNAPSHOT_BYTES:
        raise ValueError(
            f"snapshot() has {len(state)} bytes, at most {MAX_SNAPSHOT_BYTES} are stored; return less, or leave out "
            "snapshot() and restore()"
        )
    return state


if __name__ == "__main__":
    main(sys.argv[1:])
