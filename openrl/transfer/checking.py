"""What can be wrong between this machine and a remote, looked at in order and said in words."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

import httpx

from openrl.errors import OpenRLError, SettingsError
from openrl.remotes import Remote
from openrl.settings import is_loopback
from openrl.transfer.server import Server, detail, explain, reach
from openrl.version import VERSION

_CALLS = 7
_MOST_SKEW_S = 30.0
_SLOW_MS = 1000.0


@dataclass(frozen=True, slots=True)
class Model:
    name: str
    state: str


@dataclass(slots=True)
class Report:
    """What was found; None is what could not be looked at. `problems` end a check with an error, `notes` do not."""

    name: str
    url: str
    key_source: str
    reached: bool = False
    latency_ms: float | None = None  # median of a few calls on one connection
    client_version: str = VERSION
    server_version: str | None = None
    clock_skew_s: float | None = None  # server's clock minus ours
    auth: str | None = None  # "ok", "denied", or "no key"
    scope: str | None = None
    models: list[Model] = field(default_factory=list[Model])
    problems: list[str] = field(default_factory=list[str])
    notes: list[str] = field(default_factory=list[str])

    @property
    def good(self) -> bool:
        return not self.problems


async def check(remote: Remote) -> Report:
    """Never raises OpenRLError: what goes wrong is in the report."""
    report = Report(remote.name, str(remote.kube) if remote.kube else remote.url, remote.token.shown)
    _check_plain(remote, report)
    key = _read_key(remote, report)
    try:
        async with reach(remote, key, patience=0) as server:
            await _look(server, remote, key, report)
    except OpenRLError as error:
        report.problems.append(str(error))
    return report


def _check_plain(remote: Remote, report: Report) -> None:
    url = urlsplit(remote.url)
    if remote.kube is None and url.scheme == "http" and not is_loopback(url.hostname or ""):
        report.problems.append(
            f"{remote.url} has no TLS: the key and all data go over the network in clear. Use https."
        )


def _read_key(remote: Remote, report: Report) -> str:
    try:
        return remote.token.read()
    except SettingsError as error:
        report.problems.append(str(error))
        return ""


async def _look(server: Server, remote: Remote, key: str, report: Report) -> None:
    try:
        answers = await _measure(server, report)
    except httpx.TransportError as error:
        report.problems.append(f"not reached: {explain(error, remote.url)}.")
        return
    if answers.status_code != HTTPStatus.OK:
        report.problems.append(f"the server is up but says {answers.status_code} to a health check: {detail(answers)}")
    _compare_versions(await server.once(""), report)
    await _check_key(server, remote, key, report)


async def _measure(server: Server, report: Report) -> httpx.Response:
    """Latency and clock; returns the last answer. The first call opens the connection and does not count."""
    answer = await server.once("api/v1/healthz")
    times: list[float] = []
    skews: list[float] = []
    for _ in range(_CALLS):
        started, at = time.perf_counter(), time.time()
        answer = await server.once("api/v1/healthz")
        times.append(time.perf_counter() - started)
        if (there := _date(answer.headers)) is not None:
            skews.append(there + 0.5 - (at + times[-1] / 2))  # the header has whole seconds, cut off
    report.reached = True
    report.latency_ms = statistics.median(times) * 1000
    report.clock_skew_s = round(statistics.median(skews), 1) if skews else None
    if report.latency_ms > _SLOW_MS:
        report.notes.append(f"calls take {report.latency_ms:.0f} ms; training works, but every step waits for several.")
    if report.clock_skew_s is not None and abs(report.clock_skew_s) > _MOST_SKEW_S:
        way = "ahead of" if report.clock_skew_s > 0 else "behind"
        report.problems.append(
            f"the server's clock is {abs(report.clock_skew_s):.0f} s {way} this machine's: signed URLs and tokens end "
            "too early or too late. Set the clocks (NTP)."
        )
    return answer


def _date(headers: Mapping[str, str]) -> float | None:
    try:
        found: datetime = parsedate_to_datetime(headers["date"])
    except (KeyError, ValueError):
        return None
    return found.timestamp()


def _compare_versions(answer: httpx.Response, report: Report) -> None:
    content = _fields(answer)
    if content.get("name") != "openrl":
        report.problems.append("what answers there is no openrl server.")
        return
    report.server_version = str(content.get("version"))
    if report.server_version != VERSION:
        report.notes.append(
            f"this is openrl {VERSION}, the server {report.server_version}: run the same version on both sides if "
            "something is refused."
        )


async def _check_key(server: Server, remote: Remote, key: str, report: Report) -> None:
    answer = await server.once("api/v1/get_server_capabilities")
    if answer.status_code == HTTPStatus.UNAUTHORIZED:
        report.auth = "denied" if key else "no key"
        hint = f"Store one that is good with: openrl remote login {remote.name}"
        report.problems.append(f"the server does not take {'this key' if key else 'calls without a key'}. {hint}")
    elif answer.status_code != HTTPStatus.OK:
        report.problems.append(f"capabilities are refused with {answer.status_code}: {detail(answer)}")
    else:
        report.auth = "ok"
        report.scope = _scope(_fields(await server.once("api/v1/auth/apikey/me")))
        report.models = [_model(entry) for entry in _fields(answer).get("supported_models", ())]
        _judge(report)


def _model(entry: Mapping[str, Any]) -> Model:
    return Model(str(entry.get("model_name")), str(entry.get("state", "")))


def _scope(me: Mapping[str, Any]) -> str | None:
    found: object = me.get("scopes")
    return ", ".join(sorted(map(str, found))) if isinstance(found, list) else None


def _judge(report: Report) -> None:
    failed = [model.name for model in report.models if model.state == "failed"]
    waiting = [model.name for model in report.models if model.state not in ("failed", "ready", "")]
    if not report.models:
        report.problems.append("the server serves no models.")
    if failed:
        report.problems.append(f"models that failed to load there: {', '.join(failed)}. See: openrl status --remote")
    if waiting:
        report.notes.append(f"models that are still being loaded: {', '.join(waiting)}.")
    if report.scope is not None and not {"use", "admin"} & set(report.scope.split(", ")):
        report.notes.append(f"the key's scope is {report.scope}: it may look, but neither train nor sample.")


def _fields(answer: httpx.Response) -> dict[str, Any]:
    try:
        content: object = answer.json()
    except ValueError:
        return {}
    return dict(content) if isinstance(content, dict) else {}
