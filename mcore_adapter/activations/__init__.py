"""Memory of activations: how much an update takes, and how much of it is computed again instead of kept."""
