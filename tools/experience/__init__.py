"""`python -m tools.experience`: stores of episodes, and what became of their prompts."""
