"""Weight updates from the trainer to the generators."""
