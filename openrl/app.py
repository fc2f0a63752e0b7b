"""Builds everything and serves it: store, workers, daemon, HTTP app, uvicorn. The one place where the parts meet."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from types import FrameType

import uvicorn

from openrl.app_events import Listening, ModelFailed, ModelProgress, ModelReady, ServeEvent, Stopping
from openrl.backends.registry import check_backend, runs_custom_losses
from openrl.daemon.daemon import Daemon
from openrl.daemon.models import Model, ModelPool
from openrl.instance import Owner, owning
from openrl.models.hub_files import HubFiles
from openrl.models.info import describe
from openrl.models.store import locate
from openrl.server.app import create_app
from openrl.server.signing import signing_key
from openrl.settings import Settings
from openrl.types import ModelInfo, ModelSpec
from openrl.wire import bodies
from openrl.workers.local import LocalWorker
from openrl.workers.messages import Progress, WorkerSpec

log = logging.getLogger(__name__)

OnEvent = Callable[[ServeEvent], None]


def serve(settings: Settings, api_key: str, on_event: OnEvent) -> int:
    """Serve until interrupted: once ends gracefully, twice at once. Returns the exit code.

    Raises ModelError for a backend that cannot be served, OSError when the port is taken, and NotReady when another
    server has the data folder, all before any work.
    """
    check_backend(settings.engine.backend)
    with _listen(settings.server.host, settings.server.port) as listener, owning(settings.data_dir) as owner:
        return asyncio.run(_serve(settings, api_key, on_event, listener, owner))


def build(settings: Settings, on_event: OnEvent) -> Daemon:
    """A daemon for these settings, not yet started."""

    def new_worker(spec: ModelSpec) -> LocalWorker:
        engine = settings.engine
        return LocalWorker(
            WorkerSpec(
                model=spec,
                data_dir=settings.data_dir,
                backend=engine.backend,
                dtype=engine.dtype,
                threads=engine.threads,
                max_batch_tokens=engine.max_batch_tokens,
                max_sample_rows=engine.max_sample_rows,
                max_kv_tokens=engine.max_kv_tokens,
            )
        )

    def known(spec: ModelSpec) -> ModelInfo | None:
        folder = locate(spec, settings.data_dir)
        return None if folder is None else describe(folder)

    pool = ModelPool(settings.models, new_worker, known)
    pool.listener.progress = lambda model, progress: on_event(_progress(model, progress))
    pool.listener.ready = lambda model, seconds: on_event(_ready(model, seconds))
    pool.listener.failed = lambda model: on_event(ModelFailed(model.name, model.detail))
    return Daemon(settings, pool, bodies, custom_losses=runs_custom_losses(settings.engine.backend))


def _progress(model: Model, progress: Progress) -> ModelProgress:
    return ModelProgress(model.name, progress.stage, progress.done, progress.total)


def _ready(model: Model, seconds: float) -> ModelReady:
    assert model.report is not None
    return ModelReady(model.name, model.report, seconds)


def _listen(host: str, port: int) -> socket.socket:
    """Take the port before anything is loaded. SO_REUSEADDR: a restart need not wait for old connections to end.

    The protocol is named because asyncio switches Nagle's algorithm off only on sockets that say they are TCP; with
    it on, every answer waits 40 ms for the client's delayed acknowledgement.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError:
        listener.close()
        raise
    return listener


class _Server(uvicorn.Server):
    """uvicorn with our own signals: the daemon must let go of the long polls before connections can close."""

    def __init__(self, config: uvicorn.Config, on_stop: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_stop = on_stop

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            log.warning("second signal: leaving at once")
            os._exit(130)  # the worker processes die with us
        self._on_stop()
        self.should_exit = True


async def _serve(settings: Settings, api_key: str, on_event: OnEvent, listener: socket.socket, owner: Owner) -> int:
    daemon = build(settings, on_event)

    @asynccontextmanager
    async def life(_app: object) -> AsyncGenerator[None]:
        await daemon.start()
        owner.announce(_url(listener))
        on_event(Listening(_url(listener)))
        yield
        await daemon.stop()

    hub_files = HubFiles(settings.models, settings.data_dir, settings.hub.datasets_dir)
    app = create_app(daemon, settings.server, api_key, signing_key(settings.data_dir), hub_files)
    app.router.lifespan_context = life
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=int(settings.daemon.shutdown_grace),
        timeout_keep_alive=75,
        lifespan="on",
    )

    def on_stop() -> None:
        on_event(Stopping())
        daemon.begin_stop()

    server = _Server(config, on_stop)
    await server.serve(sockets=[listener])
    return 0 if server.started else 1


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
