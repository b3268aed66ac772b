"""Kill a run again and again, and compare it with one that was left alone."""
