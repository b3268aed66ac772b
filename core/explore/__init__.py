"""The rollout process of a run: its data sets and settings, and what samples, leases and evaluates in it."""
