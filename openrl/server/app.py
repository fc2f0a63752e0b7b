"""The HTTP app: the list of routes, and what each request passes on the way to them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from secrets import token_bytes

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from openrl.daemon.daemon import Daemon
from openrl.errors import OpenRLError
from openrl.models.hub_files import HubFiles
from openrl.server.credentials import Credentials
from openrl.server.errors import on_http_exception, on_openrl_error
from openrl.server.middleware import HUB, AccessLog, ApiKey, BodyLimit, HostCheck
from openrl.server.routes import (
    admin,
    auth,
    checkpoints,
    downloads,
    futures,
    hub,
    losses,
    runs,
    sampling,
    service,
    sessions,
    training,
)
from openrl.server.signing import SIGNED, Signer
from openrl.settings import ServerSettings

Endpoint = Callable[[Request], Awaitable[Response]]

BASE = "/api/v1"
CHECKPOINT = "/training_runs/{run}/checkpoints/{segment}/{name}"
METHODS = ("GET", "POST", "PUT", "DELETE")
OPEN_PATHS = frozenset({"/", f"{BASE}/healthz"})  # no key needed


def create_app(
    daemon: Daemon,
    settings: ServerSettings,
    api_key: str,
    secret: bytes | None = None,
    hub_files: HubFiles | None = None,
) -> Starlette:
    """The ASGI app over a daemon that someone else starts and stops.

    `secret` signs URLs and tokens; None: a fresh one, so that they end with this app. `hub_files` None: no repos.
    """
    secret = secret or token_bytes(32)
    credentials = Credentials("" if settings.auth == "off" else api_key, secret)
    signer = Signer(secret)
    app = Starlette(
        routes=routes(),
        middleware=[
            Middleware(AccessLog),
            Middleware(HostCheck, bound_to=settings.host),
            Middleware(ApiKey, credentials=credentials, signer=signer, open_paths=OPEN_PATHS),
            Middleware(BodyLimit, limit=settings.max_body_bytes),
        ],
        exception_handlers={OpenRLError: on_openrl_error, HTTPException: on_http_exception},
    )
    # A redirect would be followed, and the target's body taken for the result (T48).
    app.router.redirect_slashes = False
    app.state.daemon = daemon
    app.state.settings = settings
    app.state.signer = signer
    app.state.credentials = credentials
    app.state.hub_files = hub_files or HubFiles((), Path(), None)
    return app


def routes() -> list[Route]:
    return [
        Route("/", service.root),
        # the server itself
        _get("/healthz", service.healthz),
        _get("/status", service.status),
        _post("/client/config", service.client_config),
        _post("/client/dynamic_config", service.dynamic_config),
        _get("/get_server_capabilities", service.get_server_capabilities),
        _post("/telemetry", service.telemetry),
        # keys and tokens
        _post("/auth/token", auth.token),
        _get("/auth/apikey/me", auth.show_key),
        _delete("/auth/apikey/me", auth.delete_key),
        # sessions
        _post("/create_session", sessions.create_session),
        _post("/session_heartbeat", sessions.session_heartbeat),
        _post("/sessions/{session}/finish", sessions.finish_session),
        _get("/sessions", sessions.list_sessions),
        _post("/sessions/search", sessions.search_sessions),
        _get("/sessions/{session}", sessions.get_session),
        _put("/sessions/{session}/project", sessions.assign_project),
        _get("/sessions/{session}/trace_export", sessions.trace_export),
        Route(SIGNED + "traces/{session}", sessions.trace_file, methods=["GET"]),
        # runs
        _post("/create_model", runs.create_model),
        _post("/get_info", runs.get_info),
        _post("/unload_model", runs.unload_model),
        _get("/training_runs", runs.list_training_runs),
        _get("/training_runs/{run}", runs.training_run),
        _post("/create_custom_loss", losses.create_custom_loss),
        # training, in order of seq_id
        _post("/forward", training.forward),
        _post("/forward_backward", training.forward_backward),
        _post("/optim_step", training.optim_step),
        _post("/save_weights", training.save_weights),
        _post("/save_weights_for_sampler", training.save_weights_for_sampler),
        _post("/save_weights_external", training.save_weights_external),
        _post("/load_weights", training.load_weights),
        # sampling
        _post("/create_sampling_session", sampling.create_sampling_session),
        _post("/join_sampling_session", sampling.join_sampling_session),
        _get("/samplers/{sampler}", sampling.get_sampler),
        _post("/asample", sampling.asample),
        # results and checkpoints
        _post("/retrieve_future", futures.retrieve_future),
        _post("/retrieve_futures", futures.retrieve_futures),
        _post("/cancel_future", futures.cancel_future),
        _post("/weights_info", checkpoints.weights_info),
        _post("/copy_weights", checkpoints.copy_weights),
        _get("/checkpoints", checkpoints.list_all),
        _post("/checkpoints/adopt", checkpoints.adopt),
        _get("/training_runs/{run}/checkpoints", checkpoints.list_of_run),
        # a checkpoint's id is two segments, and suffixes follow it (T27)
        _get(CHECKPOINT + "/archive", downloads.archive_redirect),
        _get(CHECKPOINT + "/external_weights_urls", downloads.external_weights_urls),
        _post(CHECKPOINT + "/publish", checkpoints.publish),
        _delete(CHECKPOINT + "/publish", checkpoints.unpublish),
        _put(CHECKPOINT + "/ttl", checkpoints.set_ttl),
        _delete(CHECKPOINT, checkpoints.delete),
        Route(BASE + "/training_runs/{run}/checkpoints/{rest:path}", checkpoints.unknown, methods=list(METHODS)),
        Route(SIGNED + "archives/{folder:path}", downloads.archive_file, methods=["GET"]),
        Route(SIGNED + "files/{folder:path}/{file}", downloads.weights_file, methods=["GET"]),
        # the audit log and metered use
        _get("/audit", admin.audit),
        _get("/billing/usage/events", admin.usage_events),
        _get("/billing/usage/checkpoints/current", admin.checkpoint_storage),
        # the hub look-alike
        Route(HUB + "api/{rest:path}", hub.api, methods=["GET", "POST"]),
        Route(HUB + "{rest:path}", hub.resolve, methods=["GET"]),
    ]


def _get(path: str, endpoint: Endpoint) -> Route:
    return Route(BASE + path, endpoint, methods=["GET"])


def _post(path: str, endpoint: Endpoint) -> Route:
    return Route(BASE + path, endpoint, methods=["POST"])


def _put(path: str, endpoint: Endpoint) -> Route:
    return Route(BASE + path, endpoint, methods=["PUT"])


def _delete(path: str, endpoint: Endpoint) -> Route:
    return Route(BASE + path, endpoint, methods=["DELETE"])
