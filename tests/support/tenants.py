"""A daemon with several owners behind the real routes: keys for each, and things of one owner to reach for."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from openrl.checkpoints.peft import write_adapter
from openrl.keys.key import UNLIMITED, Quotas
from openrl.keys.principal import Scope
from openrl.server.app import create_app
from openrl.types import LoraSpec
from support.daemons import BASE, Harness
from support.fake_daemon import server_settings
from support.http import KEY, Http

SECRET = b"s" * 32
PROMPT = {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}
TENSOR = {"data": [3, 4], "dtype": "int64", "shape": [2]}
DATUM = {"model_input": {"chunks": [{"tokens": [3, 4]}]}, "loss_fn_inputs": {"target_tokens": TENSOR}}
PASS = {"data": [DATUM], "loss_fn": "cross_entropy"}


@dataclass
class World:
    """Alice's session with one of each; ids as the wire has them."""

    harness: Harness
    http: Http
    keys: dict[str, str] = field(default_factory=lambda: {"admin": KEY})
    ids: dict[str, str] = field(default_factory=dict[str, str])

    async def call(self, who: str | None, method: str, path: str, body: Any = None, **headers: str) -> httpx.Response:
        """As someone, by name; None without a key. `path` as `Http` takes it."""
        key = {} if who is None else {"x-api-key": self.keys.get(who, who)}
        content = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        kind = {"content-type": "application/json"}
        return await self.http.acall(method, path, content=content, headers=kind | key | headers)

    async def post(self, who: str, path: str, body: Any) -> Any:
        answer = await self.call(who, "POST", path, body)
        assert answer.status_code == 200, (path, answer.status_code, answer.text)
        return answer.json()

    async def result(self, who: str, promise: Any) -> Any:
        """What a promise came to."""
        return await self.post(who, "retrieve_future", {"request_id": promise["request_id"]})

    async def key(self, name: str, owner: str, *scopes: Scope, quotas: Quotas = UNLIMITED) -> str:
        """Make a key for `owner`, from then on known as `name`; returns its id."""
        text, made = await self.harness.daemon.keys.create(owner, frozenset(scopes), quotas, None, "")
        self.keys[name] = text
        return made.id

    async def open_run(self, who: str, number: int = 0, session: str | None = None) -> tuple[str, Any]:
        """A session, if none is given, with a run; returns the session and how creating the run ended."""
        if session is None:
            session = (await self.post(who, "create_session", {"sdk_version": "0.38.0"}))["session_id"]
        new = {"session_id": session, "model_seq_id": number, "base_model": BASE, "lora_config": {"rank": 8}}
        return str(session), await self.result(who, await self.post(who, "create_model", new))


def scenario(test: Callable[[World], Awaitable[None]], **settings: Any) -> Callable[[Path], None]:
    """Run an async test in a fresh world."""

    def run(tmp_path: Path) -> None:
        asyncio.run(in_world(tmp_path, test, **settings))

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


async def in_world(folder: Path, test: Callable[[World], Awaitable[None]], **settings: Any) -> None:
    harness = await Harness(folder).start()
    app = create_app(harness.daemon, server_settings(**{"long_poll_seconds": 20.0, **settings}), KEY, SECRET)
    try:
        await asyncio.wait_for(test(World(harness, Http(app, key=None))), 60)
    finally:
        await harness.daemon.stop()


async def furnish(world: World) -> None:
    """Keys of alice (use; read; one that is revoked), bob and an administrator; and what is alice's."""
    await world.key("alice", "alice", Scope.USE)
    await world.key("bob", "bob", Scope.USE)
    await world.key("reader", "alice", Scope.READ)
    await world.key("other_admin", "carol", Scope.ADMIN)
    revoked = await world.key("revoked", "alice", Scope.USE)
    await world.harness.daemon.keys.revoke(revoked)
    world.ids["key"] = await world.key("spare", "alice", Scope.USE)
    session, _ = await world.open_run("alice")
    run = f"{session}:train:0"
    world.ids |= {"session": session, "run": run, "sampler": f"{session}:sample:0", "future": f"{run}:0"}
    saves = ("save_weights", "a"), ("save_weights", "public"), ("save_weights_external", "e")
    for seq, (call, name) in enumerate(saves, 1):
        promised = await world.post("alice", call, {"model_id": run, "seq_id": seq, "path": name})
        world.ids[name] = (await world.result("alice", promised))["path"]
    await world.harness.daemon.life.publish(world.ids["public"], True)
    for name in ("a", "public"):
        checkpoint = await world.harness.daemon.checkpoint(world.ids[name])
        _lay_adapter(world.harness.daemon.life.folder(checkpoint.folder))
        world.ids[f"folder_{name}"] = checkpoint.folder
    sampling = {"session_id": session, "sampling_session_seq_id": 0, "base_model": BASE}
    await world.post("alice", "create_sampling_session", sampling)
    world.ids["upload"] = (await world.post("alice", "uploads", announcement("up")))["upload_id"]


def announcement(name: str) -> dict[str, Any]:
    digest = {"size": 3, "sha256": hashlib.sha256(b"abc").hexdigest()}
    return {
        "source": "tinker://x:train:0/weights/a",
        "kind": "weights",
        "name": name,
        "base_model": BASE,
        "spec": {"rank": 8, "seed": 0, "train_attn": True, "train_mlp": True, "train_unembed": True},
        "files": dict.fromkeys(("adapter_config.json", "adapter_model.safetensors", "optimizer.safetensors"), digest),
        "user_metadata": {},
    }


def _lay_adapter(folder: Path) -> None:
    tensors = {
        "model.layers.0.self_attn.q_proj.lora_A": np.ones((2, 8), np.float32),
        "model.layers.0.self_attn.q_proj.lora_B": np.ones((8, 2), np.float32),
    }
    write_adapter(folder, LoraSpec(2, 0), tensors, BASE)
