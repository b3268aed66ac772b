"""TRL's GRPOTrainer beside this project. TRL runs in an environment of its own."""
