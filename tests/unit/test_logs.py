"""Logging: JSON lines in a file, warnings on the terminal, no keys anywhere."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from openrl.telemetry import logs

KEY = "tml-0123456789abcdef"


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    """Give pytest its own handlers back."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers = []
    yield
    for handler in root.handlers:
        handler.close()
    root.handlers, root.level = handlers, level


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_one_json_line_an_event_with_its_context(tmp_path: Path) -> None:
    logs.setup(tmp_path, "info")
    log = logging.getLogger("openrl.test")
    with logs.bound(request_id="r1"), logs.bound(run="run1", op="forward"):
        log.info("step %d\nof two", 1)
    log.debug("not at this level")
    log.info("later")
    first, second = lines(tmp_path / "daemon.jsonl")
    assert first["message"] == "step 1\nof two"
    assert (first["level"], first["logger"]) == ("info", "openrl.test")
    assert (first["request_id"], first["run"], first["op"]) == ("r1", "run1", "forward")
    assert "request_id" not in second


def test_the_terminal_gets_warnings_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup(tmp_path, "debug", name="worker")
    logging.getLogger("openrl.test").info("quiet")
    logging.getLogger("openrl.test").warning("loud")
    assert capsys.readouterr().err == "WARNING openrl.test: loud\n"
    assert [line["message"] for line in lines(tmp_path / "worker.jsonl")] == ["quiet", "loud"]


def test_keys_are_taken_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """T52: neither message, arguments nor exceptions may carry an API key."""
    logs.setup(tmp_path)
    log = logging.getLogger("openrl.test")
    log.warning("key %s", KEY)
    try:
        raise ValueError(f"header {KEY}")
    except ValueError:
        log.exception("failed")
    assert KEY not in (tmp_path / "daemon.jsonl").read_text()
    assert lines(tmp_path / "daemon.jsonl")[1]["exception"].endswith("ValueError: header tml-***")
    assert KEY not in capsys.readouterr().err


def test_setting_up_again_replaces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup(tmp_path / "a")
    logs.setup(tmp_path / "b")
    logging.getLogger("openrl.test").warning("once")
    assert not (tmp_path / "a" / "daemon.jsonl").read_text()
    assert len(capsys.readouterr().err.splitlines()) == 1
