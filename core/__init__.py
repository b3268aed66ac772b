"""The training loop, its configuration, processes, recovery and monitoring."""
