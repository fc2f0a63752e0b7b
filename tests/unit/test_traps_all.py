"""Every trap of tinker-protocol 10 is named by at least one test: in its name, as `test_t20_...`, or its docstring."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[1]
TRAPS = range(1, 54)


def test_every_trap_is_named_by_a_test() -> None:
    named = {trap for file in TESTS.rglob("test_*.py") for trap in _named(file)}
    assert [f"T{trap}" for trap in TRAPS if trap not in named] == []


def _named(file: Path) -> Iterator[int]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            yield from (int(number) for number in re.findall(r"_t(\d+)(?=_)", node.name))
            yield from (int(number) for number in re.findall(r"\bT(\d+)\b", ast.get_docstring(node) or ""))
