"""Code of a SGLang server's processes: a table of hooks (table.py), and one file for each concern."""
