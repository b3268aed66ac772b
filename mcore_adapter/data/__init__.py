"""Packed batches and how they are cut into microbatches."""
