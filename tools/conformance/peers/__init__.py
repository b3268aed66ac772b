"""Adapters to the functions of other projects; serve.py runs one of them in the environment of its project."""

PEERS = ("trl", "verl", "trinity", "openrlhf")
