"""Recipes of other systems: their keys as tables, and their translation into a recipe of this system."""
