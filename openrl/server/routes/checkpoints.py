"""Checkpoints, as far as they are asked about by their `tinker://` path."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from openrl.server.errors import json_response
from openrl.server.requests import daemon_of, read_json
from openrl.wire import replies
from openrl.wire.messages import WeightsInfoBody


async def weights_info(request: Request) -> Response:
    body = await read_json(request, WeightsInfoBody)
    return json_response(replies.weights_info(await daemon_of(request).checkpoint(body.tinker_path)))
