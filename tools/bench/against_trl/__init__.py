"""Measurements beside TRL's GRPOTrainer, which runs in an environment of its own (see ../trl)."""
