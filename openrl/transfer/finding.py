"""Which checkpoint is meant: a `tinker://` path is one, a run stands for its newest training checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from openrl.checkpoints.layout import parse
from openrl.errors import BadRequest, NotFound
from openrl.transfer.server import Server

_SURELY_LATER_S = 60.0  # a save takes a while, and ends after the time that its checkpoint bears


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint's path, and what its user should know of the choice."""

    path: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class _Checkpoint:
    checkpoint_type: str
    tinker_path: str
    time: str


@dataclass(frozen=True, slots=True)
class _Page:
    checkpoints: list[_Checkpoint]


@dataclass(frozen=True, slots=True)
class _Run:
    last_request_time: str


async def find_checkpoint(server: Server, what: str) -> Found:
    """Raises BadRequest for what is neither a path nor a run's id, NotFound for a run without training checkpoint.

    A run is never saved from here: its requests are numbered by the script that trains it, and one more in between
    would take the number of the script's next.
    """
    if "://" in what:
        return Found(str(parse(what)))
    if ":train:" not in what or "/" in what:
        raise BadRequest(
            f"{what!r} is neither a checkpoint nor a run.",
            "Give tinker://<run>/weights/<name> as save_state returned it, or a run's id, as `openrl status` shows it.",
        )
    page = await server.json(_Page, "GET", f"training_runs/{what}/checkpoints")
    training = [one for one in page.checkpoints if one.checkpoint_type == "training"]
    if not training:
        raise NotFound(
            f"run {what} has no training checkpoint.",
            "Save one in its script: training_client.save_state(NAME), then push again.",
        )
    newest = max(training, key=lambda one: _seconds(one.time))
    run = await server.json(_Run, "GET", f"training_runs/{what}")
    later = _seconds(run.last_request_time) - _seconds(newest.time)
    note = f"the run has gone on for {later:.0f} s since this checkpoint; what came after is not in it"
    return Found(newest.tinker_path, note if later > _SURELY_LATER_S else "")


def _seconds(time: str) -> float:
    return datetime.fromisoformat(time).timestamp()
