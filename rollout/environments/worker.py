"""One worker: a process that holds environments and takes their steps, one after the other. Started by pool.py.

Over the socket come pickled (number of the environment, method, arguments); back goes (result, None) or (None, error).
"""

import pickle
import socket
import struct
import sys
import traceback

from rollout.environments.protocol import Environment, make_environment
from rollout.processes import die_with

LENGTH = struct.Struct("<Q")
"""Length of the pickle that follows."""
Result = str | tuple[str, float, bool] | None
"""Of reset(), step() and close()."""


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
        if method == "reset":
            held[number] = make_environment(spec)
        environment = held.pop(number) if method == "close" else held[number]  # also where close() fails
        result = getattr(environment, method)(*arguments)
        if method == "reset":
            return str(result), None
        if method == "step":
            observation, reward, done = result
            return (str(observation), float(reward), bool(done)), None
        return None, None
    except BaseException as error:  # noqa: BLE001 - user code: an environment must not end the others of its worker
        return None, "".join(traceback.format_exception(error, limit=-4))


if __name__ == "__main__":
    main(sys.argv[1:])
