"""Inference backends and the router in front of them."""
