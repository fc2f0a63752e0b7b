"""Checkpoints as files: signed URLs for them, and what these URLs give."""

from __future__ import annotations

import time
from email.utils import formatdate

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from openrl.checkpoints.archive import archive
from openrl.checkpoints.rope import Rope, whole
from openrl.errors import BadRequest, NotFound
from openrl.server.errors import json_response
from openrl.server.ranges import download
from openrl.server.requests import bare_daemon, daemon_of
from openrl.server.routes.checkpoints import path_of
from openrl.server.signing import SIGNED, signed_url
from openrl.store.records import Checkpoint
from openrl.types import CheckpointKind
from openrl.wire import replies

# The CLI asks for new URLs five minutes before these end (7.6); a download that has begun goes on.
LIFETIME_S = 3600


async def archive_redirect(request: Request) -> Response:
    """302 to the tar (L3); `Expires` tells old SDKs how long the URL opens it."""
    daemon = daemon_of(request)
    checkpoint = await daemon.life.find(path_of(request))
    if checkpoint.kind is CheckpointKind.EXTERNAL:
        raise BadRequest(f"{checkpoint.path} has no archive.", "Ask for its external_weights_urls.")
    archive(daemon.life.folder(checkpoint.folder))  # what cannot be packed is said now, and not to the download
    url = signed_url(request, f"{SIGNED}archives/{checkpoint.folder}", LIFETIME_S)
    return RedirectResponse(url, 302, {"expires": formatdate(time.time() + LIFETIME_S, usegmt=True)})


async def archive_file(request: Request) -> Response:
    folder: str = request.path_params["folder"]
    life = bare_daemon(request).life
    rope = archive(life.folder(folder))
    return download(request, rope, f"{_plain_name(folder)}.tar", _etag(folder, "tar"), life.hold(folder))


async def external_weights_urls(request: Request) -> Response:
    """A URL for each file of an external checkpoint (7.6)."""
    checkpoint = await daemon_of(request).life.find(path_of(request))
    if checkpoint.kind is not CheckpointKind.EXTERNAL:
        raise BadRequest(f"{checkpoint.path} is no external checkpoint.", "Make one with save_weights_external.")
    expires = time.time() + LIFETIME_S
    return json_response({"urls": _urls(request, checkpoint), "expires": replies.timestamp(int(expires))})


def _urls(request: Request, checkpoint: Checkpoint) -> dict[str, str]:
    names = [path.name for path in daemon_of(request).life.files(checkpoint)]
    paths = {name: f"{SIGNED}files/{checkpoint.folder}/{name}" for name in names}
    return {name: signed_url(request, path, LIFETIME_S) for name, path in paths.items()}


async def weights_file(request: Request) -> Response:
    folder, file = request.path_params["folder"], request.path_params["file"]
    life = bare_daemon(request).life
    path = life.folder(folder) / file
    if not path.is_file():
        raise NotFound(f"the checkpoint has no file {file!r}.")
    return download(request, Rope((whole(path),)), file, _etag(folder, file), life.hold(folder))


def _plain_name(folder: str) -> str:
    return folder.rpartition("/")[2].rpartition("--")[0]


def _etag(folder: str, file: str) -> str:
    """A folder's suffix is never used twice, and its files never change."""
    return f"{folder.rpartition('--')[2]}-{file}"
