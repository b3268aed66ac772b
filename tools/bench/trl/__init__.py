"""What runs in an environment that has TRL, and nothing of this project: scripts, started by their paths."""
