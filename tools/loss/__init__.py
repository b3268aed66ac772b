"""Print advantages, loss and gradients of an algorithm for given log-probabilities."""
