"""The unmodified tinker-cookbook against `openrl serve`, offline: what it needs around it, and its recipes."""
