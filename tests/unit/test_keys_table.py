"""Every route, called by everyone: the owner, another owner, a reader of the owner's, a revoked key, and nobody.

A route without a row fails; so does one that answers a stranger otherwise than it answers about what does not exist.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from openrl.server.access import Needs
from openrl.server.app import routes
from support.daemons import BASE
from support.tenants import PASS, PROMPT, World, announcement, furnish, in_world

Body = Callable[[dict[str, str]], Any]


@dataclass(frozen=True)
class Row:
    """`owner`, `other`: status for two keys with scope use, `reader` for a key of the owner with scope read (None: 403
    where the route needs work, else as the owner). `path` fills the route's parameters."""

    owner: int = 200
    other: int = 404
    body: Body = lambda _: None
    path: Callable[[dict[str, str]], dict[str, str]] = lambda _: {}
    reader: int | None = None


def same(status: int = 200, body: Body = lambda _: None, **path: str) -> Row:
    """A route at which nothing is anybody's."""
    return Row(status, status, body, lambda _: path)


def of_run(**fields: Any) -> Row:
    """A training request; bad content would be a failed future, so 200 says only whose the run is."""
    return Row(body=lambda ids: {"model_id": ids["run"], "seq_id": 9, **fields})


def checkpoint(name: str = "a", **row: Any) -> Row:
    def parts(ids: dict[str, str]) -> dict[str, str]:
        run, segment, last = ids[name].removeprefix("tinker://").split("/")
        return {"run": run, "segment": segment, "name": last, "file": "adapter_config.json"}

    return Row(**{"path": parts, **row})


def in_session(**row: Any) -> Row:
    return Row(**{"path": lambda ids: {"session": ids["session"]}, **row})


def upload(file: str = "adapter_config.json", **row: Any) -> Row:
    return Row(**{"path": lambda ids: {"upload": ids["upload"], "file": file}, **row})


API = "/api/v1"
CKPT = f"{API}/training_runs/{{run}}/checkpoints/{{segment}}/{{name}}"
HOUR = "starting_on=2026-01-01T00:00:00Z&ending_before=2026-01-02T00:00:00Z"
LOSS = {"inputs": [], "graph": {"format": 1, "nodes": []}, "name": "x", "custom_loss_seq_id": 0}

TABLE: dict[tuple[str, str], Row] = {
    ("GET", "/"): same(),
    ("GET", f"{API}/healthz"): same(),
    ("GET", f"{API}/readyz"): same(),
    ("GET", "/metrics"): Row(403, 403, reader=200),
    ("GET", f"{API}/status"): Row(403, 403, reader=200),
    ("GET", f"{API}/device_lanes"): same(403),
    ("POST", f"{API}/client/config"): same(),
    ("POST", f"{API}/client/dynamic_config"): same(),
    ("GET", f"{API}/get_server_capabilities"): same(),
    ("POST", f"{API}/telemetry"): same(body=lambda _: {"events": []}),
    ("POST", f"{API}/auth/token"): same(),
    ("GET", f"{API}/auth/apikey/me"): same(),
    ("DELETE", f"{API}/auth/apikey/me"): same(403),
    ("GET", f"{API}/keys"): same(403),
    ("POST", f"{API}/keys"): same(403, body=lambda _: {"owner": "eve", "scopes": ["admin"]}),
    ("DELETE", f"{API}/keys/{{key}}"): Row(403, 403, path=lambda ids: {"key": ids["key"]}),
    ("POST", f"{API}/create_session"): same(body=lambda _: {"sdk_version": "0.38.0"}),
    ("POST", f"{API}/session_heartbeat"): Row(body=lambda ids: {"session_id": ids["session"]}),
    ("POST", f"{API}/sessions/{{session}}/finish"): in_session(body=lambda _: {"reason": {"type": "success"}}),
    ("GET", f"{API}/sessions"): same(),
    ("POST", f"{API}/sessions/search"): same(body=lambda _: {}),
    ("GET", f"{API}/sessions/{{session}}"): in_session(),
    ("PUT", f"{API}/sessions/{{session}}/project"): in_session(body=lambda _: {"project_id": "p"}),
    ("GET", f"{API}/sessions/{{session}}/trace_export"): in_session(),
    ("GET", "/signed/traces/{session}"): in_session(owner=403, other=403),
    ("POST", f"{API}/create_model"): Row(
        body=lambda ids: {
            "session_id": ids["session"],
            "model_seq_id": 1,
            "base_model": BASE,
            "lora_config": {"rank": 8},
        }
    ),
    ("POST", f"{API}/get_info"): Row(body=lambda ids: {"model_id": ids["run"]}),
    ("POST", f"{API}/unload_model"): Row(body=lambda ids: {"model_id": ids["run"]}),
    ("GET", f"{API}/training_runs"): same(),
    ("GET", f"{API}/training_runs/{{run}}"): Row(path=lambda ids: {"run": ids["run"]}),
    ("POST", f"{API}/create_custom_loss"): Row(body=lambda ids: {"session_id": ids["session"], **LOSS}),
    ("POST", f"{API}/forward"): of_run(forward_input=PASS),
    ("POST", f"{API}/forward_backward"): of_run(forward_backward_input=PASS),
    ("POST", f"{API}/optim_step"): of_run(adam_params={}),
    ("POST", f"{API}/save_weights"): of_run(path="b"),
    ("POST", f"{API}/save_weights_for_sampler"): of_run(path="b"),
    ("POST", f"{API}/save_weights_external"): of_run(path="b"),
    ("POST", f"{API}/load_weights"): Row(
        body=lambda ids: {"model_id": ids["run"], "seq_id": 9, "path": ids["a"], "optimizer": True}
    ),
    ("POST", f"{API}/create_sampling_session"): Row(
        body=lambda ids: {"session_id": ids["session"], "sampling_session_seq_id": 7, "model_path": ids["a"]}
    ),
    ("POST", f"{API}/join_sampling_session"): Row(body=lambda ids: {"sampling_session_id": ids["sampler"]}),
    ("GET", f"{API}/samplers/{{sampler}}"): Row(path=lambda ids: {"sampler": ids["sampler"]}),
    ("POST", f"{API}/asample"): Row(
        body=lambda ids: {
            "sampling_session_id": ids["sampler"],
            "seq_id": 0,
            "prompt": PROMPT,
            "sampling_params": {"max_tokens": 1},
        }
    ),
    ("POST", f"{API}/retrieve_future"): Row(other=410, body=lambda ids: {"request_id": ids["future"]}),
    ("POST", f"{API}/retrieve_futures"): Row(
        body=lambda ids: {
            "target": {"type": "sampling_session", "sampling_session_id": ids["sampler"], "cloned_sampler_id": 0},
            "prev_cursor": 0,
            "timeout": 0,
        }
    ),
    ("POST", f"{API}/cancel_future"): Row(other=200, body=lambda ids: {"request_id": ids["future"]}),
    ("POST", f"{API}/weights_info"): Row(body=lambda ids: {"tinker_path": ids["a"]}),
    ("POST", f"{API}/copy_weights"): Row(body=lambda ids: {"source_path": ids["a"], "destination_project_id": "p"}),
    ("GET", f"{API}/checkpoints"): same(),
    ("POST", f"{API}/checkpoints/adopt"): Row(403, 403, body=lambda ids: {"folder": ids["folder_a"]}),
    ("GET", f"{API}/training_runs/{{run}}/checkpoints"): Row(path=lambda ids: {"run": ids["run"]}),
    ("GET", f"{CKPT}/archive"): checkpoint(owner=302),
    ("GET", f"{CKPT}/external_weights_urls"): checkpoint("e"),
    ("GET", f"{CKPT}/files"): checkpoint(owner=400),  # a scalar checkpoint cannot be moved
    ("GET", f"{CKPT}/files/{{file}}"): checkpoint(owner=400),
    ("POST", f"{CKPT}/publish"): checkpoint(),
    ("DELETE", f"{CKPT}/publish"): checkpoint(),
    ("PUT", f"{CKPT}/ttl"): checkpoint(body=lambda _: {"ttl_seconds": 7200}),
    ("DELETE", CKPT): checkpoint(owner=204),
    **{
        (method, f"{API}/training_runs/{{run}}/checkpoints/{{rest:path}}"): Row(
            400, 400, path=lambda ids: {"run": ids["run"], "rest:path": "x"}, reader=400
        )
        for method in ("GET", "POST", "PUT", "DELETE")
    },
    ("GET", "/signed/archives/{folder:path}"): Row(403, 403, path=lambda ids: {"folder:path": ids["folder_a"]}),
    ("GET", "/signed/files/{folder:path}/{file}"): Row(
        403, 403, path=lambda ids: {"folder:path": ids["folder_a"], "file": "scalar.json"}
    ),
    ("POST", f"{API}/uploads"): same(body=lambda _: announcement("new")),
    ("GET", f"{API}/uploads/{{upload}}"): upload(),
    ("DELETE", f"{API}/uploads/{{upload}}"): upload(owner=204),
    ("PUT", f"{API}/uploads/{{upload}}/files/{{file}}"): upload(body=lambda _: b"abc"),
    ("POST", f"{API}/uploads/{{upload}}/commit"): upload(owner=400),  # nothing has come yet
    ("GET", f"{API}/audit"): same(),
    ("GET", f"{API}/billing/usage/events"): same(),
    ("GET", f"{API}/billing/usage/checkpoints/current"): same(),
    ("GET", "/hf/api/{rest:path}"): Row(404, 404, path=lambda _: {"rest:path": "models/no/such"}, reader=404),
    ("POST", "/hf/api/{rest:path}"): Row(404, 404, path=lambda _: {"rest:path": "models/no/such"}, reader=404),
    ("GET", "/hf/{rest:path}"): Row(404, 404, path=lambda _: {"rest:path": "x/y/resolve/main/z"}, reader=404),
}

CALLS = [(method, route) for route in routes() for method in sorted((route.methods or set()) - {"HEAD"})]


def test_every_route_has_a_row_and_every_row_a_route() -> None:
    served = {(method, route.path) for method, route in CALLS}
    assert served == set(TABLE), "add a row for the new route to TABLE"


@pytest.mark.parametrize(("method", "route"), CALLS, ids=lambda part: part if isinstance(part, str) else part.path)
def test_what_everyone_gets(tmp_path: Path, method: str, route: Any) -> None:
    """The owner last, since what they do may be final."""
    row = TABLE[method, route.path]
    reader = row.reader
    if reader is None:
        reader = 403 if route.needs is Needs.WORK else row.owner
    closed = {Needs.OPEN: row.owner, Needs.SIGNED_URL: 403}.get(route.needs, 401)

    async def everyone(world: World) -> None:
        await furnish(world)
        wanted = {None: closed, "revoked": closed, "tml-nobody": closed, "reader": reader, "bob": row.other}
        got = {who: await call(world, who) for who in wanted}
        assert got == wanted
        assert await call(world, "alice") == row.owner

    async def call(world: World, who: str | None) -> int:
        path = route.path
        for name, value in row.path(world.ids).items():
            path = path.replace(f"{{{name}}}", value)
        path += f"?{HOUR}" if path.endswith("usage/events") else ""
        ranged = {"content-range": "bytes 0-2/3"} if method == "PUT" else {}
        answer = await world.call(who, method, f"/{path}", row.body(world.ids), **ranged)
        return answer.status_code

    asyncio.run(in_world(tmp_path, everyone))
