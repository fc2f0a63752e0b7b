"""The HTTP app: the list of routes, and what each request passes on the way to them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from secrets import token_bytes

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware

from openrl.daemon.daemon import Daemon
from openrl.errors import OpenRLError
from openrl.models.hub_files import HubFiles
from openrl.server.access import (
    ANY,
    MANAGE,
    MONITOR,
    OPEN,
    SIGNED_URL,
    WORK,
    Endpoint,
    GuardedRoute,
    Needs,
)
from openrl.server.connections import Limits
from openrl.server.credentials import Credentials
from openrl.server.errors import on_http_exception, on_openrl_error
from openrl.server.measure import HttpMetrics, Measure
from openrl.server.middleware import HUB, AccessLog, ApiKey, BodyLimit, HostCheck, OpenPaths
from openrl.server.routes import (
    admin,
    auth,
    checkpoints,
    downloads,
    futures,
    health,
    hub,
    keys,
    losses,
    metrics,
    runs,
    sampling,
    service,
    sessions,
    training,
    uploads,
)
from openrl.server.signing import SIGNED, Signer
from openrl.server.turnstile import Turnstile
from openrl.settings import ServerSettings

BASE = "/api/v1"
CHECKPOINT = "/training_runs/{run}/checkpoints/{segment}/{name}"
METHODS = ("GET", "POST", "PUT", "DELETE")


# Answered at once also when hundreds of other requests have come together.
_EXPRESS = (f"{BASE}/session_heartbeat", f"{BASE}/healthz", f"{BASE}/readyz")
_BUSY = frozenset(
    (
        f"{BASE}/retrieve_future",
        f"{BASE}/asample",
        f"{BASE}/retrieve_futures",
        f"{BASE}/forward_backward",
        f"{BASE}/optim_step",
        f"{BASE}/session_heartbeat",
    )
)


def create_app(
    daemon: Daemon,
    settings: ServerSettings,
    api_key: str,
    secret: bytes | None = None,
    hub_files: HubFiles | None = None,
    inner: Sequence[Middleware] = (),
    more: Sequence[GuardedRoute] = (),
) -> Starlette:
    """The ASGI app over a daemon that someone else starts and stops.

    `secret` signs URLs and tokens; None: a fresh one, so that they end with this app. `hub_files` None: no repos.
    `inner` stands between all checks and the routes; `more` are routes beside the daemon's.
    """
    secret = secret or token_bytes(32)
    daemon.keys.ring.set_machine(api_key)
    credentials = Credentials(daemon.keys.ring, secret, required=settings.auth != "off")
    app = guarded_app(_busiest_first([*routes(), *more]), settings, credentials, Signer(secret), inner)
    app.state.daemon = daemon
    app.state.hub_files = hub_files or HubFiles((), Path(), None)
    return app


def guarded_app(
    served: Sequence[GuardedRoute],
    settings: ServerSettings,
    credentials: Credentials,
    signer: Signer,
    inner: Sequence[Middleware] = (),
) -> Starlette:
    """Routes behind everything that a request has to pass."""
    http_metrics = HttpMetrics()
    app = Starlette(
        routes=served,
        middleware=[
            Middleware(Measure, metrics=http_metrics),
            Middleware(Turnstile, express=_EXPRESS),
            Middleware(AccessLog),
            Middleware(HostCheck, bound_to=settings.host, names=settings.allowed_hosts or ()),
            Middleware(ApiKey, credentials=credentials, signer=signer, open_paths=_open_paths(served)),
            Middleware(BodyLimit, limits=limits_of(settings)),
            *inner,
        ],
        exception_handlers={OpenRLError: on_openrl_error, HTTPException: on_http_exception},
    )
    # A redirect would be followed, and the target's body taken for the result (T48).
    app.router.redirect_slashes = False
    app.state.http_metrics = http_metrics
    app.state.settings = settings
    app.state.signer = signer
    app.state.credentials = credentials
    return app


def _busiest_first(served: list[GuardedRoute]) -> list[GuardedRoute]:
    """Routes are tried one after the other, and nearly all requests are for a few of them."""
    return sorted(served, key=lambda route: route.path not in _BUSY)


def limits_of(settings: ServerSettings) -> Limits:
    return Limits(
        connections=settings.max_connections,
        head=settings.max_head_bytes,
        body=settings.max_body_bytes,
        head_seconds=settings.head_seconds,
        body_seconds=settings.body_seconds,
        send_seconds=settings.send_seconds,
    )


def _open_paths(served: Iterable[GuardedRoute]) -> OpenPaths:
    found = [route for route in served if route.needs is OPEN]
    return OpenPaths(
        exact=frozenset(route.path for route in found if route.prefix == route.path),
        below=tuple(route.prefix for route in found if route.prefix != route.path),
    )


def routes() -> list[GuardedRoute]:
    """All of them, each with what it needs of its caller. GETs need any key, others one that may work, unless said."""
    return [
        guarded("/", service.root, needs=OPEN),
        # the server itself
        _get("/healthz", health.healthz, OPEN),
        _get("/readyz", health.readyz, OPEN),
        guarded("/metrics", metrics.metrics, needs=MONITOR),
        _get("/status", service.status, MONITOR),
        _get("/device_lanes", service.device_lanes, MANAGE),
        _post("/client/config", service.client_config, ANY),
        _post("/client/dynamic_config", service.dynamic_config, ANY),
        _get("/get_server_capabilities", service.get_server_capabilities),
        _post("/telemetry", service.telemetry, ANY),
        # keys and tokens
        _post("/auth/token", auth.token, ANY),
        _get("/auth/apikey/me", auth.show_key),
        _delete("/auth/apikey/me", auth.delete_key, ANY),
        _get("/keys", keys.list_keys, MANAGE),
        _post("/keys", keys.create_key, MANAGE),
        _delete("/keys/{key}", keys.revoke_key, MANAGE),
        # sessions
        _post("/create_session", sessions.create_session),
        _post("/session_heartbeat", sessions.session_heartbeat),
        _post("/sessions/{session}/finish", sessions.finish_session),
        _get("/sessions", sessions.list_sessions),
        _post("/sessions/search", sessions.search_sessions, ANY),
        _get("/sessions/{session}", sessions.get_session),
        _put("/sessions/{session}/project", sessions.assign_project),
        _get("/sessions/{session}/trace_export", sessions.trace_export),
        guarded(SIGNED + "traces/{session}", sessions.trace_file, needs=SIGNED_URL),
        # runs
        _post("/create_model", runs.create_model),
        _post("/get_info", runs.get_info, ANY),
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
        _post("/retrieve_future", futures.retrieve_future, ANY),
        _post("/retrieve_futures", futures.retrieve_futures, ANY),
        _post("/cancel_future", futures.cancel_future),
        _post("/weights_info", checkpoints.weights_info, ANY),
        _post("/copy_weights", checkpoints.copy_weights),
        _get("/checkpoints", checkpoints.list_all),
        _post("/checkpoints/adopt", checkpoints.adopt, MANAGE),
        _get("/training_runs/{run}/checkpoints", checkpoints.list_of_run),
        # a checkpoint's id is two segments, and suffixes follow it (T27)
        _get(CHECKPOINT + "/archive", downloads.archive_redirect),
        _get(CHECKPOINT + "/external_weights_urls", downloads.external_weights_urls),
        _get(CHECKPOINT + "/files", uploads.describe),
        _get(CHECKPOINT + "/files/{file}", uploads.file),
        _post(CHECKPOINT + "/publish", checkpoints.publish),
        _delete(CHECKPOINT + "/publish", checkpoints.unpublish),
        _put(CHECKPOINT + "/ttl", checkpoints.set_ttl),
        _delete(CHECKPOINT, checkpoints.delete),
        guarded(BASE + "/training_runs/{run}/checkpoints/{rest:path}", checkpoints.unknown, METHODS, ANY),
        guarded(SIGNED + "archives/{folder:path}", downloads.archive_file, needs=SIGNED_URL),
        guarded(SIGNED + "files/{folder:path}/{file}", downloads.weights_file, needs=SIGNED_URL),
        # checkpoints that are pushed here
        _post("/uploads", uploads.announce),
        _get("/uploads/{upload}", uploads.show),
        _delete("/uploads/{upload}", uploads.drop),
        _put("/uploads/{upload}/files/{file}", uploads.receive),
        _post("/uploads/{upload}/commit", uploads.commit),
        # the audit log and metered use
        _get("/audit", admin.audit),
        _get("/billing/usage/events", admin.usage_events),
        _get("/billing/usage/checkpoints/current", admin.checkpoint_storage),
        # the hub look-alike
        guarded(HUB + "api/{rest:path}", hub.api, ("GET", "POST"), OPEN),
        guarded(HUB + "{rest:path}", hub.resolve, needs=OPEN),
    ]


def guarded(path: str, endpoint: Endpoint, methods: Sequence[str] = ("GET",), needs: Needs = ANY) -> GuardedRoute:
    """A route at a path of its own, outside of the API."""
    return GuardedRoute(path, endpoint, methods=list(methods), needs=needs)


def _get(path: str, endpoint: Endpoint, needs: Needs = ANY) -> GuardedRoute:
    return guarded(BASE + path, endpoint, ("GET",), needs)


def _post(path: str, endpoint: Endpoint, needs: Needs = WORK) -> GuardedRoute:
    return guarded(BASE + path, endpoint, ("POST",), needs)


def _put(path: str, endpoint: Endpoint, needs: Needs = WORK) -> GuardedRoute:
    return guarded(BASE + path, endpoint, ("PUT",), needs)


def _delete(path: str, endpoint: Endpoint, needs: Needs = WORK) -> GuardedRoute:
    return guarded(BASE + path, endpoint, ("DELETE",), needs)
