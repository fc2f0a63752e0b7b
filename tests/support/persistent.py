"""A client that bears with a server as the SDK does (tinker-protocol 1.8, 4.4), but in seconds instead of minutes."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from typing import Any

import httpx

from openrl.types import RunId
from support.daemons import BASE
from support.http import KEY

RETRIED = (408, 409, 429)


class Persistent:
    """Calls to one URL; what the SDK would raise fails the test."""

    def __init__(self, url: str, patience: float = 30.0) -> None:
        limits = httpx.Limits(max_connections=200)
        self._client = httpx.AsyncClient(
            base_url=f"{url}/api/v1/", headers={"x-api-key": KEY}, timeout=20, limits=limits, trust_env=False
        )
        self._patience = patience
        self._sessions = itertools.count()
        self.reasons: set[str] = set()  # that polls were given
        self.session = ""

    async def __aenter__(self) -> Persistent:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def once(self, path: str, body: Any, **headers: str) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = {"content-type": "application/json"} | {k.replace("_", "-"): v for k, v in headers.items()}
        return await self._client.post(path, content=content, headers=sent)

    async def post(self, path: str, body: Any, **headers: str) -> dict[str, Any]:
        """The answer to a submission, which is sent again after 5xx and broken connections."""
        deadline = time.monotonic() + self._patience
        while True:
            try:
                answer = await self.once(path, body, **headers)
            except httpx.TransportError as error:
                said = repr(error)
            else:
                said = answer.text
                if answer.status_code < 500 and answer.status_code not in RETRIED:
                    assert answer.status_code == 200, said
                    return answer.json()
            assert time.monotonic() < deadline, f"{path}: {said}"
            await asyncio.sleep(0.1)

    async def promise(self, path: str, body: Any, **headers: str) -> str:
        return (await self.post(path, body, **headers))["request_id"]

    async def result(self, request: str) -> dict[str, Any]:
        """Polls until there is a result; that may be an `error`."""
        deadline = time.monotonic() + self._patience
        while time.monotonic() < deadline:
            try:
                answer = await self.once("retrieve_future", {"request_id": request}, accept="application/json")
            except httpx.TransportError:
                await asyncio.sleep(0.1)
                continue
            if answer.status_code == 200:
                return answer.json()
            assert answer.status_code == 408, answer.text  # anything else ends the SDK's wait with an error
            self.reasons.add(answer.json()["queue_state_reason"])
        raise AssertionError(f"{request} has no result")

    async def get(self, path: str, **query: str) -> dict[str, Any]:
        answer = await self._client.get(path, params=query)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def request(self, method: str, path: str, body: Any = None) -> httpx.Response:
        return await self._client.request(method, path, json=body)

    async def open_run(self, number: int = 0, base_model: str = BASE) -> RunId:
        if number == 0:
            key = f"key-{next(self._sessions)}"
            self.session = (await self.post("create_session", {"sdk_version": "0.38.0"}, x_idempotency_key=key))[
                "session_id"
            ]
        body = {
            "session_id": self.session,
            "model_seq_id": number,
            "base_model": base_model,
            "lora_config": {"rank": 8},
        }
        return RunId((await self.result(await self.promise("create_model", body)))["model_id"])


def training(run: RunId, seq: int, tokens: list[int], padding: int = 0) -> dict[str, Any]:
    """A `forward_backward` in JSON; `padding` bytes make it large."""
    datum = {
        "model_input": {"chunks": [{"tokens": tokens}]},
        "loss_fn_inputs": {"target_tokens": {"data": tokens, "dtype": "int64", "shape": [len(tokens)]}},
    }
    body: dict[str, Any] = {
        "model_id": run,
        "seq_id": seq,
        "forward_backward_input": {"data": [datum], "loss_fn": "cross_entropy"},
    }
    return body | ({"padding": "x" * padding} if padding else {})
