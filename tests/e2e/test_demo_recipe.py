"""The recipe and the demo command against the real server and the real SmolLM2, shrunken to what CI has time for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from support.real_server import data_dir_with_models

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

SHRUNKEN = {"eval-items": 24, "sft-steps": 6, "sft-batch": 12, "rl-steps": 1, "rl-groups": 4, "rl-samples": 4}


def test_the_demo_command_teaches_held_out_sql_and_leaves_nothing_running(tmp_path: Path) -> None:
    flags = [part for name, value in SHRUNKEN.items() for part in (f"--{name}", str(value))]
    data_dir = data_dir_with_models(tmp_path)
    command = [sys.executable, "-m", "openrl_recipes.demo", "--out", str(tmp_path), "--data-dir", str(data_dir), *flags]
    environment = os.environ | {"OMP_WAIT_POLICY": "PASSIVE", "COLUMNS": "120"}
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=800, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr

    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    accuracy = {r["stage"]: r["held_out"] for r in records if "held_out" in r}
    assert accuracy["before"] <= 0.25
    assert accuracy["after sft"] >= accuracy["before"] + 0.15
    losses = [r["loss"] for r in records if "loss" in r]
    assert len(losses) == SHRUNKEN["sft-steps"]
    assert losses[-1] < losses[0] / 2
    assert [r for r in records if "reward" in r]

    assert "Held-out score" in ended.stdout
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert "after sft" in (tmp_path / "report.html").read_text()
    assert not _servers_writing_to(tmp_path)


def _servers_writing_to(folder: Path) -> list[psutil.Process]:
    """Processes that still hold the demo's server log open."""
    log = str(folder / "server.log")
    return [p for p in psutil.process_iter() if _holds(p, log)]


def _holds(process: psutil.Process, log: str) -> bool:
    try:
        return any(file.path == log for file in process.open_files())
    except psutil.Error:
        return False
