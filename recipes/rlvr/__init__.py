"""Reinforcement learning with verifiable rewards: tasks whose answers a program checks, and GRPO at its plainest."""
