"""Prompts: rows of files, read, tokenized and put in training order."""
