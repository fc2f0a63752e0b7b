"""Probes: a probe calls one name with small real arguments and asserts what the answer must mean."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from compat.stage import Stage

Call = Callable[..., Any]
# Gets the stage and the method under test, already settled to its final value; returns a remark for the table, or None.
Probe = Callable[[Stage, Call], str | None]
CommandProbe = Callable[[Stage], str | None]

PROBES: dict[str, Probe] = {}
COMMAND_PROBES: dict[str, CommandProbe] = {}
SECONDS = 60


def probe(client: str, *names: str) -> Callable[[Probe], Probe]:
    """Register a probe for names of a client that mean the same, such as `forward` and `forward_async`."""

    def register(function: Probe) -> Probe:
        for name in names:
            assert f"{client}.{name}" not in PROBES, f"two probes for {client}.{name}"
            PROBES[f"{client}.{name}"] = function
        return function

    return register


def command(name: str) -> Callable[[CommandProbe], CommandProbe]:
    """Register a probe for a command, named as it is typed."""

    def register(function: CommandProbe) -> CommandProbe:
        COMMAND_PROBES[name] = function
        return function

    return register


@dataclass(frozen=True)
class Result:
    """How a probe ended: `error` is empty where the answer was what it must be."""

    name: str
    endpoints: tuple[str, ...]
    error: str = ""
    remark: str = ""


def run(stage: Stage, name: str) -> Result:
    """Run the probe of a name or command; whatever it raises is its result."""
    stage.server.recorded = []
    try:
        remark = COMMAND_PROBES[name](stage) if name in COMMAND_PROBES else PROBES[name](stage, _caller(stage, name))
    except Exception as error:  # noqa: BLE001 - an SDK may raise anything, and the table must hold it
        said = f"{type(error).__name__}: {error}" if str(error) else _where(error)
        return Result(name, tuple(stage.server.recorded), said)
    return Result(name, tuple(stage.server.recorded), remark=remark or "")


def _where(error: BaseException) -> str:
    """A bare assertion's own line."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return type(error).__name__
    frame = inspect.getframeinfo(trace.tb_frame)
    return f"{type(error).__name__}: {(frame.code_context or ['?'])[0].strip()}"


def _caller(stage: Stage, name: str) -> Call:
    """Calls the method on the stage's client of that kind, or on the one given as `on`, and waits for the end."""
    client, _, method = name.partition(".")

    def call(*arguments: Any, on: Any = None, **options: Any) -> Any:
        owner = stage.client(client) if on is None else on
        with stage.server.recording():
            value = getattr(owner, method)
            return settled(value(*arguments, **options) if callable(value) else value)

    return call


def settled(value: Any) -> Any:
    """The final value behind coroutines and futures, however deep."""
    while True:
        if inspect.iscoroutine(value):
            value = asyncio.run(value)
        elif callable(getattr(value, "result", None)):
            value = value.result(timeout=SECONDS)
        else:
            return value
