"""A remote's key while it is in use: read once, and again when the remote refuses it, since keys get rotated."""

from __future__ import annotations

import asyncio
import logging
import math
import time

from openrl.errors import SettingsError
from openrl.tokens import TokenSource

log = logging.getLogger(__name__)

_REREAD_S = 5.0  # between readings: a command may be costly, and many calls are refused at once


class Token:
    """What is sent as `X-API-Key`; "" sends none."""

    def __init__(self, source: TokenSource, first: str | None = None) -> None:
        """`first` is used until it is refused; None reads the source when the key is first needed."""
        self._source = source
        self.reread_s = _REREAD_S
        self._value = first
        self._read_at = -math.inf
        self._lock = asyncio.Lock()

    async def get(self) -> str:
        """Raises SettingsError if the source gives none."""
        if self._value is None:
            async with self._lock:
                if self._value is None:
                    self._value = await asyncio.to_thread(self._source.read)
        return self._value

    async def renewed(self, refused: str) -> str | None:
        """Another key than the one that was refused, if the source has one by now."""
        async with self._lock:
            if self._value == refused and time.monotonic() - self._read_at >= self.reread_s:
                self._read_at = time.monotonic()
                try:
                    self._value = await asyncio.to_thread(self._source.read) or refused
                except SettingsError as error:
                    log.warning("the remote refuses its key, and there is no new one: %s", error)
            return self._value if self._value != refused else None
