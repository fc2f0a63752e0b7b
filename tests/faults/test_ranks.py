"""What becomes of the ranks of a base model on several devices when one of them ends, or stops."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from openrl.errors import BackendFault
from support import tiny
from support.ranks import open_ranks
from support.training import ce, create, forward_backward

pytestmark = pytest.mark.slow


def _gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def _within(seconds: float, condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


_HOLDER = """
import sys, time
from pathlib import Path
from support.ranks import open_ranks
if __name__ == "__main__":
    with open_ranks(Path(sys.argv[1])) as ranks:
        print(ranks.pids[0], flush=True)
        time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a rank ends when it next hears nothing from rank 0")
def test_no_rank_outlives_rank_0(tmp_path: Path) -> None:
    script = tmp_path / "holder.py"
    script.write_text(_HOLDER)
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), str(tiny.build(tmp_path / "model"))]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        pid = int(holder.stdout.readline())
        assert not _gone(pid)
        holder.kill()
    assert _within(10, lambda: _gone(pid))


def test_a_rank_that_hangs_is_given_up(tmp_path: Path) -> None:
    with open_ranks(tiny.build(tmp_path / "model"), timeout=8.0) as ranks:
        create(ranks.trainer, tmp_path)
        os.kill(ranks.pids[0], signal.SIGSTOP)
        with pytest.raises(BackendFault):
            forward_backward(ranks.trainer, ce(5, 6))
        assert ranks.lost
