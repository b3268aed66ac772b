"""`python -m tools.eval`: evaluation of models on benchmarks."""
