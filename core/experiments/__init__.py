"""The experiments that core.quickstart starts: ppo-math and sft."""
