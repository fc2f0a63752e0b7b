"""A read-only look-alike of the Hugging Face hub below `/hf`, so that clients without a hub find tokenizers.

A client sets `HF_ENDPOINT=<server>/hf` and nothing else: `AutoTokenizer.from_pretrained(<served name>)` and
`datasets.load_dataset(<fixture>)` then come here. No key is asked for, since the clients have none to send; what can be
had are the files of `openrl.models.hub_files`, and never weights.
"""

from __future__ import annotations

import asyncio
import re
from datetime import UTC, datetime
from typing import Any
from urllib.parse import parse_qs

from starlette.requests import Request
from starlette.responses import FileResponse, Response

from openrl.codec import decode_json
from openrl.models.hub_files import HubFile, HubFiles, HubFolder, HubRepo
from openrl.server.errors import json_response
from openrl.server.requests import read_raw

_REPO = r"(?P<repo>[^/]+(?:/[^/]+)?)"
_REVISION = r"(?P<revision>refs/[^/]+/[^/]+|[^/]+)"
_RESOLVE = re.compile(rf"(?P<kind>datasets/)?{_REPO}/resolve/{_REVISION}/(?P<path>.+)")
_API = re.compile(
    rf"(?P<kind>models|datasets)/{_REPO}(?:/(?P<call>revision|tree|paths-info)/{_REVISION}(?:/(?P<path>.+))?)?"
)
_COMMIT = "X-Repo-Commit"


class _Missing(Exception):
    """Answered with 404 and the code by which the hub's client library tells what is missing."""

    def __init__(self, code: str, message: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.answer = json_response({"error": message}, 404, {"X-Error-Code": code, **(headers or {})})


async def resolve(request: Request) -> Response:
    """HEAD and GET of `/hf/[datasets/]REPO/resolve/REVISION/FILE`, ranges included."""
    match = _RESOLVE.fullmatch(request.path_params["rest"])
    try:
        if match is None:
            raise _Missing("EntryNotFound", "no such page; this is a look-alike of the hub for tokenizers and fixtures")
        repo = await _repo(request, match)
        file = repo.file(match["path"])
        if file is None:
            raise _entry_missing(repo, match["path"])
    except _Missing as missing:
        return missing.answer
    return FileResponse(file.path, headers={"ETag": f'"{file.oid}"', _COMMIT: repo.commit})


async def api(request: Request) -> Response:
    """`/hf/api/{models,datasets}/REPO[/revision/REVISION]`, `/tree/REVISION[/FOLDER]`, `/paths-info/REVISION`."""
    match = _API.fullmatch(request.path_params["rest"])
    try:
        if match is None:
            raise _Missing("RepoNotFound", "no such call; this is a look-alike of the hub for tokenizers and fixtures")
        repo = await _repo(request, match)
        match match["call"]:
            case "tree":
                content: object = _tree(repo, match["path"] or "", request.query_params.get("recursive", ""))
            case "paths-info":
                content = _paths_info(repo, await _wanted_paths(request))
            case _:
                content = _info(repo)
    except _Missing as missing:
        return missing.answer
    return json_response(content, headers={_COMMIT: repo.commit})


async def _repo(request: Request, match: re.Match[str]) -> HubRepo:
    files: HubFiles = request.app.state.hub_files
    find = files.dataset if (match["kind"] or "").startswith("datasets") else files.model
    repo = await asyncio.to_thread(find, match["repo"])
    if repo is None:
        raise _Missing("RepoNotFound", f"{match['repo']!r} is neither a served model nor a fixture data set")
    revision = match["revision"]
    if revision is not None and not repo.has_revision(revision):
        raise _Missing("RevisionNotFound", f"{repo.id} has no revision {revision!r}, only main")
    return repo


def _entry_missing(repo: HubRepo, path: str) -> _Missing:
    return _Missing("EntryNotFound", f"{repo.id} has no {path!r}", {_COMMIT: repo.commit})


def _info(repo: HubRepo) -> dict[str, Any]:
    modified = datetime.fromtimestamp(repo.modified_at, UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")
    siblings = [{"rfilename": file.name, "size": file.size, "blobId": file.oid} for file in repo.files]
    return {
        "id": repo.id,
        "modelId": repo.id,
        "sha": repo.commit,
        "private": False,
        "gated": False,
        "disabled": False,
        "tags": list[str](),
        "downloads": 0,
        "likes": 0,
        "createdAt": modified,
        "lastModified": modified,
        "siblings": siblings,
    }


def _tree(repo: HubRepo, folder: str, recursive: str) -> list[dict[str, Any]]:
    if folder and repo.folder(folder) is None:
        raise _entry_missing(repo, folder)
    return [_entry(entry) for entry in repo.entries(folder, recursive.lower() in ("1", "true"))]


def _paths_info(repo: HubRepo, paths: list[str]) -> list[dict[str, Any]]:
    """Paths that do not exist are left out, as on the hub."""
    found = (repo.file(path) or repo.folder(path) for path in paths)
    return [_entry(entry) for entry in found if entry is not None]


async def _wanted_paths(request: Request) -> list[str]:
    """`paths` of a body that is a form or JSON; the client library has sent both."""
    raw = await read_raw(request)
    if raw.content_type.startswith("application/x-www-form-urlencoded"):
        return parse_qs(raw.body.decode("utf-8", "replace")).get("paths", [])
    paths = decode_json(dict[str, Any], raw.body or b"{}").get("paths", [])
    listed: list[Any] = paths if isinstance(paths, list) else [paths]
    return [path for path in listed if isinstance(path, str)]


def _entry(entry: HubFile | HubFolder) -> dict[str, Any]:
    if isinstance(entry, HubFile):
        return {"type": "file", "oid": entry.oid, "size": entry.size, "path": entry.name}
    return {"type": "directory", "oid": entry.oid, "size": 0, "path": entry.name}
