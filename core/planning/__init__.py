"""The planner: memory, time and layout of a run, computed before any process starts and without torch."""
