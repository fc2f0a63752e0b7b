"""Content on the disk itself, not in a cache that a crash of the machine would lose."""

from __future__ import annotations

import os
import sys
from pathlib import Path

if sys.platform == "darwin":
    import fcntl


def flush(path: Path) -> None:
    """Force a file's or folder's content to the disk itself."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        if sys.platform == "darwin":  # there fsync stops at the drive's own cache
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
    finally:
        os.close(descriptor)
