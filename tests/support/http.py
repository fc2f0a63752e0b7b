"""The HTTP app called in process, one request at a time, with the headers of the real SDK."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
from starlette.applications import Starlette

KEY = "tml-test-key"


class Http:
    """Synchronous calls to an ASGI app; paths are relative to `/api/v1` unless they start with `//`."""

    def __init__(self, app: Starlette, key: str | None = KEY) -> None:
        self.app = app
        self.headers = {} if key is None else {"x-api-key": key}

    def call(self, method: str, path: str, **options: Any) -> httpx.Response:
        return asyncio.run(self.acall(method, path, **options))

    async def acall(
        self, method: str, path: str, *, headers: dict[str, str] | None = None, **options: Any
    ) -> httpx.Response:
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        url = path[1:] if path.startswith("//") else f"/api/v1/{path}"
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost:8000") as client:
            return await client.request(method, url, headers=self.headers | (headers or {}), **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.call("GET", path, **options)

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        """`body` as JSON, or as it is if it is bytes."""
        content = body if isinstance(body, bytes) else json.dumps(body or {}).encode()
        headers = {"content-type": "application/json"} | options.pop("headers", {})
        return self.call("POST", path, content=content, headers=headers, **options)

    def future(self, promise: httpx.Response, accept: str = "application/x-protobuf") -> httpx.Response:
        """The result of the promise that a call was answered with."""
        assert promise.status_code == 200, promise.text
        request_id = promise.json()["request_id"]
        return self.post("retrieve_future", {"request_id": request_id}, headers={"accept": accept})
