"""Distributed checkpoints, in the background and tensor by tensor."""
