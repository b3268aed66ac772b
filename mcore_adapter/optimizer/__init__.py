"""The distributed optimizer, its learning rate, and its state in host memory."""
