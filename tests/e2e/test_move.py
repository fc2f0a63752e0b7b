"""A run that moves from one backend to another and back, by the script that users have for it."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "move_between_backends.py"

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,  # three servers, one after the other; tests/contract has the move of files by default
    pytest.mark.skipif(importlib.util.find_spec("mlx_lm") is None, reason="needs MLX"),
]


def test_c3_o11_c5_a_run_goes_on_elsewhere_as_it_would_have_where_it_was(tiny_model: Path) -> None:
    """mps to cpu and cpu to mps, each time in another daemon: with the optimizer's state (C3, O11) the steps after are
    the same within float32's rounding (C5), and seeded samples of the weights are the same tokens."""
    options = ["--model", str(tiny_model), "--name", "local/tiny", "--rank", "4", "--tolerance", "1e-5"]
    command = [sys.executable, str(SCRIPT), "mps", "cpu", "mps", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert [re.split(r"  +", line)[0] for line in lines[:-1]] == [
        "mps: trained",
        "mps: not moved",
        "cpu: resumed",
        "cpu: not moved",
        "mps: resumed",
    ]
    losses = [[float(loss) for loss in re.findall(r"\d+\.\d{6}", line)] for line in lines[:-1]]
    assert losses[0][0] > losses[0][2] > losses[1][2] > losses[3][2], "the run learns, before and after its moves"
