"""The experiments that core.quickstart starts: ppo-math, sft and dpo."""
