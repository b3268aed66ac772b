"""Finished trajectories between the generators and the trainer, under the staleness bound."""
