"""A generator without a model, for tests and measurements."""
