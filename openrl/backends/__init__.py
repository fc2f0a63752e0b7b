"""Backends: code that owns the accelerator, each a folder with `open_backend(spec)`; see `base.py`, `registry.py`."""
