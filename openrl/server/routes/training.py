"""The ordered requests of a run: passes, optimizer steps, saves and loads.

Once run and seq are known nothing is refused over HTTP any more: the client counts on from a refused number, and with
parallel chunks it would hang for ever (O5, O6, T1). Bad content is accepted, and its future fails.
"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from openrl.codec import decode_json, encode_json
from openrl.daemon.work import Raw, Work
from openrl.errors import BadRequest, OpenRLError, Unauthorized
from openrl.server.errors import json_response
from openrl.server.requests import Received, daemon_of, off_loop, read_raw, reader_of, receive_body
from openrl.types import Op, RunId, SessionId
from openrl.wire import replies
from openrl.wire.bodies import decode_work, read_address
from openrl.wire.messages import LoadAddressBody, LoadWeightsBody
from openrl.wire.proto import Address


async def forward(request: Request) -> Response:
    return await _accept(request, Op.FORWARD, await receive_body(request))


async def forward_backward(request: Request) -> Response:
    return await _accept(request, Op.FORWARD_BACKWARD, await receive_body(request))


async def optim_step(request: Request) -> Response:
    return await _accept(request, Op.OPTIM_STEP, await receive_body(request))


async def save_weights(request: Request) -> Response:
    return await _accept(request, Op.SAVE_STATE, await receive_body(request))


async def save_weights_for_sampler(request: Request) -> Response:
    return await _accept(request, Op.SAVE_SAMPLER, await receive_body(request))


async def save_weights_external(request: Request) -> Response:
    return await _accept(request, Op.SAVE_EXTERNAL, await receive_body(request))


async def load_weights(request: Request) -> Response:
    """Into an existing run, or (addressed by session) as the first state of a new one."""
    raw = await read_raw(request)
    address = decode_json(LoadAddressBody, raw.body)
    raw, refused = _as_reader(request, address, raw)
    if address.model_id is not None and address.session_id is None:
        return await _accept(request, Op.LOAD_STATE, Received(raw), refused)
    if refused is not None:
        raise refused
    if address.model_id is not None or address.session_id is None or address.model_seq_id is None:
        raise BadRequest("load_weights takes model_id and seq_id, or session_id and model_seq_id, and not both")
    body = decode_json(LoadWeightsBody, raw.body)
    promised = await daemon_of(request).load_run(
        SessionId(address.session_id),
        address.model_seq_id,
        body.to_load(),
        body.base_model,
        body.user_metadata or {},
        raw,
    )
    return json_response(replies.promise(promised))


def _as_reader(request: Request, address: LoadAddressBody, raw: Raw) -> tuple[Raw, Unauthorized | None]:
    """The body with the name of whose right to read is used, if not the run's owner's, and why a token is refused.

    The name takes the place of the access token, which must not be stored (T52), and of what a client has put there.
    """
    run = address.model_id or address.session_id or ""
    refused, reader = None, daemon_of(request).reader_for(run, address.path if isinstance(address.path, str) else "")
    if (token := address.weights_access_token) is not None:
        try:
            reader = reader_of(request, token)
        except Unauthorized as error:
            refused, reader = error, None
    if token is None and reader is None and address.openrl_reader is None:
        return raw, None
    fields = decode_json(dict[str, Any], raw.body)
    fields.pop("weights_access_token", None)
    fields["openrl_reader"] = reader
    return Raw(raw.content_type, encode_json(fields)), refused


async def _accept(request: Request, op: Op, received: Received, refused: OpenRLError | None = None) -> Response:
    raw = received.raw
    address = await _address(received)
    if op is Op.FORWARD_BACKWARD and address.forward_only:
        op = Op.FORWARD
    if refused is not None:
        work = refused
    elif received.error is not None:
        work, raw = received.error, Raw(raw.content_type, b"")  # of no use without its end
    else:
        work = await off_loop(len(raw.body), _decode, op, raw)
    promised = await daemon_of(request).submit(RunId(address.model_id), address.seq_id, op, work, raw)
    return json_response(replies.promise(promised))


async def _address(received: Received) -> Address:
    raw = received.raw
    try:
        return await off_loop(len(raw.body), read_address, raw.content_type, raw.body)
    except BadRequest as unreadable:
        raise (received.error or unreadable) from None


def _decode(op: Op, raw: Raw) -> Work | OpenRLError:
    try:
        return decode_work(op, raw.content_type, raw.body)
    except OpenRLError as error:
        return error
