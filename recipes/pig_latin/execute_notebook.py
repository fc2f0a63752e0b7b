"""Run pig_latin.ipynb from the first cell to the last and keep its outputs.

    python -m openrl_recipes.pig_latin.execute_notebook      # against the server that TINKER_BASE_URL names

Needs nbclient, nbformat and ipykernel, which the extra `dev` brings. Tests run it shortened: `execute(steps=8)` puts a
cell behind the one tagged `parameters` that sets STEPS = 8.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

from openrl_recipes.local_server import inherited_environment

NOTEBOOK = Path(__file__).with_name("pig_latin.ipynb")
CELL_SECONDS = 3600  # a busy server


def execute(environment: Mapping[str, str] | None = None, **parameters: object) -> Any:
    """The notebook with the outputs of a fresh run, as nbformat's node. `environment` is the kernel's, whole.

    Each of `parameters` sets the notebook's variable of that name in capitals. Raises `CellExecutionError` if a cell
    fails.
    """
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    injected = None
    if parameters:
        lines = [f"{name.upper()} = {value!r}" for name, value in parameters.items()]
        injected = nbformat.v4.new_code_cell("\n".join(lines))
        notebook.cells.insert(_parameters_index(notebook) + 1, injected)
    # Timings in the metadata would change with each run and tell nothing.
    client = NotebookClient(notebook, timeout=CELL_SECONDS, kernel_name="python3", record_timing=False)
    kernel = dict(inherited_environment() if environment is None else environment)
    client.execute(env=kernel | {"PYTHONWARNINGS": "ignore:IProgress not found"})  # tqdm asks for ipywidgets
    if injected is not None:
        notebook.cells.remove(injected)
    return notebook


def texts(notebook: Any) -> list[str]:
    """What the cells printed or returned as text, stderr too, in order."""
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    return [output.get("text") or output.get("data", {}).get("text/plain", "") for output in outputs]


def _parameters_index(notebook: Any) -> int:
    return next(i for i, cell in enumerate(notebook.cells) if "parameters" in cell.metadata.get("tags", ()))


if __name__ == "__main__":
    nbformat.write(execute(), NOTEBOOK)
