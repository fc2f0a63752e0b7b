"""Distillation: a student of low rank learns from the logprobs of a teacher, not from answers."""
