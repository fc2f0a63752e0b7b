"""`openrl status`: what is shown of sessions and devices, once and over and over."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from openrl.errors import BadRequest, NotReady
from openrl_cli import console, status
from openrl_cli.main import app
from openrl_cli.status_tables import shown

MODEL = {"name": "a/b", "alias_of": None, "state": "ready", "detail": "", "backend": "cpu", "device": "cpu"}
NOW = {
    "lane": "train+sample",
    "runs": ["s:train:0", "t:train:0"],
    "samples": 40,
    "sessions": ["s", "t"],
    "seconds": 1.2,
}
SESSION = {
    "id": "3f2a",
    "project": "p1",
    "weight": 2.0,
    "share": 0.75,
    "seconds": {"train": 20.0, "sample": 5.0, "other": 1.0},
    "runs": 2,
    "train_queued": 7,
    "samples_queued": 30,
    "samples_drawn": 64,
}


def picture(**more: Any) -> dict[str, Any]:
    models = [{**MODEL, "dtype": "float32", "busy": 0.93, "now": NOW}]
    whole = {"version": "9.9", "uptime_s": 60.0, "models": models, "sessions": [SESSION], "runs": []}
    return {**whole, "queue": {"train": 7, "sample": 94}, **more}


def text(content: dict[str, Any]) -> str:
    out = Console(width=200, file=io.StringIO())
    out.print(shown(content))
    assert isinstance(out.file, io.StringIO)
    return out.file.getvalue()


def test_shares_and_what_the_device_does() -> None:
    printed = text(picture())
    for part in ("93%", "trains and samples: 2 runs for 1.2 s, 40 samples", "3f2a", "p1", "75%", "21.0 s", "5.0 s"):
        assert part in printed
    assert "64 drawn, 30 queued" in printed
    idle = {**NOW, "lane": "idle", "runs": [], "samples": 0}
    assert "idle" in text(picture(models=[{**MODEL, "dtype": None, "busy": 0.0, "now": idle}], sessions=[]))


def test_a_server_that_is_older_is_shown_as_far_as_it_goes() -> None:
    old = picture(models=[{**MODEL, "dtype": None}])
    del old["sessions"]
    assert "a/b" in text(old)


def test_watching_shows_it_until_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []

    def fetch(*_: object) -> dict[str, Any]:
        read.append(1)
        if len(read) == 4:
            raise KeyboardInterrupt
        return picture(version=f"9.{len(read)}")

    monkeypatch.setattr(status, "fetch", fetch)
    monkeypatch.setattr(status, "_EVERY_SECONDS", 0.0)
    monkeypatch.setattr(console, "out", Console(width=200, force_terminal=True, record=True))
    CliRunner().invoke(app, ["status", "--watch", "--url", "http://127.0.0.1:9"], catch_exceptions=False)
    assert len(read) == 4
    assert "openrl 9.3" in console.out.export_text()


def test_watching_is_for_people(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "fetch", picture)
    with pytest.raises(BadRequest, match="--watch"):
        CliRunner().invoke(app, ["status", "--watch", "--json"], catch_exceptions=False)
    monkeypatch.undo()
    with pytest.raises(NotReady):
        CliRunner().invoke(app, ["status", "--watch", "--url", "http://127.0.0.1:9"], catch_exceptions=False)


def test_a_sampler_in_a_process_of_its_own() -> None:
    """Once for a model, however many names it has."""
    sampler = {"engine": "vLLM 9.9", "state": "restarting", "detail": "vLLM ended with exit code 3", "restarts": 2}
    model = {**MODEL, "dtype": None, "busy": 0.0, "now": {**NOW, "runs": [], "samples": 0}, "sampler": sampler}
    printed = text(picture(models=[model, {**model, "name": "c/d", "alias_of": "a/b"}]))
    assert "a/b samples with vLLM 9.9: restarting, vLLM ended with exit code 3, started again 2 times" in printed
    assert printed.count("vLLM 9.9") == 1
