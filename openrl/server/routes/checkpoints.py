"""Checkpoints by their `tinker://` path: described, listed, copied, published, given a lifetime, deleted."""

from __future__ import annotations

import re
from http import HTTPStatus

from starlette.requests import Request
from starlette.responses import Response

from openrl.daemon.copying import InProject, InSession
from openrl.errors import BadRequest
from openrl.server.errors import json_response
from openrl.server.requests import daemon_of, page_of, read_json, reader_of
from openrl.types import CheckpointKind, RunId, SessionId
from openrl.wire import replies
from openrl.wire.messages import AdoptBody, CopyWeightsBody, TtlBody, WeightsInfoBody

_KNOWS_EXTERNAL = (0, 30, 4)  # the first SDK whose lists may hold external checkpoints (T26)


def path_of(request: Request) -> str:
    """The `tinker://` path that a REST path means; checked by whoever looks it up."""
    run, segment, name = (request.path_params[key] for key in ("run", "segment", "name"))
    return f"tinker://{run}/{segment}/{name}"


async def weights_info(request: Request) -> Response:
    body = await read_json(request, WeightsInfoBody)
    return json_response(replies.weights_info(await daemon_of(request).checkpoint(body.tinker_path)))


async def list_all(request: Request) -> Response:
    limit, offset = page_of(request)
    page = await daemon_of(request).life.page(limit, offset, hidden_from(request))
    return json_response(replies.checkpoint_page(page.checkpoints, offset, limit, page.total))


async def list_of_run(request: Request) -> Response:
    """All at once: the SDK does not page here."""
    page = await daemon_of(request).life.of_run(RunId(request.path_params["run"]), hidden_from(request))
    return json_response(replies.checkpoint_page(page.checkpoints, 0, page.total, page.total))


def hidden_from(request: Request) -> tuple[CheckpointKind, ...]:
    """Kinds that would fail an older SDK's whole list (T26)."""
    version = re.match(r"(\d+)\.(\d+)\.(\d+)", request.headers.get("x-stainless-package-version", ""))
    if version is not None and tuple(map(int, version.groups())) < _KNOWS_EXTERNAL:
        return (CheckpointKind.EXTERNAL,)
    return ()


async def publish(request: Request) -> Response:
    """Idempotent; a 409 would be repeated for minutes (7.8)."""
    await daemon_of(request).life.publish(path_of(request), True)
    return json_response({})


async def unpublish(request: Request) -> Response:
    await daemon_of(request).life.publish(path_of(request), False)
    return json_response({})


async def set_ttl(request: Request) -> Response:
    body = await read_json(request, TtlBody)
    await daemon_of(request).life.set_ttl(path_of(request), body.ttl_seconds)
    return json_response({})


async def delete(request: Request) -> Response:
    await daemon_of(request).life.delete(path_of(request))
    return Response(status_code=HTTPStatus.NO_CONTENT)


async def unknown(request: Request) -> Response:
    """A checkpoint's id that is not `segment/name`, or a call that does not exist."""
    raise BadRequest(
        f"{request.method} {request.path_params['rest']!r} is no call on a checkpoint.",
        f"Its id is <{' or '.join(CheckpointKind)}>/<name>; calls on it: DELETE, archive, external_weights_urls, "
        "publish, ttl.",
    )


async def copy_weights(request: Request) -> Response:
    """A direct answer, no promise. The token comes in a header, or from older SDKs in the body (7.5)."""
    body = await read_json(request, CopyWeightsBody)
    token = request.headers.get("x-tinker-weights-access-token") or body.weights_access_token
    reader = reader_of(request, token) if token else None
    into = _destination(request, body)
    path = await daemon_of(request).life.copy(body.source_path, into, body.ttl_seconds, reader)
    return json_response({"tinker_path": path})


def _destination(request: Request, body: CopyWeightsBody) -> InProject | InSession:
    if body.session_id is None and body.model_seq_id is None:
        return InProject(body.destination_project_id, request.headers.get("x-idempotency-key"))
    if body.session_id is None or body.model_seq_id is None or body.destination_project_id is not None:
        raise BadRequest("copy_weights takes destination_project_id, or session_id and model_seq_id, and not both")
    return InSession(SessionId(body.session_id), body.model_seq_id)


async def adopt(request: Request) -> Response:
    """Our own: take in a folder that `openrl checkpoints import` has laid into the data folder."""
    body = await read_json(request, AdoptBody)
    return json_response(replies.checkpoint(await daemon_of(request).life.adopt(body.folder)))
