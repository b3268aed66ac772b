"""Hugging Face folders: reading and writing weights."""
