"""Builds everything and serves it: store, workers, daemon, HTTP app, uvicorn. The one place where the parts meet."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Protocol

import uvicorn
from starlette.applications import Starlette

from openrl import tls
from openrl.app_events import Listening, ModelFailed, ModelPostponed, ModelProgress, ModelReady, ServeEvent, Stopping
from openrl.backends.base import VllmSpec
from openrl.backends.registry import check_backend, runs_custom_losses
from openrl.backends.remote.app import create_remote_app
from openrl.backends.remote.mixed.service import MixedService
from openrl.backends.remote.service import RemoteService, find_remote, folder_of
from openrl.daemon.daemon import Daemon
from openrl.daemon.memory import Memory
from openrl.daemon.models import Model, ModelPool
from openrl.graceful import GracefulServer, Service
from openrl.instance import Owner, owning
from openrl.models.allowed import Allowed
from openrl.models.hub_files import HubFiles
from openrl.models.info import available_memory, check_fits, describe, memory_needed
from openrl.models.store import locate
from openrl.server.app import create_app, limits_of
from openrl.server.connections import fitting_connections, patient
from openrl.server.signing import signing_key
from openrl.settings import EngineSettings, ServerSettings, Settings
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
    check_backend(settings.engine.backend, settings.engine.quantize)
    if settings.server.tls_cert is not None and settings.server.tls_key is not None:
        tls.check_pair(settings.server.tls_cert, settings.server.tls_key)
    if settings.engine.backend == "remote":
        return _serve_a_remote(settings, api_key, on_event)
    with _listen(settings.server.host, settings.server.port) as listener, owning(settings.data_dir) as owner:
        return asyncio.run(_serve(settings, api_key, on_event, listener, owner))


def _serve_a_remote(settings: Settings, api_key: str, on_event: OnEvent) -> int:
    """What is owned is the remote's part of the data folder alone: a daemon may have the rest."""
    remote = find_remote(settings.remote)
    key = settings.remote.token or remote.token.read()  # what is wrong with it is said now, and not to the first call
    owned = folder_of(remote, settings.data_dir)
    with _listen(settings.server.host, settings.server.port) as listener, owning(owned) as owner:

        async def run() -> int:
            service = RemoteService(remote, settings.remote, settings.data_dir, key)
            secret = signing_key(settings.data_dir)
            app = create_remote_app(service.link, service.keeper, settings.server, api_key, secret)
            async with service.reached():
                return await _run(app, service, settings, on_event, listener, owner)

        return asyncio.run(run())


def build(settings: Settings, on_event: OnEvent, hub_files: HubFiles | None = None) -> Daemon:
    """A daemon for these settings, not yet started. `hub_files` will have what models it serves later on, too."""

    def new_worker(spec: ModelSpec) -> LocalWorker:
        return LocalWorker(worker_spec(settings, spec))

    def known(spec: ModelSpec) -> ModelInfo | None:
        folder = locate(spec, settings.data_dir)
        return None if folder is None else describe(folder)

    async def fetch(spec: ModelSpec, on_news: Callable[[Progress], None]) -> None:
        await new_worker(spec).fetch(lambda news: on_news(news) if isinstance(news, Progress) else None)

    allowed = Allowed(settings.allow_models, settings.data_dir) if settings.allow_models else None
    pool = ModelPool(settings.models, new_worker, known, fetch, allowed, _memory(settings.engine))
    if hub_files is not None:
        pool.listener.admitted = hub_files.add
        for model in pool.models.values():
            hub_files.add(model.spec)
    pool.listener.progress = lambda model, progress: on_event(_progress(model, progress))
    pool.listener.ready = lambda model, seconds: on_event(_ready(model, seconds))
    pool.listener.postponed = lambda model: on_event(ModelPostponed(model.name))
    pool.listener.failed = lambda model: on_event(ModelFailed(model.name, model.detail))
    return Daemon(settings, pool, bodies, custom_losses=runs_custom_losses(settings.engine.backend))


def _memory(engine: EngineSettings) -> Memory:
    """What base models may have, and what each needs in the type that is set."""
    return Memory(
        engine.model_memory_bytes,
        needed=lambda info: memory_needed(info, engine.dtype, engine.quantize),
        available=available_memory,
        check=lambda name, info, room: check_fits(name, info, engine.dtype, room, engine.quantize),
    )


def worker_spec(settings: Settings, spec: ModelSpec) -> WorkerSpec:
    """What the worker of a model is told."""
    engine = settings.engine
    return WorkerSpec(
        model=spec,
        data_dir=settings.data_dir,
        backend=engine.backend,
        dtype=engine.dtype,
        threads=engine.threads,
        max_batch_tokens=engine.max_batch_tokens,
        max_sample_rows=engine.max_sample_rows,
        max_kv_tokens=engine.max_kv_tokens,
        prefix_cache_tokens=engine.prefix_cache_tokens,
        sampler=engine.sampler,
        vllm=_vllm(settings, spec),
        quantize=engine.quantize,
        devices=engine.devices,
    )


def _vllm(settings: Settings, model: ModelSpec) -> VllmSpec:
    engine = settings.engine
    return VllmSpec(
        scratch=settings.data_dir / "vllm" / re.sub(r"[^\w.-]+", "--", model.name),
        python=engine.vllm_python,
        memory_fraction=engine.vllm_memory_fraction,
        gpu=engine.vllm_gpu,
        hang_seconds=engine.vllm_hang_seconds,
    )


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


async def _serve(settings: Settings, api_key: str, on_event: OnEvent, listener: socket.socket, owner: Owner) -> int:
    hub_files = HubFiles(settings.models, settings.data_dir, settings.hub.datasets_dir)
    daemon = build(settings, on_event, hub_files)
    secret = signing_key(settings.data_dir)
    if not settings.remote.routes:
        app = create_app(daemon, settings.server, api_key, secret, hub_files)
        return await _run(app, daemon, settings, on_event, listener, owner)
    mixed = MixedService(daemon, settings, daemon.keys.ring)
    app = create_app(daemon, settings.server, api_key, secret, hub_files, [mixed.middleware], [mixed.route])
    async with mixed.reached():
        return await _run(app, mixed, settings, on_event, listener, owner)


class _Living(Service, Protocol):
    async def start(self) -> None: ...

    async def stop(self) -> None: ...


async def _run(
    app: Starlette, service: _Living, settings: Settings, on_event: OnEvent, listener: socket.socket, owner: Owner
) -> int:
    config = _config(app, settings.server)
    server = GracefulServer(config, service, settings.daemon.shutdown_grace, lambda: on_event(Stopping()))

    @asynccontextmanager
    async def life(_app: object) -> AsyncGenerator[None]:
        await service.start()
        server.service_started()
        tls.leave_copy(settings.data_dir, settings.server.tls_cert)
        url = _url(listener, config)
        owner.announce(url)
        on_event(Listening(url))
        async with _fresh_certificate(config, settings.server):
            yield
        await service.stop()

    app.router.lifespan_context = life
    await server.serve(sockets=[listener])
    return 0 if server.started else 1


def _config(app: Starlette, server: ServerSettings) -> uvicorn.Config:
    limits = replace(limits_of(server), connections=fitting_connections(server.max_connections))
    return uvicorn.Config(
        app,
        http=patient(limits),
        h11_max_incomplete_event_size=server.max_head_bytes,
        ws="none",
        log_config=None,
        access_log=False,
        timeout_keep_alive=75,
        lifespan="on",
        ssl_certfile=server.tls_cert,
        ssl_keyfile=None if server.tls_key is None else str(server.tls_key),
    )


@asynccontextmanager
async def _fresh_certificate(config: uvicorn.Config, server: ServerSettings) -> AsyncGenerator[None]:
    """Renewed certificates are taken up during the block."""
    if config.ssl is None or server.tls_cert is None or server.tls_key is None:
        yield
        return
    following = asyncio.create_task(tls.follow(config.ssl, server.tls_cert, server.tls_key))
    try:
        yield
    finally:
        following.cancel()


def _url(listener: socket.socket, config: uvicorn.Config) -> str:
    host, port = listener.getsockname()[:2]
    scheme = "https" if config.is_ssl else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
