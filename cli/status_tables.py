"""The tables of `openrl status`: models and what their devices do, sessions and their shares, runs."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Group
from rich.table import Column, Table
from rich.text import Text

from openrl_cli import console

_LANES = {"idle": "idle", "train": "trains", "sample": "samples", "train+sample": "trains and samples"}


def shown(picture: dict[str, Any]) -> Group:
    """The picture of `GET /api/v1/status`. What a server older than this command leaves out is left out here too."""
    queue, sessions = picture["queue"], picture.get("sessions", [])
    return Group(
        Text(f"openrl {picture['version']}, up {console.duration(picture['uptime_s'])}"),
        *[Text(_remote(link)) for link in [picture.get("remote"), *picture.get("remotes", [])] if link],
        Text(f"waiting: {queue['train']} training requests, {queue['sample']} samples"),
        _models(picture["models"]),
        *[Text(_sampler(model)) for model in picture["models"] if model.get("sampler") and not model["alias_of"]],
        *([_sessions(sessions)] if sessions else []),
        _runs(picture["runs"]) if picture["runs"] else Text("no runs"),
    )


def _remote(link: dict[str, Any]) -> str:
    """How the connection to a remote is: `remote gke (https://...): retrying for 12 s: no sign of life`."""
    since = console.duration(time.time() - link["since"])
    state = f"{link['state']} for {since}"
    if link["state"] != "connected":
        state += f": {link['last_error']}"
    kept = f"{_count(link['kept_requests'], 'request')} ({console.size(link['kept_bytes'])}) kept"
    return f"remote {link['name']} ({link['url']}): {state}; {kept}, {link['replayed']} sent again"


def _models(models: list[dict[str, Any]]) -> Table:
    named = Column("model", overflow="fold", min_width=24)  # never so narrow that it cannot be read
    table = Table(named, "state", "memory", "last used", "device", "busy", "now")
    for model in models:
        shown = f"{model['name']} (alias of {model['alias_of']})" if model["alias_of"] else model["name"]
        state = f"{model['state']}: {model['detail']}" if model["detail"] else model["state"]
        busy = f"{model['busy']:.0%}" if model.get("busy") is not None else ""
        table.add_row(*map(Text, (shown, state, _memory(model), _last_used(model), _device(model), busy, _now(model))))
    return table


def _device(model: dict[str, Any]) -> str:
    """Where and how it computes: `torch: cpu, bfloat16`."""
    place = ", ".join(str(model[key]) for key in ("device", "dtype", "quantize") if model.get(key))
    return f"{model['backend']}: {place}" if model["backend"] else place


def _memory(model: dict[str, Any]) -> str:
    """What a loaded model holds, or what one that is not loaded would take."""
    held, needed = model.get("memory_bytes"), model.get("needed_bytes")
    return console.size(held) if held else f"needs {console.size(needed)}" if needed else ""


def _last_used(model: dict[str, Any]) -> str:
    at = model.get("last_used_at")
    return "" if at is None else f"{console.duration(max(0.0, time.time() - at))} ago"


def _sampler(model: dict[str, Any]) -> str:
    """A sampler in a process of its own: `local/tiny samples with vLLM 0.32.0: ready, cpu, started again 2 times`."""
    sampler = model["sampler"]
    again = f", started again {_count(sampler['restarts'], 'time')}" if sampler["restarts"] else ""
    return f"{model['name']} samples with {sampler['engine']}: {sampler['state']}, {sampler['detail']}{again}"


def _now(model: dict[str, Any]) -> str:
    """What a device has in hand: `trains and samples: 2 runs for 1.2 s, 40 samples`."""
    now = model.get("now")
    if now is None:
        return ""
    parts: list[str] = []
    if now["runs"]:
        parts.append(f"{_count(len(now['runs']), 'run')} for {now['seconds']:.1f} s")
    if now["samples"]:
        parts.append(_count(now["samples"], "sample"))
    lane = _LANES[now["lane"]] if now["lane"] in _LANES else str(now["lane"])
    return f"{lane}: {', '.join(parts)}" if parts else lane


def _sessions(sessions: list[dict[str, Any]]) -> Table:
    """Share and seconds are of the last minute."""
    table = Table("session", "project", "share", "weight", "trained", "sampled", "runs", "queued", "samples")
    for session in sessions:
        seconds = session["seconds"]
        cells = (
            session["id"],
            session["project"] or "",
            f"{session['share']:.0%}",
            f"{session['weight']:g}",
            f"{seconds['train'] + seconds['other']:.1f} s",
            f"{seconds['sample']:.1f} s",
            str(session["runs"]),
            str(session["train_queued"]),
            f"{session['samples_drawn']} drawn, {session['samples_queued']} queued",
        )
        table.add_row(*map(Text, cells))
    return table


def _runs(runs: list[dict[str, Any]]) -> Table:
    table = Table("run", "base model", "state", "rank", "next request", "queued")
    for run in runs:
        shown = {**run, "rank": "full" if run["rank"] is None else run["rank"]}
        table.add_row(*(Text(str(shown[key])) for key in ("id", "base_model", "state", "rank", "next_seq", "queued")))
    return table


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
