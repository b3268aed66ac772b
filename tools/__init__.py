"""Command-line tools: benchmarks, evaluation, conversion, demo, fault injection."""
