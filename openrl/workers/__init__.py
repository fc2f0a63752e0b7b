"""Worker processes: each owns the accelerator for one base model and is spoken to over a pipe."""
