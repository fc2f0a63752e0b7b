"""Calls of commands to a running server, over http or https."""

from __future__ import annotations

from http import HTTPStatus
from pathlib import Path
from typing import Any

from openrl.errors import OpenRLError, Unauthorized
from openrl.tls import trusting

_SECONDS = 60.0


class Server:
    """A running server. `data_dir` is its data folder if that is of this machine; else `ca` may name what to trust."""

    def __init__(self, url: str, key: str, *, data_dir: Path | None = None, ca: Path | None = None) -> None:
        self._url = url.rstrip("/").replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
        self._key = key
        self._trust = trusting(data_dir, ca)

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """The answer's JSON, None if it has no content; `path` is below /api/v1. Raises OpenRLError for any refusal."""
        import httpx

        try:
            answer = httpx.request(
                method,
                f"{self._url}/api/v1/{path}",
                json=body,
                headers={"X-API-Key": self._key},
                timeout=_SECONDS,
                verify=self._trust,
            )
        except httpx.HTTPError as error:
            raise OpenRLError(f"the server at {self._url} does not answer: {error}.", "See: openrl status") from error
        if answer.status_code == HTTPStatus.UNAUTHORIZED:
            raise Unauthorized(
                f"the server at {self._url} does not take this key.",
                "Give --data-dir of the server, or its admin key in OPENRL_API_KEY.",
            )
        if answer.status_code >= HTTPStatus.BAD_REQUEST:
            raise OpenRLError(f"the server at {self._url} refused: {_detail(answer.text)}")
        return answer.json() if answer.content else None


def _detail(text: str) -> str:
    """The reason in an error's body, as far as it is one of ours."""
    import json

    try:
        content = json.loads(text)
    except ValueError:
        return text[:500]
    return str(content.get("detail", text[:500])) if isinstance(content, dict) else text[:500]  # pyright: ignore
