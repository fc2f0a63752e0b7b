"""The HTTP app over a real daemon (with a scalar worker) behind a real uvicorn in a thread: can be stopped and started
again on the same port and data folder. And checkpoints that such daemons can hold and move."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import uvicorn

from openrl.checkpoints import layout
from openrl.checkpoints.commit import CheckpointFolders
from openrl.checkpoints.layout import Address
from openrl.checkpoints.peft import OPTIMIZER_FILE, write_adapter, write_tensors
from openrl.server.app import create_app
from openrl.store.records import Checkpoint
from openrl.types import Array, CheckpointKind, LoraSpec, RunId
from support.daemons import BASE, Harness
from support.fake_daemon import server_settings
from support.http import KEY

T = TypeVar("T")
RANK = 8
SPEC = LoraSpec(RANK, 5)


def write_files(into: Path, width: int = 64, rank: int = RANK) -> None:
    """Files of a training checkpoint of two layers; about 100 bytes a unit of `width`."""
    random = np.random.default_rng(width)
    shapes = {"lora_A": (rank, width), "lora_B": (width, rank)}
    tensors: dict[str, Array] = {
        f"layers.{layer}.self_attn.q_proj.{half}": random.normal(size=shape).astype(np.float32)
        for layer in range(2)
        for half, shape in shapes.items()
    }
    write_adapter(into, LoraSpec(rank, SPEC.seed), tensors, BASE)
    moments = {f"{name}.{key}": array * 2 for name in "mv" for key, array in tensors.items()}
    write_tensors(into / OPTIMIZER_FILE, {"t": np.array(5, np.int64), **moments})


def lay_checkpoint(data_dir: Path, name: str = "half", run: str = "0123456789abcdef:train:0", **files: int) -> str:
    """Put a training checkpoint into a data folder, where a daemon that starts finds it; its `tinker://` path."""
    folders = CheckpointFolders(data_dir / "checkpoints")
    address = Address(RunId(run), CheckpointKind.TRAINING, name)
    folder = layout.new_folder(address)
    staged = folders.stage(folder)
    write_files(staged, **files)
    checkpoint = Checkpoint(
        str(address),
        address.run,
        address.kind,
        name,
        str(folder),
        BASE,
        SPEC,
        0,
        time.time(),
        None,
        {"note": "of a test"},
    )
    folders.commit(staged, checkpoint)
    return str(address)


def folder_of(data_dir: Path, path: str) -> Path:
    """The folder of a checkpoint on disk."""
    run, kind, name = path.removeprefix("tinker://").split("/")
    (folder,) = (data_dir / "checkpoints" / run / kind).glob(f"{name}--*")
    return folder


class LiveServer:
    """A server on a port of its own, while it is entered or between `start` and `stop`."""

    def __init__(
        self,
        data_dir: Path,
        key: str = KEY,
        limits: dict[str, Any] | None = None,
        tls: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        """`limits` are the daemon's settings, `tls` uvicorn's, the rest those of the server."""
        self.data_dir = data_dir
        self._key = key
        self._limits = limits or {}
        self._tls = tls or {}
        self._settings = settings
        self._port = 0
        self.h: Harness

    @property
    def url(self) -> str:
        return f"{'https' if self._tls else 'http'}://127.0.0.1:{self._port}"

    def __enter__(self) -> LiveServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        listener = socket.create_server(("127.0.0.1", self._port))
        self._port = listener.getsockname()[1]
        self._server: uvicorn.Server | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run(listener)), daemon=True)
        self._thread.start()
        while self._server is None or not self._server.started:
            assert self._thread.is_alive(), "the server has not started"
            time.sleep(0.01)

    def stop(self) -> None:
        if self._server is not None:
            self._server.should_exit = True
        self._thread.join(20)
        assert not self._thread.is_alive()

    def on_loop(self, work: Coroutine[Any, Any, T]) -> T:
        """Run something on the server's event loop, where its daemon lives."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    async def _run(self, listener: socket.socket) -> None:
        self._loop = asyncio.get_running_loop()
        self.h = await Harness(self.data_dir, **self._limits).start()
        app = create_app(self.h.daemon, server_settings(**self._settings), self._key)
        config = uvicorn.Config(
            app, log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=1, **self._tls
        )
        self._server = uvicorn.Server(config)
        with listener:
            await self._server.serve(sockets=[listener])
        await self.h.daemon.stop()
