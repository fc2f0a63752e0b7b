"""Daemons over scalar workers, for tests of order, retries and recovery that need no model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np

from openrl.daemon.daemon import Daemon
from openrl.daemon.models import ModelPool
from openrl.daemon.work import (
    Finished,
    LoadState,
    NewRun,
    NewSession,
    OptimStep,
    Raw,
    SaveExternal,
    SaveSampler,
    SaveState,
    Train,
    Work,
)
from openrl.settings import DaemonSettings, EngineSettings, ServerSettings, Settings
from openrl.types import (
    AdamParams,
    Datum,
    ModelSpec,
    Op,
    RequestId,
    RunId,
    SamplePayload,
    SamplerId,
    SessionId,
    TrainPayload,
)
from openrl.wire import bodies
from support.scalar_worker import INFO, ScalarWorker

BASE = "test/scalar"


def settings(data_dir: Path, **daemon: Any) -> Settings:
    limits = {
        "session_timeout": 600.0,
        "result_ttl": 86400.0,
        "gap_timeout": 1800.0,
        "snapshot_seconds": 3600.0,
        "max_inflight_samples": 100,
        "shutdown_grace": 5.0,
        **daemon,
    }
    return Settings(
        data_dir=data_dir,
        models=(ModelSpec(BASE, "scalar", aliases=("alias/scalar",)),),
        server=ServerSettings("127.0.0.1", 0, "off", 1 << 20, 5.0),
        engine=EngineSettings("cpu", "auto", 0, 100, 8, 1000),
        daemon=DaemonSettings(**limits),
    )


class Harness:
    """A daemon that can be started, killed without a goodbye, and started again on the same folder."""

    def __init__(self, data_dir: Path, **limits: Any) -> None:
        self.settings = settings(data_dir, **limits)
        self.workers: list[ScalarWorker] = []
        self.kind: Callable[[], Any] = ScalarWorker
        self.prepare: Callable[[ScalarWorker], None] = lambda worker: None
        self.pool: ModelPool
        self.daemon: Daemon
        self.session: SessionId

    async def start(self) -> Harness:
        def new_worker(_spec: ModelSpec) -> ScalarWorker:
            worker = self.kind()
            self.prepare(worker)
            self.workers.append(worker)
            return worker

        await self._start(ModelPool(self.settings.models, new_worker, lambda spec: INFO))
        await self.pool.models[BASE].usable.wait()
        return self

    async def _start(self, pool: ModelPool) -> None:
        self.pool = pool
        self.daemon = Daemon(self.settings, pool, bodies)
        await self.daemon.start()

    @property
    def worker(self) -> ScalarWorker:
        return self.workers[-1]

    async def kill(self) -> None:
        """End the daemon as a kill would: nothing more is written. (The store thread is joined so that files close.)"""
        await self.daemon.abandon()

    async def open_run(self, number: int = 0, rank: int = 8, base_model: str = BASE) -> RunId:
        if number == 0:
            self.session = await self.daemon.create_session(NewSession("0.38.0"), None)
        new = NewRun(self.session, number, base_model, rank, 1, True, True, True, {"type": "adamw"}, {})
        done = await self.result(await self.daemon.create_run(new, Raw("application/json", b"{}")))
        assert done.error is None, done.error
        return RunId(f"{self.session}:train:{number}")

    async def result(self, request: RequestId) -> Finished:
        done = await self.daemon.wait(request, 10)
        assert isinstance(done, Finished), f"{request} is still {done}"
        return done

    async def submit(self, run: RunId, seq: int, op: Op, work: Work) -> RequestId:
        return await self.daemon.submit(run, seq, op, work, raw(run, seq, work))

    async def train(self, run: RunId, seq: int, *tokens: int) -> RequestId:
        return await self.submit(run, seq, Op.FORWARD_BACKWARD, Train(payload(*tokens), backward=True))

    async def step(self, run: RunId, seq: int) -> RequestId:
        return await self.submit(run, seq, Op.OPTIM_STEP, OptimStep(AdamParams()))

    async def save(self, run: RunId, seq: int, name: str, *, overwrite: bool = False) -> RequestId:
        return await self.submit(run, seq, Op.SAVE_STATE, SaveState(name, overwrite=overwrite))

    async def save_sampler(self, run: RunId, seq: int, number: int) -> SamplerId:
        request = await self.submit(run, seq, Op.SAVE_SAMPLER, SaveSampler(None, number))
        return SamplerId(json.loads((await self.result(request)).body)["sampling_session_id"])

    async def load(self, run: RunId, seq: int, path: str, *, optimizer: bool = True) -> RequestId:
        return await self.submit(run, seq, Op.LOAD_STATE, LoadState(path, optimizer))

    async def sample(self, sampler: SamplerId, seq: int) -> RequestId:
        prompt = SamplePayload(np.array([1, 2], np.int32))
        body = {
            "sampling_session_id": sampler,
            "seq_id": seq,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]},
        }
        return await self.daemon.submit_sample(sampler, seq, prompt, Raw("application/json", json.dumps(body).encode()))

    async def weight(self, request: RequestId) -> float:
        """The weight that an `optim_step` left."""
        done = await self.result(request)
        assert done.error is None, done.error
        return json.loads(done.body)["metrics"]["weight:sum"]


def payload(*tokens: int) -> TrainPayload:
    array = np.array(tokens, np.int32)
    return TrainPayload((Datum(array, {"target_tokens": array.astype(np.int64)}),), "cross_entropy")


def raw(run: RunId, seq: int, work: Work) -> Raw:
    """A JSON body that decodes to `work` again, as older SDKs send it."""
    fields: dict[str, Any] = {"model_id": run, "seq_id": seq}
    match work:
        case Train(payload=content):
            data = [
                {
                    "model_input": {"chunks": [{"tokens": datum.tokens.tolist()}]},
                    "loss_fn_inputs": {
                        "target_tokens": {"data": datum.tokens.tolist(), "dtype": "int64", "shape": [len(datum.tokens)]}
                    },
                }
                for datum in content.data
            ]
            fields["forward_backward_input"] = {"data": data, "loss_fn": content.loss_fn}
        case OptimStep():
            fields["adam_params"] = {}
        case SaveState(name=name):
            fields["path"] = name
        case SaveSampler(name=name, sampler_seq=number):
            fields |= {"path": name} if name is not None else {"sampling_session_seq_id": number}
        case SaveExternal(name=name, ttl_seconds=ttl, recipients=recipients):
            fields |= {"path": name, "ttl_seconds": ttl, "age_encryption_recipients": list(recipients)}
        case LoadState(path=path, optimizer=optimizer):
            fields |= {"path": path, "optimizer": optimizer}
        case _:
            pass
    return Raw("application/json", json.dumps(fields).encode())


def expected_weight(*gradients: int) -> int:
    """What the scalar model's weight must be after steps with these gradients, in this order."""
    weight = 1
    for gradient in gradients:
        weight = weight * 2 + gradient
    return weight


def scenario(test: Callable[[Harness], Awaitable[None]], seconds: float = 30) -> Callable[[Path], None]:
    """Run an async test over a fresh daemon, and stop the daemon whatever happens."""

    def run(tmp_path: Path) -> None:
        async def main() -> None:
            harness = await Harness(tmp_path).start()
            try:
                await asyncio.wait_for(test(harness), seconds)
            finally:
                await harness.daemon.stop()

        asyncio.run(main())

    run.__name__ = test.__name__
    run.__doc__ = test.__doc__
    return run
