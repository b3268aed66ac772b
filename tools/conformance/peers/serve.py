"""Answer checks with the functions of a peer. Runs in the peer's own environment.

Invariant: imports nothing of this repository. Standard input is {"batches": {NAME: BATCH}, "calls": [{"operation",
"options", "batch"}]}; BATCH has padded lists [B, T] of numbers. The last line of standard output is {"version",
"results"}; a result is {name: number or nested list}, or {"error": text}.

    /path/to/peer-env/bin/python -P tools/conformance/peers/serve.py trl < CALLS.json
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

DISTRIBUTION = {"trinity": "trinity-rft"}


def tensors(batch: dict[str, Any]) -> dict[str, Any]:
    """Turn lists of numbers into tensors of float64; "group" stays a list."""
    return {
        name: value if name == "group" else torch.tensor(value, dtype=torch.float64) for name, value in batch.items()
    }


def plain(value: Any) -> Any:
    """Turn tensors into numbers and lists."""
    return value.detach().double().tolist() if isinstance(value, torch.Tensor) else value


def answer(operation: Any, batch: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Call a function of the adapter. Where it returns a loss, add its gradient by the log-probabilities [B, T]."""
    fields = tensors(batch)
    logprobs = fields["logprobs"].requires_grad_()
    result = operation(fields, **options)
    if "loss" in result:
        (result["grads"],) = torch.autograd.grad(result["loss"], logprobs)
    return {name: plain(value) for name, value in result.items()}


def main() -> None:
    name = sys.argv[1]
    spec = importlib.util.spec_from_file_location("adapter", Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None, f"{name}.py stands beside this file"
    adapter = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(adapter)
    request = json.load(sys.stdin)
    results = []
    for call in request["calls"]:
        try:
            batch = request["batches"][call["batch"]]
            results.append(answer(adapter.OPERATIONS[call["operation"]], batch, call["options"]))
        except Exception:  # noqa: BLE001 - whatever the peer raises is the result of this call
            results.append({"error": traceback.format_exc(limit=-3)})
    version = importlib.metadata.version(DISTRIBUTION.get(name, name))
    print("\n" + json.dumps({"version": version, "results": results}))


if __name__ == "__main__":
    main()
