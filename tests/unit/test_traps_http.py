"""Traps of HTTP itself (tinker-protocol 10): statuses, redirects, sizes and what may never be written down."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from openrl.errors import OpenRLError
from openrl.server.app import create_app, routes
from openrl.server.errors import STATUS, status_of
from openrl.settings import load
from openrl.types import SessionId
from support.fake_daemon import FakeDaemon, server_settings
from support.http import KEY, Http

SECRET = "tml-secret-of-someone-else"


@pytest.fixture
def daemon() -> FakeDaemon:
    daemon = FakeDaemon()
    daemon.sessions[SessionId("s0")] = "active"
    return daemon


@pytest.fixture
def http(daemon: FakeDaemon) -> Http:
    return Http(create_app(daemon.as_daemon, server_settings(), KEY))


def paths() -> list[tuple[str, str]]:
    """Every route with a path that fits it, and one with a slash too many."""
    found: list[tuple[str, str]] = []
    for route in routes():
        path = route.path
        for name in route.param_convertors:
            path = path.replace(f"{{{name}:path}}", "x").replace(f"{{{name}}}", "x")
        found += [(method, given) for method in sorted(route.methods or ()) for given in (path, path + "/")]
    return [(method, path) for method, path in found if method != "HEAD"]


@pytest.mark.parametrize(("method", "path"), paths())
def test_t3_t4_t30_t48_t53_what_every_route_answers_to_nonsense(http: Http, method: str, path: str) -> None:
    """T3: an error has a JSON body and its length. T4: never 409. T30: never 402. T48, T53: never a redirect."""
    answer = http.call(method, f"/{path}", content=b"[", headers={"content-type": "application/json"})
    assert answer.status_code not in (402, 409)
    assert not 300 <= answer.status_code < 400
    if answer.status_code >= 400:
        assert int(answer.headers["content-length"]) == len(answer.content) > 0
    if answer.status_code == 400:
        assert answer.json()["detail"]


def test_t4_t30_no_error_is_a_409_or_402() -> None:
    assert not {402, 409} & set(STATUS.values())
    assert status_of(OpenRLError("anything else")) == 500


def test_t28_t52_telemetry_is_accepted_whatever_it_holds_and_kept_out_of_the_log(
    http: Http, caplog: pytest.LogCaptureFixture
) -> None:
    """T28: a failing endpoint blocks the client for 30 s. T52: the client's own event can hold its key in clear."""
    caplog.set_level(logging.DEBUG)
    data = {"request_headers": {"X-API-Key": SECRET, "X-Tinker-Weights-Access-Token": SECRET}, "n": float("1e308")}
    events: list[Any] = [
        {"event": "GENERIC_EVENT", "event_name": SECRET, "event_data": data},
        {"event": "UNHANDLED_EXCEPTION", "error_message": SECRET, "traceback": SECRET},
        {"event": "SESSION_END", "duration": "0:00:01.5"},
        {"event": "SOMETHING_NEW"},
    ]
    for body in ({"events": events, "session_id": "sessionless-1"}, {"events": []}, {}):
        assert http.post("telemetry", body).json() == {"status": "accepted"}
    assert SECRET not in caplog.text


def test_t52_secrets_are_not_logged(http: Http, caplog: pytest.LogCaptureFixture) -> None:
    """T52: neither from headers nor from bodies, in no kind of answer."""
    caplog.set_level(logging.DEBUG)
    headers = {"x-tinker-weights-access-token": SECRET}
    body = {"session_id": "s0", "model_seq_id": 0, "path": "tinker://a/weights/b", "weights_access_token": SECRET}
    http.post("load_weights", body, headers=headers)
    http.post("copy_weights", body, headers=headers)
    http.post("load_weights", {**body, "model_seq_id": "x"}, headers=headers)
    http.post("client/config", {}, headers={"x-api-key": SECRET})
    assert caplog.records
    assert SECRET not in caplog.text


def test_t51_one_large_datum_passes_where_a_chunk_ends() -> None:
    """T51: a datum beyond the chunk limit is sent whole, so the body limit is far above it."""
    limit = load({}, None).settings.server.max_body_bytes
    config = Http(create_app(FakeDaemon().as_daemon, server_settings(), KEY)).post("client/config").json()
    assert limit >= 10 * config["fwdbwd_max_chunk_bytes_count"]
