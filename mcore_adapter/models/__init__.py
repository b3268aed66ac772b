"""Megatron models of every supported family, and how their weights are named."""
