"""Command-line tools: benchmarks, evaluation, conversion, demo, fault injection."""

import sys
from pathlib import Path

if sys.argv[:1] == ["-m"]:  # `python -m` puts the working folder first, which may hold packages of the same names
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
