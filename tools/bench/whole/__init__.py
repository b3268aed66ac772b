"""Qwen3-30B-A3B end to end on eight GPUs: `python -m tools.bench gpu --only whole whole_failures whole_unreplayed`."""
