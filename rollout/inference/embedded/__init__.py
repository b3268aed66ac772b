"""A generator inside this process, in plain torch: what a run samples with where there is no GPU."""
