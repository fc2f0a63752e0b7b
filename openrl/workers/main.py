"""The worker process's entry, `python -m openrl.workers.main <fd>`: started by `openrl.workers.local` alone."""

from __future__ import annotations

import ctypes
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

log = logging.getLogger(__name__)


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
        backend = open_backend(spec, folder, _reporter(connection), lambda: inbox.put(Woken()))
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


def open_backend(spec: WorkerSpec, folder: Path, report: Callable[[str], None], wake: Callable[[], None]) -> Backend:
    """Open the model of a ready folder; see `BackendSpec` for the callbacks. Raises OpenRLError if it is unusable."""
    check_memory(folder, spec.dtype)
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


def set_before_torch() -> None:
    """What torch's libraries read when they are loaded."""
    # Idle OpenMP threads that spin take the cores from the daemon; ones that sleep at once cost a system call for each
    # of a decoding step's thousand small products. So they spin for well under a millisecond, then sleep.
    os.putenv("OMP_WAIT_POLICY", "PASSIVE")
    os.putenv("GOMP_SPINCOUNT", "50000")
    # Compiled CPU kernels are kept for each shape ever seen, 1024 of them, about a megabyte each: too many for mixed
    # lengths, where few shapes come again.
    os.putenv("LRU_CACHE_CAPACITY", "128")
    os.putenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")
    # Large tensors in large pages: the system clears these ten times as fast, and a pass asks for much memory.
    os.putenv("THP_MEM_ALLOC_ENABLE", "1")


def die_with_parent() -> None:
    """Ask Linux to end this process when the daemon ends, however hard, so that a restart finds the memory free."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


if __name__ == "__main__":
    main()
