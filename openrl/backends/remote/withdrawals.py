"""Numbers of runs whose requests were given up: the remote still has to be told, or the run would wait for them.

What tells it is a request under the same number that asks for nothing that can be done: it fails, and uses the number
up (O5). Had the original arrived after all, the remote knows the number and pays the second one no heed (4.7).
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from pathlib import Path

from openrl import private_file
from openrl.backends.remote.body import Body, Broken
from openrl.backends.remote.calls import Call
from openrl.backends.remote.link import AWAY_STATUSES, Away, Link
from openrl.codec import decode_json, encode_json
from openrl.errors import BadRequest, SettingsError

log = logging.getLogger(__name__)

_CALL = Call("POST", "/api/v1/optim_step", b"/api/v1/optim_step", ((b"content-type", b"application/json"),))
_ANSWER_S = 30.0
_WAIT_S = 2.0


@dataclass(frozen=True, slots=True)
class _Numbers:
    numbers: list[tuple[str, int]]


class Withdrawals:
    """Kept in a file, since they outlast a restart of ours."""

    def __init__(self, link: Link, file: Path) -> None:
        self._link = link
        self._file = file
        self._open: dict[tuple[str, int], None] = dict.fromkeys(_load(file))
        self._some = asyncio.Event()
        if self._open:
            self._some.set()

    def __len__(self) -> int:
        return len(self._open)

    def add(self, run: str, number: int) -> None:
        self._open[run, number] = None
        self._save()
        self._some.set()

    async def keep_sending(self) -> None:
        while True:
            await self._some.wait()
            await self._link.wait_up(3600)
            for run, number in [*self._open]:
                if not await self._send(run, number):
                    break
                del self._open[run, number]
                self._save()
            else:
                self._some.clear()
                if self._open:  # came meanwhile
                    self._some.set()
                continue
            await asyncio.sleep(_WAIT_S)

    async def _send(self, run: str, number: int) -> bool:
        """Whether the remote knows now. One that refuses a number has no use for it (the run is gone)."""
        body = {"model_id": run, "seq_id": number, "adam_params": "withdrawn: its client was told that it failed"}
        try:
            reply = await self._link.send(_CALL, Body(encode_json(body)), _ANSWER_S)
        except (Away, Broken, SettingsError):
            return False
        if reply.status in AWAY_STATUSES or reply.status in (401, 403, 429):
            return False
        log.info("withdrew request %d of %s: status %d", number, run, reply.status)
        return True

    def _save(self) -> None:
        if self._open:
            private_file.write(self._file, encode_json({"numbers": [*self._open]}).decode())
        else:
            self._file.unlink(missing_ok=True)


def _load(file: Path) -> list[tuple[str, int]]:
    try:
        return decode_json(_Numbers, file.read_bytes()).numbers
    except FileNotFoundError:
        return []
    except BadRequest as error:
        log.warning("%s is not readable and is left: %s", file, error)
        return []
