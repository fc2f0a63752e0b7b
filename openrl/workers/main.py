"""The worker process's entry, `python -m openrl.workers.main <fd>`: started by `openrl.workers.local` alone."""

from __future__ import annotations

import logging
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import psutil

from openrl.backends import registry
from openrl.backends.base import Backend, BackendSpec
from openrl.errors import BackendFault, OpenRLError
from openrl.models.prepare import check_memory, prepare
from openrl.models.progress import Progress as ModelProgress
from openrl.workers.loop import Loop
from openrl.workers.messages import FromWorker, Prepared, Progress, Ready, ToWorker, Unusable, Woken, WorkerSpec
from openrl.workers.process import die_with_parent, set_before_torch

log = logging.getLogger(__name__)

_LOST = 3  # exit code of a worker whose backend is lost


def main() -> None:
    """Open the model that the daemon asks for, then serve it until told to stop or the daemon is gone."""
    die_with_parent()
    for stop in (signal.SIGINT, signal.SIGTERM):  # both may reach the whole group; the daemon decides when we end
        signal.signal(stop, signal.SIG_IGN)
    set_before_torch()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s worker %(name)s: %(message)s")
    connection = Connection(int(sys.argv[1]))
    spec = connection.recv()
    inbox: queue.SimpleQueue[ToWorker | None] = queue.SimpleQueue()
    try:
        folder = _prepare(spec, connection)
        if not spec.load:
            connection.send(Prepared())
            return
        lost = _Lost(connection)
        backend = open_backend(spec, folder, _reporter(connection), lambda: inbox.put(Woken()), lost)
    except OpenRLError as error:
        connection.send(Unusable(error))
        return
    except Exception as error:  # whatever stops the model from opening is told to the user
        log.exception("opening the model failed")
        connection.send(
            Unusable(BackendFault(f"opening {spec.model.source!r} failed: {type(error).__name__}: {error}"))
        )
        return
    threading.Thread(target=_read, args=(connection, inbox), daemon=True, name="inbox").start()
    lost.opened = True
    connection.send(Ready(backend.info, backend.report))
    Loop(backend, inbox, _sender(connection), spec.max_sample_rows).run()
    logging.shutdown()
    os._exit(0)  # all is answered and written; taking torch down object by object would cost seconds of every restart


def _prepare(spec: WorkerSpec, connection: Connection) -> Path:
    """The folder of the model's files, made if need be."""

    def report(progress: ModelProgress) -> None:
        connection.send(Progress(progress.stage, progress.done, progress.total))

    return prepare(spec.model, spec.data_dir, report)


def _reporter(connection: Connection) -> Callable[[str], None]:
    return lambda stage: connection.send(Progress(stage, 0, None))


class _Lost:
    """Ends the process when its backend can do nothing any more: the daemon then starts another and recovers the
    runs. Called from any thread, since the one that computes may wait for a device that is gone."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.opened = False

    def __call__(self, reason: str) -> None:
        log.critical("%s The worker ends.", reason)
        if not self.opened:
            self._connection.send(Unusable(BackendFault(reason)))
        logging.shutdown()
        os._exit(_LOST)


def open_backend(
    spec: WorkerSpec,
    folder: Path,
    report: Callable[[str], None],
    wake: Callable[[], None],
    lost: Callable[[str], None] = log.critical,
) -> Backend:
    """Open the model of a ready folder; see `BackendSpec` for the callbacks. Raises OpenRLError if it is unusable."""
    check_memory(folder, spec.dtype, spec.quantize)
    report("loading")
    return registry.opener(spec.backend)(
        BackendSpec(
            folder=folder,
            device="auto",
            dtype=spec.dtype,
            threads=spec.threads or psutil.cpu_count(logical=False) or 1,
            max_batch_tokens=spec.max_batch_tokens,
            max_sample_rows=spec.max_sample_rows,
            max_kv_tokens=spec.max_kv_tokens,
            prefix_cache_tokens=spec.prefix_cache_tokens,
            name=spec.model.name,
            sampler=spec.sampler,
            vllm=spec.vllm,
            wake=wake,
            report=report,
            quantize=spec.quantize,
            devices=spec.devices,
            lost=lost,
        )
    )


def _read(connection: Connection, inbox: queue.SimpleQueue[ToWorker | None]) -> None:
    """Keep the pipe empty, so that the daemon never waits for a busy worker to read."""
    while True:
        try:
            inbox.put(connection.recv())
        except (EOFError, OSError):
            inbox.put(None)
            return


class _sender:
    """Sends to the daemon; a daemon that is gone is noticed by the reader."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def __call__(self, message: FromWorker) -> None:
        try:
            self._connection.send(message)
        except OSError:
            log.warning("the daemon is gone; a result is dropped")


if __name__ == "__main__":
    main()
