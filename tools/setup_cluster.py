"""Check the hosts of a cluster over ssh, then start Ray on them.

    python -m tools.setup_cluster --hosts node1 node2 node3 --shared /storage            # check and start
    python -m tools.setup_cluster --hosts node1 node2 node3 --shared /storage --check    # check only

The first host becomes the head of Ray. Every host needs the same Slipstream, Python and Ray (of `--python`), the shared
folder, and the same number of GPUs. Ray's authentication token is made on the head and copied to the others.
"""

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from tools.arguments import parser_of

RAY_PORT = 6379
_SSH_SECONDS = 20
_COMMAND_SECONDS = 300.0
_TOKEN = "$HOME/.ray/auth_token"
_PRIVATE = "umask 077; mkdir -p $HOME/.ray"
PROBE = """
import json, os, platform, shutil, subprocess, sys, uuid
from importlib import metadata
from tools.arguments import parser_of
def version(name):
    try: return metadata.version(name)
    except metadata.PackageNotFoundError: return "missing"
def gpus():
    if not shutil.which("nvidia-smi"): return 0
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
shared, mark = sys.argv[1], sys.argv[2]
facts = {"python": platform.python_version(), "gpus": gpus(), "writable": os.access(shared, os.W_OK)}
facts |= {name: version(name) for name in ("slipstream", "ray", "torch", "megatron-core", "sglang")}
facts["sees_mark"] = os.path.exists(os.path.join(shared, mark))
print(json.dumps(facts))
"""
"""Run on every host; prints what the check compares."""
_SAME = ("python", "slipstream", "ray", "torch", "megatron-core", "sglang", "gpus")

Run = Callable[[str, str, str], subprocess.CompletedProcess[str]]
"""Runs a shell command on a host, with text on its standard input."""


@dataclass(frozen=True, kw_only=True)
class Ssh:
    """How hosts are reached."""

    user: str | None
    port: int
    key_file: str | None

    def __call__(self, host: str, command: str, given: str) -> subprocess.CompletedProcess[str]:
        """Run a command with the host's shell and `given` on its standard input. Raises subprocess.TimeoutExpired."""
        words = ["ssh", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={_SSH_SECONDS}", "-p", str(self.port)]
        words += ["-i", self.key_file] if self.key_file else []
        words += [f"{self.user}@{host}" if self.user else host, command]
        return subprocess.run(words, input=given, capture_output=True, text=True, timeout=_COMMAND_SECONDS)


class ClusterError(ValueError):
    """A host cannot take part; the message has the host and the reason."""


def check(hosts: Sequence[str], run: Run, *, python: str, shared: str) -> dict[str, dict[str, object]]:
    """Return the facts of every host. Raises ClusterError with every difference."""
    mark = f".slipstream-{hosts[0]}"
    made = run(hosts[0], f"mkdir -p {shlex.quote(shared)} && touch {shlex.quote(f'{shared}/{mark}')}", "")
    if made.returncode:
        raise ClusterError(f"{hosts[0]}: --shared {shared}: {_last_line(made)}")
    command = shlex.join([python, "-c", PROBE, shared, mark])
    try:
        answers = _everywhere(hosts, run, command)
    finally:
        run(hosts[0], f"rm -f {shlex.quote(f'{shared}/{mark}')}", "")
    problems, facts = [], {}
    for host, answer in answers.items():
        if answer.returncode:
            problems.append(f"{host}: {_last_line(answer)}")
        else:
            facts[host] = json.loads(answer.stdout.splitlines()[-1])
    problems += _differences(facts, shared)
    if problems:
        raise ClusterError("\n".join(problems))
    return facts


def _differences(facts: Mapping[str, Mapping[str, object]], shared: str) -> list[str]:
    problems = []
    for host, of in facts.items():
        if of["ray"] == "missing" or of["slipstream"] == "missing":
            problems.append(f"{host}: Slipstream or Ray is not installed for --python; pip install -e . there")
        if not of["sees_mark"]:
            problems.append(f"{host}: {shared} is not the folder of the first host; mount the shared storage there")
        elif not of["writable"]:
            problems.append(f"{host}: {shared} is not writable")
    for name in _SAME:
        values = {host: of[name] for host, of in facts.items()}
        if len(set(values.values())) > 1:
            found = ", ".join(f"{host} {value}" for host, value in values.items())
            problems.append(f"{name} differs: {found}; install the same everywhere")
    return problems


def start(hosts: Sequence[str], run: Run, *, python: str) -> str:
    """Start Ray on every host and return the address of the head. Raises ClusterError.

    Other hosts get the head's token on standard input: command lines are visible to other users."""
    ray = f"RAY_AUTH_MODE=token {shlex.quote(python)} -m ray.scripts.scripts start"
    head = hosts[0]
    make = f"{shlex.quote(python)} -c 'import secrets; print(secrets.token_hex(32), end=str())'"
    token = _must(run, head, f"{_PRIVATE}; test -s {_TOKEN} || {make} > {_TOKEN}; cat {_TOKEN}").strip()
    address = _must(run, head, "hostname -I").split()[0]
    _must(run, head, f"{ray} --head --port={RAY_PORT} --node-ip-address={address}")
    join = f"{_PRIVATE}; cat > {_TOKEN}; {ray} --address={address}:{RAY_PORT}"
    for host, answer in _everywhere(hosts[1:], run, join, token).items():
        if answer.returncode:
            raise ClusterError(f"{host}: ray start failed: {_last_line(answer)}")
    return f"{address}:{RAY_PORT}"


def _everywhere(
    hosts: Sequence[str], run: Run, command: str, given: str = ""
) -> dict[str, subprocess.CompletedProcess[str]]:
    if not hosts:
        return {}
    with ThreadPoolExecutor(len(hosts)) as pool:
        return dict(zip(hosts, pool.map(lambda host: run(host, command, given), hosts), strict=True))


def _must(run: Run, host: str, command: str) -> str:
    done = run(host, command, "")
    if done.returncode:
        raise ClusterError(f"{host}: {_last_line(done)}")
    return done.stdout


def _last_line(done: subprocess.CompletedProcess[str]) -> str:
    lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
    return lines[-1] if lines else f"exit code {done.returncode}"


def main(argv: Sequence[str] | None = None) -> int:
    """Check and start; return 0: done; 1: a host cannot take part, the reasons on stderr; 2: bad arguments."""
    given = _parser().parse_args(argv)
    run = Ssh(user=given.username, port=given.ssh_port, key_file=given.private_key_file)
    try:
        facts = check(given.hosts, run, python=given.python, shared=given.shared)
        Console().print(_table(facts))
        if given.check:
            return 0
        address = start(given.hosts, run, python=given.python)
    except (ClusterError, subprocess.TimeoutExpired, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    print(
        f"Ray runs on {len(given.hosts)} hosts. On {given.hosts[0]}: RAY_ADDRESS={address} "
        "python -m core.quickstart ppo-math --config X.yaml"
    )
    return 0


def _table(facts: Mapping[str, Mapping[str, object]]) -> Table:
    table = Table()
    for name in ("host", *_SAME):
        table.add_column(name)
    for host, of in facts.items():
        table.add_row(host, *(str(of[name]) for name in _SAME))
    return table


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("tools.setup_cluster", __doc__)
    add = parser.add_argument
    add("--hosts", "--hostnames", nargs="+", required=True, help="names or addresses; the first is the head of Ray")
    add("--shared", default="/storage", help="folder that all hosts share: models, data sets, fileroot")
    add("--python", default=sys.executable, help="interpreter on every host that has Slipstream")
    add("--username", help="ssh user")
    add("--ssh_port", type=int, default=22)
    add("--private_key_file", help="ssh key")
    add("--check", action="store_true", help="start nothing")
    return parser


if __name__ == "__main__":
    sys.exit(main())
