"""From prompts to trajectories: data, workflows, rewards and inference backends."""
