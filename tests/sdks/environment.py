"""Make an environment for one release of the SDK: `environment.py VERSION FOLDER`.

It sees what the running environment has installed (torch is most of it) and gets only what that lacks: the release
itself, and dependencies that it wants in other versions.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path


def make(version: str, folder: Path) -> None:
    venv.create(folder, clear=True, with_pip=False, symlinks=True)
    python = str(folder / "bin" / "python")
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    own = subprocess.run([python, "-c", where], check=True, capture_output=True, text=True).stdout.strip()
    (Path(own) / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", "--python", python, "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", f"tinker=={version}"], check=True)


if __name__ == "__main__":
    make(sys.argv[1], Path(sys.argv[2]))
