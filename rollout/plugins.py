"""User code by import path: `my_pkg.my_mod:Name`, checked before the first prompt is sampled.

Invariant: a path that cannot be used raises one PluginError that contains the path and the reason: also a module that
raises, or ends the process, when it is imported.
"""

import importlib
import importlib.util
import inspect
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from config_schema import did_you_mean

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[1]
"""The folder that holds Slipstream's packages: a checkout or site-packages."""
_LIBRARIES = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib"))

_OWN = (
    "allocation", "config_schema", "core", "evaluation", "mcore_adapter", "model_specs", "rollout", "slipstream",
    "tools", "tracing",
)  # fmt: skip
_IMPORTING = "SLIPSTREAM_IMPORTS"
"""Environment variable that holds the module of the user that is being imported."""
_FRAME = re.compile(r'^[ |]*File "([^"<][^"]*)", line (\d+), in (.+)$', re.MULTILINE)


def python_path(*folders: str) -> str:
    """Return a PYTHONPATH for child processes: Slipstream's own packages first, then `folders`, the present
    PYTHONPATH and the working folder, where user modules are. A user's package named `core` or `tools` cannot hide
    Slipstream's."""
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join(dict.fromkeys([str(ROOT), *folders, *filter(None, given), os.getcwd()]))


def functions_folder() -> Path:
    """Return the folder of functions that were passed by value from Python. Raises RuntimeError without a home."""
    return state_folder() / "functions"


def state_folder() -> Path:
    """Return the folder of this user's state. Raises RuntimeError where the user has no home."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state") / "slipstream"


def make_state_folder(folder: Path) -> None:
    """Make a folder in state_folder(), both for this user alone: what lies there is trusted as this user's own."""
    for one in (state_folder(), folder):
        one.mkdir(parents=True, exist_ok=True, mode=0o700)


def refuse_while_importing() -> None:
    """Raise RuntimeError where user code calls this while a run imports it, in this process or in one that it has
    started: each run would start the next one."""
    if module := os.environ.get(_IMPORTING):
        raise RuntimeError(
            f'a run imports {module}, which starts a run itself; put the call under `if __name__ == "__main__":`'
        )


@contextmanager
def _importing(module: str) -> Iterator[None]:
    """Mark this process, and those that it starts, as one that imports user code."""
    is_first = _IMPORTING not in os.environ
    os.environ.setdefault(_IMPORTING, module)
    try:
        yield
    finally:
        if is_first:
            os.environ.pop(_IMPORTING, None)


class PluginError(ValueError):
    """An import path that does not lead to what is needed."""


def load_plugin(spec: str, *, kind: str, arguments: Sequence[str] | None) -> Any:
    """Return the object at `spec` ("pkg.mod:Name"), which must be callable with len(arguments) positional arguments
    (None: with any) and return its result when called: an async function is refused.

    `kind` and the names in `arguments` are for the error. Raises PluginError.
    """
    found = find_plugin(spec, kind=kind)
    if arguments is not None:
        _check_call(found, spec, kind=kind, args=arguments, kwargs={})
    if any(map(inspect.iscoroutinefunction, (found, type(found).__call__))):
        raise PluginError(
            f"{kind} {spec}: is `async def`, and what it returns would not be awaited; write `def`, with "
            "asyncio.run(...) around what has to be awaited"
        )
    return found


def load_coroutine(spec: str, *, kind: str, arguments: Sequence[str]) -> Any:
    """Return the `async def` function at `spec` with these positional arguments. Raises PluginError."""
    found = find_plugin(spec, kind=kind)
    if not inspect.iscoroutinefunction(found):
        raise PluginError(f"{kind} {spec}: must be `async def {spec.partition(':')[2]}({', '.join(arguments)})`")
    _check_call(found, spec, kind=kind, args=arguments, kwargs={})
    return found


def check_factory(spec: str, *, kind: str, methods: Mapping[str, Sequence[str]], settings: Iterable[str]) -> None:
    """Find the class or factory at `spec`, which must take these keyword arguments, and check a class's methods, as
    build_plugin checks those of what it returns. Raises PluginError."""
    found = find_plugin(spec, kind=kind)
    _check_call(found, spec, kind=kind, args=(), kwargs=dict.fromkeys(settings))
    if inspect.isclass(found):
        check_methods(found, spec, kind=kind, methods=methods)


def build_plugin(spec: str, *, kind: str, methods: Mapping[str, Sequence[str]], **settings: object) -> Any:
    """Call the class or factory at `spec` with `settings` and check the methods of what it returns.

    `methods` maps the name of each coroutine method to its positional arguments. Raises PluginError.
    """
    factory = find_plugin(spec, kind=kind)
    _check_call(factory, spec, kind=kind, args=(), kwargs=settings)
    return check_methods(factory(**settings), spec, kind=kind, methods=methods)


def check_methods(plugin: T, spec: str, *, kind: str, methods: Mapping[str, Sequence[str]]) -> T:
    """Return `plugin`, an instance or its class, if it has every coroutine method of `methods` with these positional
    arguments. Raises PluginError."""
    for name, arguments in methods.items():
        method = getattr(plugin, name, None)
        if not inspect.iscoroutinefunction(method):
            found = "" if method is None else f"; its {name} is not async"
            raise PluginError(f"{kind} {spec}: needs a method `async def {name}(self, {', '.join(arguments)})`{found}")
        # A method of a class is a function that takes the instance, too.
        own = ("self",) if inspect.isclass(plugin) and inspect.isfunction(method) else ()
        _check_call(method, f"{spec}.{name}", kind=kind, args=(*own, *arguments), kwargs={})
    return plugin


def unknown_name(name: str, *, kind: str, known: Iterable[str], own: str) -> str:
    """Return the message for a name without a colon that is not in `known`. `own`: what an import path would name,
    "function" or "Class"."""
    known = tuple(known)
    message = f"unknown {kind} {name!r}; use one of {', '.join(known)}, or package.module:{own}"
    if meant := did_you_mean(name, known):
        return message + meant
    module, _, last = name.rpartition(".")
    if module and last != "py" and all(part.isidentifier() for part in name.split(".")):
        message += f"; did you mean {f'{module}:{last}'!r}?"
    return message


def find_plugin(spec: str, *, kind: str) -> Any:
    """Return the object at `spec`, "pkg.mod:Name". Raises PluginError."""
    module_name, colon, name = spec.partition(":")
    if not colon or not name.isidentifier() or not all(part.isidentifier() for part in module_name.split(".")):
        raise PluginError(f"{kind} {spec!r}: write it as package.module:Name{_without_path(module_name, name)}")
    with suppress(RuntimeError):
        if (folder := str(functions_folder())) not in sys.path:
            sys.path.append(folder)
    try:
        with _importing(module_name):
            missing = _missing_module(module_name)
            module = None if missing else importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise PluginError(f"{kind} {spec}: {_import_failure(module_name, error)}") from error
    if missing:
        file = module_name.removesuffix(".py")
        way_out = _hidden(module_name).removeprefix("; ") or "install it or add its folder to PYTHONPATH"
        if file != module_name:
            way_out = f"a module is written without .py: did you mean {f'{file}:{name}'!r}?"
        raise PluginError(f"{kind} {spec}: there is no module {missing!r}; {way_out}")
    if not hasattr(module, name):
        hint = _hidden(module_name) or did_you_mean(name, [n for n in vars(module) if not n.startswith("_")], most=3)
        raise PluginError(f"{kind} {spec}: module {module_name} has no {name!r}{hint}")
    return getattr(module, name)


def _without_path(module: str, name: str) -> str:
    """Return the hint with the import path for a `module` that is a path of a file; empty where there is none."""
    parts = module.removesuffix(".py").removeprefix("./").split("/")
    if module.isidentifier() or not all(part.isidentifier() for part in (*parts, name)):
        return ""
    path = f"{'.'.join(parts)}:{name}"
    return f"; did you mean {path!r}?"


def _import_failure(module_name: str, error: BaseException) -> str:
    """Return in one line what importing a module ended with, and where in the user's code."""
    clarify(error)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(("<frozen ", __file__))]
    # Without what the user's code calls: wandb, for example, wraps sys.exit. A plug-in may be installed itself.
    frames = [f for f in frames if not f.filename.startswith(_LIBRARIES)] or frames
    place = f"{frames[-1].filename}:{frames[-1].lineno}"
    if isinstance(error, SyntaxError):
        place = f"{error.filename}:{error.lineno}"
    if isinstance(error, SystemExit):
        return (
            f"importing {module_name} ends the process with sys.exit({error.code!r}) at {place}; put what the script "
            'runs under `if __name__ == "__main__":`'
        )
    message = str(error).strip().partition("\n")[0]
    return f"importing {module_name} failed with {type(error).__name__}: {message} ({place})"


def user_frame(stack: str) -> str:
    """Return the last frame of a printed traceback that lies neither in Slipstream nor in a library, as "FILE, line
    28, in loss", or "below FILE, ..." where that called Slipstream; empty if there is none."""
    own, below = tuple(f"{ROOT / package}{os.sep}" for package in _OWN), ""
    for file, line, function in reversed(_FRAME.findall(stack)):
        if file.startswith(own):
            below = "below "
        elif not file.startswith(_LIBRARIES) and not {"site-packages", "dist-packages"} & set(Path(file).parts):
            return f"{below}{Path(file).name}, line {line}, in {function}"
    return ""


def user_place(error: BaseException) -> str:
    """Return user_frame() of the traceback of an error, with its notes and causes."""
    return user_frame("".join(traceback.format_exception(error)))


def clarify(error: BaseException) -> None:
    """Say in an ImportError that the user's package of that name is hidden by Slipstream's."""
    if isinstance(error, ImportError) and (why := _hidden(error.name or "")) and why not in str(error.msg):
        error.msg = f"{error.msg}{why}"


def _hidden(module: str) -> str:
    """Return the end of a sentence about a module of the user that has the name of a package of Slipstream; empty
    without one."""
    name = module.partition(".")[0]
    if name not in _OWN:
        return ""
    for folder in dict.fromkeys([os.getcwd(), *filter(None, sys.path)]):
        for path in (Path(folder, name), Path(folder, f"{name}.py")):
            if path.exists() and path.resolve().parent != ROOT:
                return f"; {path} is hidden by Slipstream's package {name!r}: rename yours"
    return ""


def _missing_module(module_name: str) -> str | None:
    """Return the first part of a dotted name that does not exist, if any. Imports the packages on the way."""
    parts = module_name.split(".")
    for depth in range(1, len(parts) + 1):
        prefix = ".".join(parts[:depth])
        if depth > 1 and not hasattr(importlib.import_module(".".join(parts[: depth - 1])), "__path__"):
            return prefix
        if importlib.util.find_spec(prefix) is None:
            return prefix
    return None


def _check_call(found: object, spec: str, *, kind: str, args: Sequence[str], kwargs: Mapping[str, object]) -> None:
    called = f"({', '.join([*args, *(f'{name}=' for name in kwargs)])})"
    if not callable(found):
        raise PluginError(f"{kind} {spec}: its type is {type(found).__name__}; it must be callable as {called}")
    try:
        signature = inspect.signature(found)
    except ValueError:  # builtins without a signature: the call itself will show it
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise PluginError(f"{kind} {spec}: is called as {called}, its signature is {signature}: {error}") from error
