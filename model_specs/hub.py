"""Models of the Hugging Face hub as folders: the one place that turns `owner/name` or `owner/name@revision` into one.

Invariant: an existing file or folder is never looked up, and without a network only the cache of the hub is used.
"""

import os
import re
from functools import cache, partial
from pathlib import Path

_ID = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[\w./-]+))?")
_SNAPSHOT = re.compile(r".*/models--(?P<owner>.+?)--(?P<name>[^/]+)/snapshots/(?P<commit>[0-9a-f]+)/?")
_SMALL = ("*.json", "*.model", "*.txt", "*.jinja")
_WEIGHTS = ("*.safetensors",)
HUB_SECONDS = 2.0
"""Time limit of an answer of the hub, which is waited for twice at most for models, once for data sets; then the cache
is used."""
_REFUSED: dict[str, str] = {}
"""Id of a model -> why it could not be loaded; it is asked for once in a process."""


class HubError(ValueError):
    """A model that is neither a folder nor on the hub. The message names the path, the reason and the way out."""


def model_folder(path: str, *, weights: bool) -> str:
    """Return the folder of a model: `path` itself, or for the id of a model of the hub its folder in the cache of
    Hugging Face, downloaded if it is not there. `weights`: with its weights. Raises HubError."""
    if os.path.exists(path) or not _ID.fullmatch(path):
        return path
    if path not in _REFUSED:
        try:
            return _cached(path, weights)
        except Exception as error:  # noqa: BLE001 - the library raises its own errors and those of httpx
            if "Timeout" in type(error).__name__:
                error = TimeoutError(f"no answer within {HUB_SECONDS:g} s")
            _REFUSED[path] = (str(error).strip() or type(error).__name__).splitlines()[0].removeprefix("Got: ")
    name, _, revision = path.partition("@")
    download = f"hf download {name}{f' --revision {revision}' if revision else ''} --local-dir FOLDER"
    raise HubError(
        f"{path}: no such folder, and the model of this name cannot be loaded from the Hugging Face hub "
        f"({_REFUSED[path]}). Without a network: run `{download}` elsewhere and write that folder"
    )


def lacks_weights(path: str) -> bool:
    """Return whether a folder is part of the cache and has no weights, as after a dry run."""
    return _SNAPSHOT.fullmatch(path) is not None and not any(Path(path).glob("*.safetensors"))


def shown(path: str) -> str:
    """Return a path, or for a folder of the cache the id of its model and the start of its commit."""
    found = _SNAPSHOT.fullmatch(path)
    return path if found is None else f"{found['owner']}/{found['name']}@{found['commit'][:8]}"


@cache
def _cached(path: str, weights: bool) -> str:
    """Return the folder in the cache, after a download. Raises what the library raises."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    found = _ID.fullmatch(path)
    assert found is not None, "the caller has compared it"
    if not weights:
        disable_progress_bars()
    patterns = [*_SMALL, *(_WEIGHTS if weights else ())]
    fetch = partial(snapshot_download, found["name"], allow_patterns=patterns, ignore_patterns=["*/*"])
    try:
        commit = HfApi().model_info(found["name"], revision=found["revision"], timeout=HUB_SECONDS).sha
        folder: str = fetch(revision=commit)
    except Exception as error:  # noqa: BLE001 - the library raises its own errors and those of httpx
        try:
            folder = fetch(revision=found["revision"], local_files_only=True)
        except OSError:
            raise error from None
    if weights and lacks_weights(folder):
        raise ValueError("no *.safetensors files, in the cache or on the hub")
    return folder
