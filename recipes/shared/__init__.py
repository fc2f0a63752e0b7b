"""What several recipes need: options, the run folder, progress bars, the pieces of a datum and of GRPO, the report."""
