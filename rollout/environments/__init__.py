"""Environments: games and tasks that answer the policy, in processes of their own."""
