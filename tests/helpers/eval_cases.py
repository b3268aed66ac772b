"""What the evaluation's tests share."""

import json
from pathlib import Path


def write_rows(path: Path, rows: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def arguments(model: Path, data: Path, output: Path, *more: str, names: str = "sums") -> list[str]:
    return [
        "--model_path", str(model), "--output_path", str(output), "--data_dir", str(data), "--data_names", names,
        "--generator", "embedded", "--max_gen_tokens", "6", "--n_sampling", "16", "--reward_workers", "1", *more,
    ]  # fmt: skip
