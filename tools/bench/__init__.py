"""`python -m tools.bench`: measurements, each beside its baseline."""
