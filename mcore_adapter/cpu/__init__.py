"""Megatron-core on CPU: gloo and torch kernels."""
