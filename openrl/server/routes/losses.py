"""Losses that clients make (5.9)."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from openrl.codec import decode_json
from openrl.custom_loss import LossProgram
from openrl.daemon.work import Raw
from openrl.errors import OpenRLError
from openrl.server.errors import json_response
from openrl.server.requests import daemon_of, off_loop, read_raw
from openrl.types import SessionId
from openrl.wire import replies
from openrl.wire.bodies import decode_custom_loss
from openrl.wire.custom_losses import CustomLossAddressBody


async def create_custom_loss(request: Request) -> Response:
    """A graph that is not accepted is a future that fails."""
    raw = await read_raw(request)
    address, loss = await off_loop(len(raw.body), _decode, raw)
    session = SessionId(address.session_id)
    return json_response(
        replies.promise(await daemon_of(request).losses.create(session, address.custom_loss_seq_id, loss, raw))
    )


def _decode(raw: Raw) -> tuple[CustomLossAddressBody, LossProgram | OpenRLError]:
    address = decode_json(CustomLossAddressBody, raw.body)
    try:
        return address, decode_custom_loss(raw.body)
    except OpenRLError as error:
        return address, error
