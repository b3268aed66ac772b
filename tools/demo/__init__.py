"""`python -m tools.demo`: a small model learns addition."""
