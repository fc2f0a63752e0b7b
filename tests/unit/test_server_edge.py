"""What requests pass before the routes, and how errors become answers."""

from __future__ import annotations

import pytest

from openrl.errors import (
    BackendFault,
    BadRequest,
    Busy,
    Conflict,
    Forbidden,
    Gone,
    ModelError,
    NotFound,
    NotReady,
    OpenRLError,
    OutOfMemory,
    QuotaExceeded,
    TooLarge,
    TooSlow,
    Unauthorized,
    WorkerDied,
)
from openrl.server.access import GuardedRoute
from openrl.server.app import create_app, routes
from support.fake_daemon import FakeDaemon, server_settings
from support.http import KEY, Http


def app_for(daemon: FakeDaemon | None = None, **settings: object) -> Http:
    return Http(create_app((daemon or FakeDaemon()).as_daemon, server_settings(**settings), KEY))


# ---- errors ----


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (BadRequest("m"), 400),
        (Conflict("m"), 400),  # never 409 (T4)
        (ModelError("m"), 400),
        (Unauthorized("m"), 401),
        (Forbidden("m"), 403),
        (NotFound("m"), 404),
        (TooSlow("m"), 408),
        (QuotaExceeded("m"), 400),
        (Gone("m"), 410),
        (TooLarge("m"), 413),
        (Busy("m"), 429),
        (NotReady("m"), 503),
        (OutOfMemory("m"), 500),
        (BackendFault("m"), 500),
        (WorkerDied("m"), 500),
    ],
)
def test_the_one_table(error: OpenRLError, status: int) -> None:
    """11.2; each with a JSON body and its length (T3)."""
    daemon = FakeDaemon()
    daemon.errors["create_session"] = type(error)("what is wrong.", "What to do.")
    answer = app_for(daemon).post("create_session", {})
    assert answer.status_code == status
    assert answer.json() == {"detail": "what is wrong. What to do."}
    assert int(answer.headers["content-length"]) == len(answer.content)
    assert ("retry-after" in answer.headers) == (status in (429, 503))


def test_a_crash_is_a_500_that_the_log_explains(caplog: pytest.LogCaptureFixture) -> None:
    daemon = FakeDaemon()
    daemon.errors["create_session"] = ZeroDivisionError("secret detail")
    answer = app_for(daemon).post("create_session", {})
    assert answer.status_code == 500
    assert "secret detail" not in answer.text
    assert answer.headers["x-request-id"] in answer.json()["detail"]
    crash = next(record for record in caplog.records if record.exc_info)
    assert answer.headers["x-request-id"] in crash.getMessage()


def test_unknown_routes_and_methods_are_json() -> None:
    http = app_for()
    for method, path, status in [
        ("GET", "nope", 404),
        ("POST", "healthz/", 404),  # T48: no redirects
        ("GET", "asample", 405),
        ("GET", "//nope", 404),
        ("POST", "auth/apikey", 404),  # L4
    ]:
        answer = http.call(method, path)
        assert answer.status_code == status
        assert answer.json()["detail"].endswith(answer.request.url.path)


# ---- the key ----


@pytest.mark.parametrize("key", [None, "", "tml-wrong", KEY + "x", KEY[:-1], "tml-\xfcmlaut"])
def test_a_bad_key_is_401(key: str | None) -> None:
    http = app_for()
    headers = {} if key is None else {"x-api-key": key.encode("latin-1")}
    http.headers = {}
    answer = http.call("POST", "client/config", content=b"{}", headers=headers)
    assert answer.status_code == 401
    assert "TINKER_API_KEY" in answer.json()["detail"]


def test_auth_off_asks_for_none() -> None:
    http = app_for(auth="off")
    http.headers = {}
    assert http.post("client/config").status_code == 200


# ---- host and origin ----


@pytest.mark.parametrize("host", ["localhost", "localhost:9", "127.0.0.1:8000", "[::1]:8000", "127.1.2.3", "LOCALHOST"])
def test_loopback_hosts_pass(host: str) -> None:
    assert app_for().get("healthz", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "localhost.evil.example", "", "10.0.0.1", "[::1"]
)
def test_dns_rebinding_is_refused(host: str) -> None:
    answer = app_for().get("healthz", headers={"host": host})
    assert answer.status_code == 403
    assert "localhost" in answer.json()["detail"]


def test_other_hosts_pass_when_bound_to_the_network() -> None:
    assert app_for(host="0.0.0.0").get("healthz", headers={"host": "gpu-box:8000"}).status_code == 200


@pytest.mark.parametrize(
    ("bound_to", "origin", "status"),
    [
        ("127.0.0.1", "http://localhost:3000", 403),  # a page of another server of this machine
        ("127.0.0.1", "http://127.0.0.1:8000", 200),
        ("127.0.0.1", "https://evil.example", 403),
        ("127.0.0.1", "null", 403),
        ("127.0.0.1", "file://", 403),
        ("0.0.0.0", "https://evil.example", 403),
        ("0.0.0.0", "http://localhost:8000", 200),
    ],
)
def test_origins(bound_to: str, origin: str, status: int) -> None:
    answer = app_for(host=bound_to).post("telemetry", {}, headers={"origin": origin})
    assert answer.status_code == status
    assert "access-control-allow-origin" not in answer.headers


# ---- the access log ----


def test_every_request_is_logged_once_without_its_key(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "openrl.access")
    http = app_for()
    answer = http.post("client/config?token=tml-query")
    http.call("GET", "nope", headers={"x-api-key": "tml-wrong"})
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0].startswith("POST /api/v1/client/config 200 ")
    assert lines[1].startswith("GET /api/v1/nope 401 ")
    assert len(lines) == 2
    assert answer.headers["x-request-id"] in lines[0]
    assert "tml-" not in caplog.text


# ---- host and origin, further ----


@pytest.mark.parametrize(
    ("bound_to", "names", "host", "status"),
    [
        ("127.0.0.1", ("gpu-box",), "gpu-box:8000", 200),
        ("127.0.0.1", ("gpu-box",), "evil.example", 403),
        ("0.0.0.0", ("gpu-box",), "GPU-BOX", 200),
        ("0.0.0.0", ("gpu-box",), "evil.example", 403),  # DNS rebinding onto an address of a network
        ("0.0.0.0", ("gpu-box",), "10.0.0.7:8000", 200),  # a probe by address
        ("0.0.0.0", ("gpu-box",), "[fd00::1]:8000", 200),
        ("0.0.0.0", ("gpu-box",), "localhost:8000", 200),
        ("0.0.0.0", ("gpu-box",), "", 403),
        ("0.0.0.0", None, "", 403),
        ("0.0.0.0", None, "anything.example", 200),
    ],
)
def test_names_that_the_server_is_called_by(
    bound_to: str, names: tuple[str, ...] | None, host: str, status: int
) -> None:
    answer = app_for(host=bound_to, allowed_hosts=names).get("healthz", headers={"host": host})
    assert answer.status_code == status


@pytest.mark.parametrize(
    ("site", "mode", "status"),
    [
        ("cross-site", "no-cors", 403),  # <img>, <script>, a form sent by a script: no Origin on a GET
        ("same-site", "no-cors", 403),
        ("cross-site", "cors", 403),
        ("cross-site", "navigate", 200),  # a link that someone follows
        ("same-origin", "cors", 200),
        ("none", "navigate", 200),
    ],
)
def test_what_browsers_say_of_a_calls_origin(site: str, mode: str, status: int) -> None:
    headers = {"sec-fetch-site": site, "sec-fetch-mode": mode}
    assert app_for().get("healthz", headers=headers).status_code == status


@pytest.mark.parametrize("route", routes(), ids=lambda route: route.path)
def test_no_route_serves_a_page_elsewhere(route: GuardedRoute) -> None:
    """Host and Origin are checked before anything else, on every route, without auth, too; preflights get no leave."""
    http = app_for(auth="off")
    path = route.path.partition("{")[0] + "x"
    for method in sorted(route.methods or ()):
        for bad in ({"host": "evil.example"}, {"origin": "https://evil.example"}, {"origin": "null"}):
            answer = http.call(method, f"/{path}", headers=bad)
            assert answer.status_code == 403
        preflight = {"origin": "https://evil.example", "access-control-request-method": method}
        answer = http.call("OPTIONS", f"/{path}", headers=preflight)
        assert answer.status_code == 403
        assert not [name for name in answer.headers if name.startswith("access-control")]
