"""`python -m tools.migrate`: recipes of other systems as recipes of this one."""
