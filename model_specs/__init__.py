"""Model shapes and features read from config.json; standard library only."""
