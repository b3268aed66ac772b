"""Advantages and losses of the training algorithms."""
