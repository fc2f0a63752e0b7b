"""Makes this folder a package without its neighbours, which are openrl's and not for this interpreter, and runs it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

_NAME = "openrl_vllm"


def run() -> int:
    """Serve frames until stdin ends. Returns the exit code."""
    folder = Path(__file__).parent
    sys.path.pop(0)  # this folder, whose modules are none of vLLM's
    spec = importlib.util.spec_from_file_location(
        _NAME, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules[_NAME] = package
    spec.loader.exec_module(package)
    return importlib.import_module(f"{_NAME}.server").main()


if __name__ == "__main__":
    sys.exit(run())
