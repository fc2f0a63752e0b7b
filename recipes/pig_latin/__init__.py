"""The gentlest recipe: supervised fine-tuning on words whose answers a rule gives."""
