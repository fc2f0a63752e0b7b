"""The script in the README runs as printed, against a server of the embedded model."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from openrl_recipes.local_server import Endpoint

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def test_the_readme_s_script_teaches_the_model_its_answer(smol_server: Endpoint) -> None:
    readme = Path(__file__).parents[2] / "README.md"
    (script,) = re.findall(r"```python\n(.*?)```", readme.read_text(), flags=re.DOTALL)
    environment = os.environ | smol_server.environment() | {"PYTHONFAULTHANDLER": "1"}
    ended = run(script, environment)
    if ended.returncode == -signal.SIGABRT:  # seen while Python ends beside the SDK's threads, after all its output
        print(ended.stderr)
        ended = run(script, environment)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.rstrip().endswith("open sesame")


def run(script: str, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", script]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=250, check=False)
