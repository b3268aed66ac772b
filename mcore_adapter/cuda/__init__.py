"""Megatron-core on NVIDIA GPUs: NCCL and fused kernels."""
