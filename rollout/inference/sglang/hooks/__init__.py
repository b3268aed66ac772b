"""What runs inside a SGLang server's processes: a table of hooks (table.py), one file for each concern."""
