"""Training runs: creating, describing and unloading them."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from openrl.codec import decode_json
from openrl.server.errors import json_response
from openrl.server.requests import check_scope, daemon_of, page_of, read_json, read_raw
from openrl.types import Op, RunId
from openrl.wire import records, replies
from openrl.wire.bodies import decode_new_run, decode_work
from openrl.wire.messages import ModelBody


async def create_model(request: Request) -> Response:
    raw = await read_raw(request)
    return json_response(replies.promise(await daemon_of(request).create_run(decode_new_run(raw.body), raw)))


async def get_info(request: Request) -> Response:
    body = await read_json(request, ModelBody)
    daemon = daemon_of(request)
    run = daemon.run(RunId(body.model_id))
    model = next((model for model in daemon.models() if model.name == run.base_model), None)
    return json_response(replies.run_info(run, model))


async def list_training_runs(request: Request) -> Response:
    """The CLI asks for 100 at a time and takes a short page for the last one (T25)."""
    limit, offset = page_of(request)
    project = request.query_params.get("project_id")
    page = await daemon_of(request).rest.runs(limit, offset, project, everyone=check_scope(request))
    return json_response(records.run_page(page, limit, offset))


async def training_run(request: Request) -> Response:
    check_scope(request)
    return json_response(records.run(await daemon_of(request).rest.run(RunId(request.path_params["run"]))))


async def unload_model(request: Request) -> Response:
    """Old SDKs send no seq_id with it."""
    raw = await read_raw(request)
    body = decode_json(ModelBody, raw.body)
    daemon, run = daemon_of(request), RunId(body.model_id)
    if body.seq_id is None:
        return json_response(replies.promise(await daemon.unload(run, raw)))
    work = decode_work(Op.UNLOAD, raw.content_type, raw.body)
    return json_response(replies.promise(await daemon.submit(run, body.seq_id, Op.UNLOAD, work, raw)))
