"""Samplers and samples."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from openrl.codec import decode_json
from openrl.daemon.work import Raw
from openrl.server.errors import json_response
from openrl.server.requests import daemon_of, off_loop, read_json, read_raw
from openrl.types import SamplePayload, SamplerId, SessionId
from openrl.wire import replies
from openrl.wire.bodies import decode_sample
from openrl.wire.messages import CreateSamplerBody, JoinSamplerBody, SamplerAddressBody


async def create_sampling_session(request: Request) -> Response:
    body = await read_json(request, CreateSamplerBody)
    sampler = await daemon_of(request).create_sampler(
        SessionId(body.session_id), body.sampling_session_seq_id, body.base_model, body.model_path
    )
    return json_response({"type": "create_sampling_session", "sampling_session_id": sampler})


async def join_sampling_session(request: Request) -> Response:
    """A clone asks for its number, before its first sample (6.2)."""
    body = await read_json(request, JoinSamplerBody)
    number = await daemon_of(request).clients.join(SamplerId(body.sampling_session_id))
    return json_response({"type": "join_sampling_session", "client_counter": number})


async def get_sampler(request: Request) -> Response:
    return json_response(replies.sampler(daemon_of(request).sampler(SamplerId(request.path_params["sampler"]))))


async def asample(request: Request) -> Response:
    """Samples have no order among themselves, so a bad one is refused at once (6.4)."""
    raw = await read_raw(request)
    address, payload = await off_loop(len(raw.body), _decode, raw)
    sampler = SamplerId(address.sampling_session_id)
    promised = await daemon_of(request).submit_sample(sampler, address.seq_id, payload, raw)
    return json_response(replies.sample_promise(promised, payload.num_samples))


def _decode(raw: Raw) -> tuple[SamplerAddressBody, SamplePayload]:
    return decode_json(SamplerAddressBody, raw.body), decode_sample(raw.content_type, raw.body)
