"""The script in the README runs as printed, against a server of the embedded model."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from openrl_recipes.local_server import Endpoint

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def test_the_readme_s_script_teaches_the_model_its_answer(smol_server: Endpoint) -> None:
    readme = Path(__file__).parents[2] / "README.md"
    (script,) = re.findall(r"```python\n(.*?)```", readme.read_text(), flags=re.DOTALL)
    environment = os.environ | smol_server.environment()
    command = [sys.executable, "-c", script]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=500, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.rstrip().endswith("open sesame")
