"""Measurements on the processor of one host."""
