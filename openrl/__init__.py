"""OpenRL: a local-first daemon that trains and samples language models for the tinker SDK."""
