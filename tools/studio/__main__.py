"""Configure, watch and understand runs in a browser.

    slipstream studio [FOLDER ...] [--port 8080]

FOLDER is the log folder of a run, or a folder above log folders; default: runs. The studio reads the files that runs
write. It listens on this host alone unless --host names another address. With such a --host, --token or --allow-run,
the address that it prints has a token.
"""

import argparse
import asyncio
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

from aiohttp import web

from core.monitoring.health import RULES, Rule
from rollout.plugins import PluginError, find_plugin
from tools.arguments import integer, parser_of, refused
from tools.studio.folders import Folders
from tools.studio.guard import is_loopback

_SWITCH_SECONDS = 0.0005
"""Interval after which the interpreter switches from a parsing thread to the one that answers requests."""


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until interrupted; return the exit code."""
    given = _parser().parse_args(argv)
    for folder in given.folders:
        if not folder.expanduser().is_dir():
            return refused(f"{folder}: no such folder; give the fileroot or the log folder of a run")
    try:
        from tools.studio.server import application
    except ModuleNotFoundError as error:
        return refused(f"{error}; pip install 'slipstream[studio]'")
    needs_token = given.token or given.allow_run or not is_loopback(given.host)
    token = secrets.token_urlsafe(24) if needs_token else None
    try:
        app = application(
            Folders(given.folders),
            host=given.host,
            port=given.port,
            token=token,
            configs=given.configs,
            rules=_rules(given.rules),
            may_run=given.allow_run,
        )
    except PluginError as error:
        return refused(error)
    try:
        asyncio.run(_serve(app, given.host, given.port, token))
    except OSError as error:
        return refused(f"--host {given.host} --port {given.port}: {error.strerror}; choose others")
    except KeyboardInterrupt:
        pass
    return 0


def _rules(spec: str | None) -> Sequence[Rule]:
    """Return the built-in rules of health and those of `spec`. Raises PluginError."""
    if spec is None:
        return RULES
    own = find_plugin(spec, kind="rules")
    if not isinstance(own, list | tuple) or not all(isinstance(rule, Rule) for rule in own):
        raise PluginError(f"--rules {spec}: must be a list of core.monitoring.health.Rule")
    return [*RULES, *own]


async def _serve(app: web.Application, host: str, port: int, token: str | None) -> None:
    sys.setswitchinterval(_SWITCH_SECONDS)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        shown = f"[{host}]" if ":" in host else host
        print(f"studio: http://{shown}:{port}/" + (f"?token={token}" if token else ""), flush=True)
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("tools.studio", __doc__)
    add = parser.add_argument
    add("folders", nargs="*", type=Path, default=[Path("runs")], metavar="FOLDER", help="where runs are")
    add("--port", type=integer(least=1, most=65535), default=8080, help="default: 8080")
    add("--host", default="127.0.0.1", help="address to listen on; default: this host alone")
    add("--token", action="store_true", help="require a token on this host, too")
    add("--allow-run", action="store_true", help="let the pages start runs, dry runs and tools; requires a token")
    add("--configs", type=Path, default=Path(), metavar="FOLDER", help="where configurations are; default: this folder")
    add("--rules", metavar="MODULE:NAME", help="rules of health to add, a list of Rule")
    return parser


if __name__ == "__main__":
    sys.exit(main())
