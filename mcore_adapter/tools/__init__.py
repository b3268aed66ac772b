"""A second path to tools/convert.py."""
