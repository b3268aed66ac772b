"""Measurements on GPUs; without one, small versions run on the CPU to try them out."""
