"""Training algorithms: what each computes from a batch, and what its updates minimise."""
