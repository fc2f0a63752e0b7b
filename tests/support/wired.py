"""The HTTP app over a real daemon with a scalar worker: what a client sees of order, retries and failures, no model."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx

from openrl.server.app import create_app
from openrl.types import RunId
from support.daemons import BASE, Harness
from support.fake_daemon import server_settings
from support.http import KEY, Http

PROTOBUF = "application/x-protobuf"


class Wired:
    """`h` is the daemon's harness; calls are JSON as an old SDK sends them, unless a body is given as bytes."""

    def __init__(self, h: Harness, **settings: Any) -> None:
        self.h = h
        self._http = Http(create_app(h.daemon, server_settings(**settings), KEY))

    async def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        if isinstance(body, bytes):
            return await self._http.acall("POST", path, content=body, headers=sent)
        return await self._http.acall("POST", path, json=body, headers=sent)

    async def get(self, path: str) -> httpx.Response:
        return await self._http.acall("GET", path)

    async def promise(self, path: str, body: Any, **headers: str) -> str:
        """The request id that a call was answered with."""
        answer = await self.post(path, body, **headers)
        assert answer.status_code == 200, answer.text
        return answer.json()["request_id"]

    async def retrieve(self, request: str, accept: str = PROTOBUF) -> httpx.Response:
        """One poll."""
        body = {"request_id": request, "allow_metadata_only": True}
        return await self.post("retrieve_future", body, accept=accept)

    async def result(self, request: str, accept: str = PROTOBUF) -> httpx.Response:
        """Polls to the end."""
        while (answer := await self.retrieve(request, accept)).status_code == 408:
            pass
        return answer

    async def open_run(self, number: int = 0) -> RunId:
        if number == 0:
            self.session = (await self.post("create_session", {"sdk_version": "0.38.0"})).json()["session_id"]
        body = {"session_id": self.session, "model_seq_id": number, "base_model": BASE, "lora_config": {"rank": 8}}
        return RunId((await self.result(await self.promise("create_model", body))).json()["model_id"])

    async def open_sampler(self, number: int = 0) -> str:
        body = {"session_id": self.session, "sampling_session_seq_id": number, "base_model": BASE}
        return (await self.post("create_sampling_session", body)).json()["sampling_session_id"]

    async def train(self, run: str, seq: int, *tokens: int, **headers: str) -> str:
        return await self.promise("forward_backward", train_body(run, seq, *tokens), **headers)

    async def step(self, run: str, seq: int) -> str:
        return await self.promise("optim_step", {"model_id": run, "seq_id": seq, "adam_params": {}})

    async def weight(self, request: str) -> float:
        """The weight that an `optim_step` left."""
        return (await self.result(request)).json()["metrics"]["weight:sum"]


def train_body(run: str, seq: int, *tokens: int) -> dict[str, Any]:
    targets = {"data": list(tokens), "dtype": "int64", "shape": [len(tokens)]}
    data = [{"model_input": {"chunks": [{"tokens": list(tokens)}]}, "loss_fn_inputs": {"target_tokens": targets}}]
    content = {"data": data, "loss_fn": "cross_entropy"}
    return {"model_id": run, "seq_id": seq, "forward_backward_input": content}


def sample_body(sampler: str, seq: int, **more: Any) -> dict[str, Any]:
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}
    return {"sampling_session_id": sampler, "seq_id": seq, "prompt": prompt, **more}


def over_http(
    daemon: dict[str, Any] | None = None, **server: Any
) -> Callable[[Callable[[Wired], Awaitable[None]]], Callable[[Path], None]]:
    """Run an async test over a fresh daemon and its HTTP app, and stop the daemon whatever happens."""

    def decorate(test: Callable[[Wired], Awaitable[None]]) -> Callable[[Path], None]:
        def run(tmp_path: Path) -> None:
            async def main() -> None:
                harness = await Harness(tmp_path, **(daemon or {})).start()
                try:
                    await asyncio.wait_for(test(Wired(harness, **server)), 30)
                finally:
                    await harness.daemon.stop()

            asyncio.run(main())

        run.__name__ = test.__name__
        run.__doc__ = test.__doc__
        return run

    return decorate
