"""The remote backend as a pipe: what crosses and how, what is answered on this side, and what never crosses."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import zstandard

from openrl.errors import SettingsError
from openrl.settings import RemoteSettings
from openrl.tokens import TokenSource
from support.far import FAR_KEY
from support.http import KEY, Http
from support.remotes import answer, lost, near, ok, unreachable

RUN = "s1:train:0"
WEIGHTS = f"training_runs/{RUN}/checkpoints/weights/x"


def training(seq: int = 1, **more: Any) -> dict[str, Any]:
    return {"model_id": RUN, "seq_id": seq, **more}


# ---- what crosses ----


def test_bodies_and_headers_cross_untouched_but_for_the_key(tmp_path: Path) -> None:
    """zstd stays zstd and protobuf stays protobuf; the local key, cookies and the page's origin stay here."""

    async def check() -> None:
        async with near(tmp_path, ok({"request_id": "r1"})) as n:
            body = zstandard.compress(b"\x0a\x0as1:train:0\x10\x01" + b"\x1a\x00" * 1000)
            await n.send(
                "forward_backward",
                body,
                content_type="application/x-protobuf",
                content_encoding="zstd",
                x_idempotency_key="k",
                cookie="c=1",
                authorization="Bearer mine",
                origin="http://localhost:8000",
            )
            (sent,) = n.remote.calls
            assert sent.content == body
            assert str(sent.url) == "https://far.example/tenant-a/api/v1/forward_backward"
            assert sent.headers["x-api-key"] == FAR_KEY
            assert sent.headers["content-encoding"] == "zstd"
            assert sent.headers["x-idempotency-key"] == "k"
            assert sent.headers["host"] == "far.example"
            assert sent.headers["content-length"] == str(len(body))
            assert not {"cookie", "authorization", "origin"} & set(sent.headers)
            assert KEY not in str(sent.headers)

    asyncio.run(check())


def test_answers_cross_as_they_are(tmp_path: Path) -> None:
    async def check() -> None:
        packed = zstandard.compress(b'{"request_id": "r"}')
        far = httpx.Response(200, content=packed, headers={"content-encoding": "zstd", "x-deprecation-note": "soon"})
        async with near(tmp_path, far) as n:
            given = await n.send("get_info", {"model_id": RUN}, accept_encoding="gzip, deflate, zstd")
            assert n.remote.calls[0].headers["accept-encoding"] == "gzip, deflate, zstd"
            assert given.headers["content-encoding"] == "zstd"
            assert given.headers["content-length"] == str(len(packed))
            assert given.headers["x-deprecation-note"] == "soon"
            assert given.json() == {"request_id": "r"}

    asyncio.run(check())


def test_paths_and_queries_cross_as_they_were_written(tmp_path: Path) -> None:
    async def check() -> None:
        async with near(tmp_path, ok({})) as n:
            await n.acall("GET", "training_runs?limit=100&offset=0&project_id=a%2Fb")
            await n.acall("GET", f"training_runs/{RUN}/checkpoints")
            await n.acall("DELETE", f"training_runs/{RUN}/checkpoints/weights/a%20b")
            assert [call.url.raw_path for call in n.remote.calls] == [
                b"/tenant-a/api/v1/training_runs?limit=100&offset=0&project_id=a%2Fb",
                b"/tenant-a/api/v1/training_runs/s1:train:0/checkpoints",
                b"/tenant-a/api/v1/training_runs/s1:train:0/checkpoints/weights/a%20b",
            ]

    asyncio.run(check())


@pytest.mark.parametrize("path", ["//api/v1/../../secret", "//api/v1/x/%2e%2e/%2e%2e/secret", "//hf/../api/v1/keys"])
def test_no_path_climbs_out(tmp_path: Path, path: str) -> None:
    async def check() -> None:
        async with near(tmp_path, ok({})) as n:
            scope = {"type": "http", "method": "GET", "path": path[1:].replace("%2e", "."), "query_string": b""}
            scope |= {"raw_path": path[1:].encode(), "headers": [(b"host", b"localhost"), (b"x-api-key", KEY.encode())]}
            sent: list[Any] = []

            async def receive() -> dict[str, Any]:
                return {"type": "http.request", "body": b"", "more_body": False}

            async def send(message: Any) -> None:
                sent.append(message)

            await n.app(scope | {"http_version": "1.1", "scheme": "http"}, receive, send)
            assert sent[0]["status"] == 404
            assert not n.remote.calls

    asyncio.run(check())


@pytest.mark.parametrize("status", [400, 402, 403, 404, 408, 409, 410, 413, 422, 429, 500])
def test_refusals_keep_their_status_body_and_retry_after(tmp_path: Path, status: int) -> None:
    async def check() -> None:
        async with near(tmp_path, answer(status, {"detail": "why"}, retry_after="7")) as n:
            for path, body in (
                ("get_info", {"model_id": RUN}),
                ("asample", {"sampling_session_id": "s1:sample:0", "seq_id": 1}),
                ("create_model", {"session_id": "s1", "model_seq_id": 0}),
            ):
                given = await n.send(path, body)
                assert given.status_code == status
                assert given.json() == {"detail": "why"}
                assert given.headers["retry-after"] == "7"
                assert given.headers["content-length"] == str(len(given.content))  # without it a 400 is repeated (T3)

    asyncio.run(check())


def test_a_large_answer_is_streamed(tmp_path: Path) -> None:
    async def check() -> None:
        content = bytes(5 << 20)
        far = httpx.Response(200, content=content, headers={"content-type": "application/octet-stream"})
        async with near(tmp_path, far) as n:
            given = await n.acall("GET", f"training_runs/{RUN}/checkpoints/weights/x/files/a")
            assert given.content == content
            assert given.headers["content-length"] == str(len(content))

    asyncio.run(check())


def test_head_keeps_the_length_of_what_was_not_sent(tmp_path: Path) -> None:
    async def check() -> None:
        far = httpx.Response(200, headers={"content-length": "1234", "etag": '"e"'})
        async with near(tmp_path, far) as n:
            given = await n.acall("HEAD", "//hf/org/tiny/resolve/main/tokenizer.json", headers={"x-api-key": ""})
            assert given.headers["content-length"] == "1234"
            assert n.remote.calls[0].method == "HEAD"

    asyncio.run(check())


# ---- signed URLs ----


def test_signed_urls_lead_back_through_this_server(tmp_path: Path) -> None:
    """The client may not reach the remote. Behind a gateway that ends TLS the remote calls itself http."""

    async def check() -> None:
        signed = "http://far.example/signed/files/f--1/a.json?expires=1&signature=s"
        other = "https://storage.example/bucket/a.json?sig=x"
        ours = "http://localhost:8000/remote-files/far/signed/files/f--1/a.json?expires=1&signature=s"
        answers = (
            httpx.Response(302, headers={"location": signed, "expires": "Thu, 01 Jan 2099 00:00:00 GMT"}),
            ok({"urls": {"a.json": signed, "b.json": other}, "expires": "2099-01-01T00:00:00Z"}),
            ok({"status": "ready", "url": signed}),
            ok({}),
        )
        async with near(tmp_path, *answers) as n:
            archive = await n.acall("GET", f"{WEIGHTS}/archive", headers={"accept-encoding": "gzip"})
            assert archive.status_code == 302
            assert archive.headers["location"] == ours
            assert archive.headers["expires"] == "Thu, 01 Jan 2099 00:00:00 GMT"
            assert "accept-encoding" not in n.remote.calls[0].headers  # what is read here must not be compressed
            urls = (
                await n.acall("GET", f"training_runs/{RUN}/checkpoints/external_weights/x/external_weights_urls")
            ).json()
            assert urls == {"urls": {"a.json": ours, "b.json": other}, "expires": "2099-01-01T00:00:00Z"}
            assert (await n.acall("GET", "sessions/s1/trace_export")).json()["url"] == ours
            without_key = Http(n.app, key=None)
            fetched = await without_key.acall("GET", "/" + ours.removeprefix("http://localhost:8000"))
            assert fetched.status_code == 200
            assert "x-api-key" not in n.remote.calls[-1].headers
            assert str(n.remote.calls[-1].url) == (
                "https://far.example/tenant-a/signed/files/f--1/a.json?expires=1&signature=s"
            )

    asyncio.run(check())


# ---- what is answered here ----


def test_keys_and_tokens_are_this_server_s(tmp_path: Path) -> None:
    async def check() -> None:
        async with near(tmp_path, ok({"supported_models": []})) as n:
            stranger = Http(n.app, key="tml-somebody-else")
            assert (await stranger.acall("GET", "get_server_capabilities")).status_code == 401
            assert (await Http(n.app, key=None).acall("POST", "asample")).status_code == 401
            assert (await Http(n.app, key=FAR_KEY).acall("GET", "training_runs")).status_code == 401
            jwt = (await n.send("auth/token")).json()["jwt"]
            assert (await Http(n.app, key=jwt).acall("GET", "get_server_capabilities")).status_code == 200
            assert len(n.remote.calls) == 1
            assert n.remote.calls[0].headers["x-api-key"] == FAR_KEY

    asyncio.run(check())


def test_telemetry_stays_here(tmp_path: Path) -> None:
    """It can hold the local key in clear (T52), and must never fail (T28)."""

    async def check() -> None:
        async with near(tmp_path, unreachable()) as n:
            given = await n.send("telemetry", {"events": [{"event": "GENERIC_EVENT", "event_data": {"key": KEY}}]})
            assert given.json() == {"status": "accepted"}
            assert (await n.acall("GET", "healthz")).json() == {"status": "ok"}
            assert (await n.acall("GET", "auth/apikey/me")).status_code == 200
            assert not n.remote.calls

    asyncio.run(check())


def test_the_status_shows_the_remote_s_picture_and_the_connection(tmp_path: Path) -> None:
    async def check() -> None:
        picture = {
            "version": "9",
            "uptime_s": 5,
            "models": [{"name": "m"}],
            "runs": [],
            "queue": {"train": 1, "sample": 2},
        }
        async with near(tmp_path, ok(picture)) as n:
            status = (await n.acall("GET", "status")).json()
            assert {key: status[key] for key in picture} == picture
            assert status["remote"]["state"] == "connected"
            assert status["remote"]["url"] == "https://far.example/tenant-a"
            assert (await n.acall("GET", "readyz")).status_code == 200
            n.remote.alive = False
            await n.send("get_info", {"model_id": RUN})
            status = (await n.acall("GET", "status")).json()
            assert status["queue"] == {"train": 0, "sample": 0}
            assert status["remote"]["state"] == "retrying"
            assert status["remote"]["last_error"] == "connection refused"
            assert (await n.acall("GET", "readyz")).status_code == 503

    asyncio.run(check())


def test_a_folder_of_this_machine_is_not_offered_to_the_remote(tmp_path: Path) -> None:
    async def check() -> None:
        async with near(tmp_path, ok({})) as n:
            given = await n.send("checkpoints/adopt", {"folder": "x"})
            assert given.status_code == 400
            assert "openrl push" in given.json()["detail"]

    asyncio.run(check())


# ---- calls that are not kept ----


def test_a_repeatable_call_is_tried_again(tmp_path: Path) -> None:
    async def check() -> None:
        async with near(tmp_path, lost(), answer(503, {"detail": "starting"}), ok({"model_id": RUN})) as n:
            assert (await n.send("get_info", {"model_id": RUN})).json() == {"model_id": RUN}
            assert len(n.remote.calls) == 3

    asyncio.run(check())


def test_a_call_that_must_not_run_twice_is_left_to_its_client(tmp_path: Path) -> None:
    async def check() -> None:
        async with near(tmp_path, unreachable(), lost(), ok({})) as n:
            given = await n.send("unload_model", {"model_id": RUN})
            assert given.status_code == 503
            assert given.headers["retry-after"] == "1"
            assert len(n.remote.calls) == 2  # the first never got there, the second may have

    asyncio.run(check())


def test_a_server_s_own_words_for_why_not_yet_are_kept(tmp_path: Path) -> None:
    async def check() -> None:
        async with near(tmp_path, answer(503, {"detail": "model m is still being prepared"}, retry_after="2")) as n:
            given = await n.send("get_info", {"model_id": RUN})
            assert given.status_code == 503
            assert given.json() == {"detail": "model m is still being prepared"}

    asyncio.run(check())


def test_a_remote_that_is_away_is_named(tmp_path: Path) -> None:
    async def check() -> None:
        async with near(tmp_path, unreachable()) as n:
            n.remote.alive = False
            given = await n.acall("GET", "training_runs")
            assert given.status_code == 503
            assert "the remote far (https://far.example/tenant-a) has not answered" in given.json()["detail"]
            assert "five minutes" in given.json()["detail"]

    asyncio.run(check())


# ---- keys of the remote ----


def test_a_refused_key_is_explained(tmp_path: Path) -> None:
    async def check() -> None:
        refused = answer(401, {"detail": "no key of mine"}, www_authenticate='Bearer error="invalid_token"')
        async with near(tmp_path, refused) as n:
            given = await n.acall("GET", "training_runs")
            assert given.status_code == 401
            detail = given.json()["detail"]
            assert "refuses the key that this server has for it: no key of mine" in detail
            assert "openrl remote login far" in detail
            assert "www-authenticate" not in given.headers  # the client's own token is good (T45)

    asyncio.run(check())


def test_a_key_is_read_again_when_it_is_refused(tmp_path: Path) -> None:
    async def check() -> None:
        key = tmp_path / "key"
        key.write_text("tml-old")

        def check_key(request: httpx.Request) -> httpx.Response:
            return ok({}) if request.headers["x-api-key"] == "tml-new" else answer(401, {"detail": "no"})

        async with near(tmp_path, check_key, source=TokenSource("file", str(key))) as n:
            assert (await n.acall("GET", "training_runs")).status_code == 401
            key.write_text("tml-new")
            n.proxy.link.token.reread_s = 0
            assert (await n.acall("GET", "training_runs")).status_code == 200
            assert (await n.acall("GET", "training_runs")).status_code == 200
            used = [call.headers["x-api-key"] for call in n.remote.calls]
            assert used == ["tml-old", "tml-old", "tml-new", "tml-new"]

    asyncio.run(check())


def test_which_remote_is_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from openrl.backends.remote.link import label
    from openrl.backends.remote.service import find_remote

    monkeypatch.setenv("OPENRL_REMOTES", str(tmp_path / "remotes.toml"))
    found = find_remote(RemoteSettings(url="https://far.example:8443/x"))
    assert label(found) == "far.example-8443-x"
    with pytest.raises(SettingsError, match="no remote is named"):
        find_remote(RemoteSettings())
    (tmp_path / "remotes.toml").write_text('default = "gke"\n[remotes.gke]\nurl = "https://g"\ntoken = "none"\n')
    assert find_remote(RemoteSettings()).name == "gke"
    assert find_remote(RemoteSettings(name="gke")).url == "https://g"


def test_promises_cross(tmp_path: Path) -> None:
    async def check() -> None:
        promise = {"request_id": f"{RUN}:1", "sample_sequence_ids": ["a", "b"]}
        async with near(tmp_path, ok(promise)) as n:
            given = await n.send("asample", {"sampling_session_id": "s1:sample:0", "seq_id": 1, "num_samples": 2})
            assert given.json() == promise
            assert json.loads(n.remote.calls[0].content)["num_samples"] == 2

    asyncio.run(check())


def test_this_server_s_key_as_an_access_token_means_the_remote_s(tmp_path: Path) -> None:
    """A user knows one key; the remote must not see it (7.3, 7.5)."""

    async def check() -> None:
        async with near(tmp_path, ok({"request_id": "r"})) as n:
            await n.send("load_weights", training(path="tinker://a/weights/b", weights_access_token=KEY))
            await n.send(
                "load_weights", training(2, path="tinker://a/weights/b", weights_access_token="tml-of-a-friend")
            )
            await n.send("copy_weights", {"source_path": "tinker://a/weights/b"}, x_tinker_weights_access_token=KEY)
            own, friend, header = n.remote.calls
            assert json.loads(own.content)["weights_access_token"] == FAR_KEY
            assert json.loads(friend.content)["weights_access_token"] == "tml-of-a-friend"
            assert header.headers["x-tinker-weights-access-token"] == FAR_KEY
            assert not any(KEY in f"{call.headers}{call.content!r}" for call in n.remote.calls)

    asyncio.run(check())
