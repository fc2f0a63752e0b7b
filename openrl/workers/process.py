"""What a process that computes sets for itself before it begins."""

from __future__ import annotations

import ctypes
import os
import signal
import sys


def set_before_torch() -> None:
    """What torch's libraries read when they are loaded."""
    # Idle OpenMP threads that spin take the cores from the daemon; ones that sleep at once cost a system call for each
    # of a decoding step's thousand small products. So they spin for well under a millisecond, then sleep.
    os.putenv("OMP_WAIT_POLICY", "PASSIVE")
    os.putenv("GOMP_SPINCOUNT", "50000")
    # Compiled CPU kernels are kept for each shape ever seen, 1024 of them, about a megabyte each: too many for mixed
    # lengths, where few shapes come again.
    os.putenv("LRU_CACHE_CAPACITY", "128")
    os.putenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")
    # Large tensors in large pages: the system clears these ten times as fast, and a pass asks for much memory.
    os.putenv("THP_MEM_ALLOC_ENABLE", "1")


def die_with_parent() -> None:
    """Ask Linux to end this process when the daemon ends, however hard, so that a restart finds the memory free."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
