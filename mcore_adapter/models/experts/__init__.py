"""Experts of a layer: their weights in one tensor per linear layer, and the grouped products of them."""
