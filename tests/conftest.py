"""Set-up for all tests: no hub, no telemetry, no spinning OpenMP threads; set before anything reads it."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TINKER_TELEMETRY", "0")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.pop("COLUMNS", None)  # tests set their own; what prints reads it when it is imported
