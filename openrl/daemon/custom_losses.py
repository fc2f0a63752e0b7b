"""Custom losses of sessions: accepted and kept, and found again by whoever trains with them (5.9)."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

from openrl.custom_loss import CUSTOM, LossProgram
from openrl.daemon.codec import Codec
from openrl.daemon.futures import Futures, request_id
from openrl.daemon.sessions import Sessions
from openrl.daemon.work import Raw, Train, Work
from openrl.errors import BadRequest, OpenRLError
from openrl.store import custom_losses
from openrl.store.custom_losses import StoredLoss
from openrl.store.db import Database
from openrl.types import Op, RequestId, SessionId

MAX_LOSSES = 1000  # of one session
_CACHED = 256  # programs kept read


class CustomLosses:
    """Owns the losses. `served`: whether the backend runs them; where it does not, none is accepted."""

    def __init__(self, db: Database, codec: Codec, futures: Futures, sessions: Sessions, *, served: bool) -> None:
        self._db = db
        self._codec = codec
        self._futures = futures
        self._sessions = sessions
        self._programs: dict[str, tuple[SessionId, LossProgram]] = {}
        self.served = served

    async def create(self, session: SessionId, seq: int, loss: LossProgram | OpenRLError, raw: Raw) -> RequestId:
        """Keep a session's loss number `seq`, idempotent by both; an error becomes its future's. Raises NotFound."""
        self._sessions.active(session)
        scope = f"{session}:loss"
        identity = request_id(scope, seq)
        refused = self._refusal(seq, loss)
        if refused is not None:
            await self._futures.accept(scope, seq, Op.CREATE_CUSTOM_LOSS, raw, refused)
            return identity
        stored = StoredLoss(identity, session, raw.body, time.time())
        result = self._codec.encode_result(
            Op.CREATE_CUSTOM_LOSS, {"loss_id": identity, "type": str(Op.CREATE_CUSTOM_LOSS)}
        )
        await self._futures.settle(
            scope, seq, Op.CREATE_CUSTOM_LOSS, raw, result, lambda db: custom_losses.insert(db, stored)
        )
        return identity

    def _refusal(self, seq: int, loss: LossProgram | OpenRLError) -> OpenRLError | None:
        if isinstance(loss, OpenRLError):
            return loss
        if not self.served:
            return _not_served()
        if seq >= MAX_LOSSES:
            return BadRequest(f"custom_loss_seq_id is {seq}; a session may have {MAX_LOSSES} custom losses.")
        return None

    async def resolve(self, session: SessionId, work: Work) -> Work:
        """A training pass with the program that its `loss_id` names; other work as it is. Raises BadRequest."""
        if not isinstance(work, Train) or work.payload.loss_fn != CUSTOM:
            return work
        if not self.served:
            raise _not_served()
        config = work.payload.loss_config
        identity = config.get("loss_id")
        if not isinstance(identity, str) or len(config) > 1:
            given = ", ".join(sorted(config)) or "nothing"
            raise BadRequest(f"loss_fn_config of loss_fn {CUSTOM!r} takes loss_id (a string) alone, got {given}")
        return replace(work, program=await self._program(session, identity))

    async def _program(self, session: SessionId, identity: str) -> LossProgram:
        if identity not in self._programs:
            stored = await self._db.run(lambda db: custom_losses.get(db, identity))
            if stored is None:
                raise _unknown(identity)
            if len(self._programs) >= _CACHED:
                self._programs.clear()
            program = await asyncio.to_thread(self._codec.decode_custom_loss, stored.body)
            self._programs[identity] = (stored.session_id, program)
        owner, program = self._programs[identity]
        if owner != session:
            raise _unknown(identity)
        return program


def _unknown(identity: str) -> BadRequest:
    return BadRequest(
        f"loss_fn_config.loss_id {identity[:80]!r} names no custom loss of this session.",
        "Create it with ServiceClient.create_custom_loss; a loss works for its own session only.",
    )


def _not_served() -> BadRequest:
    return BadRequest(
        f'loss_fn "{CUSTOM}" does not run on this server\'s backend.',
        "Use forward_backward_custom with a function, which runs in the client.",
    )
