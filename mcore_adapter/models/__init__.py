"""Megatron models: what layers are made of, and how weights are named."""
