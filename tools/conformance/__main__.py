"""Compare losses, advantages and gradients with golden numbers and finite differences.

    python -m tools.conformance

Golden numbers are those of the literature, and those on which other projects agreed (docs/algorithms.md). The exit
status is 1 where a number or a gradient is wrong.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line: 0 where everything holds."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.conformance", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args(arguments)
    from tools.conformance.golden import GOLDEN
    from tools.conformance.gradients import gradients

    numbers, slopes = [number for family in GOLDEN.values() for number in family()], list(gradients())
    wrong = [f"{g.name}: {g.found}, expected {g.expected}" for g in numbers if not g.holds]
    wrong += [f"gradient of {g.name}: {g.difference:.2g} from finite differences" for g in slopes if not g.holds]
    print(f"{len(numbers)} golden numbers, gradients of {len(slopes)} presets: {len(wrong)} wrong")
    for problem in wrong:
        print(problem, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
