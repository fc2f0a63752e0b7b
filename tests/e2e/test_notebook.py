"""The notebook, shortened, runs from top to bottom against the real server and teaches what it says."""

from __future__ import annotations

import os
import re

import nbformat
import pytest

from openrl_recipes.local_server import Endpoint
from openrl_recipes.pig_latin.execute_notebook import NOTEBOOK, execute, texts

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def test_the_notebook_runs_and_its_model_learns(smol_server: Endpoint) -> None:
    notebook = execute(os.environ | smol_server.environment(), steps=12, eval_words=16)
    printed = "\n".join(texts(notebook))
    before, after = map(int, re.search(r"(\d+)% right before, (\d+)% after", printed).groups())
    assert before <= 10
    assert after >= 35
    assert not [text for text in texts(notebook) if "Warning" in text]
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    committed = nbformat.read(NOTEBOOK, as_version=4)
    assert [cell.source for cell in notebook.cells] == [cell.source for cell in committed.cells]
