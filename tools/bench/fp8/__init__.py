"""Measurements of FP8: servers that hold FP8 weights, and updates that compute in it, beside the same in bfloat16."""
