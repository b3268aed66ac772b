"""Measurements of how batches and weights move and are stored."""
