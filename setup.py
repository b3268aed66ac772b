"""Support tools that call setup.py. The metadata is in pyproject.toml."""

from setuptools import setup

setup()
