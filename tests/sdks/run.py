"""Run `loop.py` under several releases of the SDK against one real server: `run.py PYTHON...`.

Each interpreter brings a release, the newest last. All must complete the loop, and print the same figures: whether a
number travelled as JSON or as protobuf must not show.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from openrl_recipes.local_server import Endpoint, local_server
from support import tiny
from support.tokenizers import save_byte_tokenizer

MODEL = "local/tiny"
TOKENS = ("tokens", "greedy", "stopped")  # figures that are token ids
LOOP = Path(__file__).with_name("loop.py")
SECONDS = 240


def main(pythons: list[str]) -> int:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = tiny.build(folder / "tiny")
        save_byte_tokenizer(model)
        arguments = ["--data-dir", str(folder / "data"), "--model", str(model), "--dtype", "float32"]
        with local_server(folder / "server.log", arguments) as endpoint:
            # The newest first: older ones then meet what only it can make, in the lists of all checkpoints.
            figures = [_run(python, endpoint) for python in reversed(pythons)][::-1]
    different = [python for python, found in zip(pythons, figures, strict=True) if not _same(found, figures[-1])]
    for python in different:
        print(f"other figures under {python} than under {pythons[-1]}", file=sys.stderr)
    return 1 if different else 0


def _run(python: str, endpoint: Endpoint) -> dict[str, Any]:
    """The figures of the loop under one interpreter. Raises CalledProcessError if it failed."""
    environment = (
        os.environ
        | endpoint.environment()
        | {"TINKER_TELEMETRY": "1", "TINKER_PROJECT_ID": "sdks", "OMP_NUM_THREADS": "1"}
    )
    started = time.monotonic()
    command = [python, "-W", "ignore", str(LOOP), MODEL]  # newer releases deprecate what older ones need
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=SECONDS, check=True)
    figures = json.loads(done.stdout.splitlines()[-1])
    print(f"tinker {figures.pop('release')}: complete in {time.monotonic() - started:.1f} s", flush=True)
    return figures


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Tokens exactly; numbers to float32 rounding, since the order of a sum may differ with what else was batched."""
    return one.keys() == other.keys() and all(_equal(name, one[name], other[name]) for name in one)


def _equal(name: str, one: Any, other: Any) -> bool:
    return one == other if name in TOKENS else bool(np.allclose(one, other, rtol=1e-5, atol=1e-6))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
