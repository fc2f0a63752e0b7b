"""Checkpoint folders: their names and addresses, what they say of themselves, and how they come to be at once."""
