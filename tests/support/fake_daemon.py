"""A daemon without queues, store or workers: it checks and answers at once, with canned numbers.

`held` keeps requests pending until `release`, `errors` makes the next call of a method raise, `submitted` records what
the HTTP layer handed over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from openrl.daemon.checks import check_new_run, spec_of
from openrl.daemon.daemon import Daemon
from openrl.daemon.work import (
    Finished,
    LoadState,
    ModelStatus,
    NewRun,
    NewSession,
    OptimStep,
    Pending,
    Raw,
    SaveSampler,
    SaveState,
    Train,
    Unload,
    Work,
)
from openrl.errors import BadRequest, Gone, NotFound, OpenRLError
from openrl.keys.principal import LOCAL_OWNER
from openrl.keys.ring import Keyring
from openrl.settings import ServerSettings
from openrl.store.records import Checkpoint, Completion, Run, RunState, RunSummary, Sampler
from openrl.types import (
    CheckpointKind,
    LoraSpec,
    ModelInfo,
    Op,
    OptimOutput,
    RequestId,
    RunId,
    SampledSequence,
    SampleOutput,
    SamplePayload,
    SamplerId,
    SessionId,
    TrainOutput,
    TrainSpec,
)
from openrl.validation import check_sample, check_train
from openrl.wire.bodies import decode_sample, decode_work, encode_result

INFO = ModelInfo(vocab_size=1000, max_context=256, max_lora_rank=64, parameters=1_000_000, family="llama")
MODEL = "org/tiny"
LOGPROB = -0.5  # of every token


def server_settings(**changes: Any) -> ServerSettings:
    values: dict[str, Any] = {
        "host": "127.0.0.1",
        "port": 8000,
        "auth": "key",
        "max_body_bytes": 1 << 20,
        "long_poll_seconds": 0.05,
    }
    return ServerSettings(**(values | changes))


@dataclass(frozen=True)
class Submitted:
    run: RunId
    seq: int
    op: Op
    work: Work | OpenRLError
    raw: Raw


class FakeRecords:
    """The read side, as far as routes are tested without a store."""

    def __init__(self, daemon: FakeDaemon) -> None:
        self._daemon = daemon

    async def run(self, run: RunId) -> RunSummary:
        return RunSummary(self._daemon.run(run), None, None)


class FakeClients:
    """Samples end in the order in which they are submitted; their place in it is the cursor."""

    def __init__(self, daemon: FakeDaemon) -> None:
        self._daemon = daemon
        self.ended: list[tuple[SamplerId, int, Completion]] = []
        self.seen: list[RequestId] = []
        self.cancelled: list[RequestId] = []
        self._joined = 0

    def end(self, sampler: SamplerId, seq: int, request: RequestId) -> None:
        self.ended.append((sampler, seq, Completion(len(self.ended) + 1, request, False, 1)))

    async def join(self, sampler: SamplerId) -> int:
        self._daemon.sampler(sampler)
        self._joined += 1
        return self._joined

    async def cancel(self, request: RequestId) -> None:
        self.cancelled.append(request)

    async def retrieved(self, sampler: SamplerId, requests: list[RequestId]) -> None:
        self._daemon.sampler(sampler)
        self.seen += requests

    async def completions(self, sampler: SamplerId, clone: int, after: int, timeout: float) -> list[Completion]:
        deadline = asyncio.get_running_loop().time() + timeout
        while True:
            mine = [done for name, seq, done in self.ended if (name, seq // 10**9) == (sampler, clone)]
            news = [done for done in mine if done.number > after]
            if news or asyncio.get_running_loop().time() >= deadline:
                return news
            await asyncio.sleep(0.005)


class FakeLosses:
    """A backend without custom losses."""

    served = False


class FakeKeys:
    """Keys that are only held."""

    def __init__(self) -> None:
        self.ring = Keyring()


class FakeDaemon:
    def __init__(self) -> None:
        self.keys = FakeKeys()
        self.losses = FakeLosses()
        self.rest = FakeRecords(self)
        self.clients = FakeClients(self)
        self.sessions: dict[SessionId, str] = {}
        self.created: list[NewSession] = []
        self.runs: dict[RunId, Run] = {}
        self.samplers: dict[SamplerId, Sampler] = {}
        self.checkpoints: dict[str, Checkpoint] = {}
        self.results: dict[RequestId, Finished] = {}
        self.submitted: list[Submitted] = []
        self.new_runs: list[NewRun] = []
        self.samples: list[tuple[SamplerId, int, SamplePayload]] = []
        self.loads: list[tuple[Any, ...]] = []
        self.held: set[RequestId] = set()
        self.waiting = 0
        self.errors: dict[str, Exception] = {}

    @property
    def as_daemon(self) -> Daemon:
        return cast("Daemon", self)

    def _fail(self, method: str) -> None:
        if method in self.errors:
            raise self.errors[method]

    def owner_of(self, identity: str) -> str:
        return LOCAL_OWNER

    # -- sessions --

    async def create_session(self, new: NewSession, idempotency_key: str | None) -> SessionId:
        self._fail("create_session")
        self.created.append(new)
        session = SessionId(f"s{len(self.sessions)}")
        self.sessions[session] = "active"
        return session

    async def heartbeat(self, session: SessionId) -> None:
        if session not in self.sessions:
            raise NotFound(f"session {session!r} is unknown")
        if self.sessions[session] != "active":
            raise Gone(f"session {session!r} is finished")

    async def finish_session(self, session: SessionId, reason: str, detail: str | None) -> None:
        if session not in self.sessions:
            raise NotFound(f"session {session!r} is unknown")
        self.sessions[session] = reason

    # -- models and runs --

    def models(self) -> list[ModelStatus]:
        return [
            ModelStatus(MODEL, None, "ready", "", INFO, MODEL),
            ModelStatus("org/later", None, "preparing", "unpacking", None, "org/later"),
        ]

    def add_run(self, run: RunId, spec: TrainSpec | None = None, metadata: Mapping[str, Any] | None = None) -> RunId:
        session = SessionId(run.split(":")[0])
        spec = spec or LoraSpec(rank=8, seed=0)
        self.runs[run] = Run(run, session, MODEL, spec, RunState.LIVE, metadata or {}, 1.7e9, 1.7e9)
        return run

    async def create_run(self, new: NewRun, raw: Raw) -> RequestId:
        self._fail("create_run")
        if new.session_id not in self.sessions:
            raise NotFound(f"session {new.session_id!r} is unknown")
        if new.base_model != MODEL:
            raise BadRequest(f"base_model {new.base_model!r} is not served; legal: {MODEL}")
        self.new_runs.append(new)
        run = RunId(f"{new.session_id}:train:{new.model_seq_id}")
        request = RequestId(f"create-{run}")
        spec = spec_of(new, new.seed or 0)
        if (refused := check_new_run(new, spec, INFO)) is not None:
            return self._end(request, refused)
        self.add_run(run, spec, new.user_metadata)
        return self._finish(request, Op.CREATE_RUN, {"model_id": run})

    def run(self, run: RunId) -> Run:
        if run not in self.runs:
            raise NotFound(f"model_id {run!r} is unknown")
        return self.runs[run]

    async def load_run(
        self,
        session: SessionId,
        model_seq_id: int,
        load: LoadState,
        base_model: str | None,
        user_metadata: Mapping[str, Any],
        raw: Raw,
    ) -> RequestId:
        self.loads.append((session, model_seq_id, load, base_model, user_metadata))
        run = self.add_run(RunId(f"{session}:train:{model_seq_id}"))
        return self._finish(RequestId(f"load-{run}"), Op.LOAD_STATE, {"path": load.path, "model_id": run})

    async def submit(self, run: RunId, seq: int, op: Op, work: Work | OpenRLError, raw: Raw) -> RequestId:
        self._fail("submit")
        self.run(run)
        if seq < 1:
            raise BadRequest(f"seq_id must be at least 1, got {seq}")
        request = RequestId(f"{run}-{seq}")
        if request in self.results or request in self.held:
            return request
        self.submitted.append(Submitted(run, seq, op, work, raw))
        if isinstance(work, OpenRLError):
            return self._end(request, work)
        if raw.body:  # stored bodies mean the same after a restart
            _same_work(decode_work(op, raw.content_type, raw.body), work)
        try:
            return self._finish(request, op, self._work(run, work))
        except OpenRLError as error:
            return self._end(request, error)

    async def unload(self, run: RunId, raw: Raw) -> RequestId:
        self.run(run)
        return self._finish(RequestId(f"{run}-unload"), Op.UNLOAD, {"model_id": run})

    def _work(self, run: RunId, work: Work) -> object:
        match work:
            case Train(payload=payload):
                check_train(payload, INFO)
                shapes = [datum.inputs["target_tokens"].shape for datum in payload.data]
                logprobs = tuple(np.full(shape, LOGPROB, np.float32) for shape in shapes)
                return TrainOutput(logprobs, {"loss:sum": 0.5 * sum(array.size for array in logprobs)})
            case OptimStep():
                return OptimOutput({"grad_norm:mean": 1.25, "lr:mean": work.adam.learning_rate})
            case SaveState(name=name):
                return {"path": self._save(run, CheckpointKind.TRAINING, name)}
            case SaveSampler(name=None):
                session = self.runs[run].session_id
                return {"sampling_session_id": self._sampler(session, work.sampler_seq or 0, MODEL, None)}
            case SaveSampler(name=name):
                return {"path": self._save(run, CheckpointKind.SAMPLER, cast("str", name))}
            case LoadState(path=path):
                return {"path": path, "model_id": run}
            case Unload():
                return {"model_id": run}

    def _save(self, run: RunId, kind: CheckpointKind, name: str) -> str:
        path = f"tinker://{run}/{kind.value}/{name}"
        spec = self.runs[run].spec
        self.checkpoints[path] = Checkpoint(path, run, kind, name, "x", MODEL, spec, 10, 1.7e9, None, {})
        return path

    # -- samplers --

    async def create_sampler(
        self, session: SessionId, seq: int, base_model: str | None, model_path: str | None
    ) -> SamplerId:
        if model_path is not None and model_path not in self.checkpoints:
            raise NotFound(f"model_path {model_path!r} is unknown")
        return self._sampler(session, seq, base_model or MODEL, model_path)

    def _sampler(self, session: SessionId, seq: int, base_model: str, model_path: str | None) -> SamplerId:
        sampler = SamplerId(f"{session}:sample:{seq}")
        self.samplers[sampler] = Sampler(sampler, session, base_model, model_path, None, 1.7e9)
        return sampler

    def sampler(self, sampler: SamplerId) -> Sampler:
        if sampler not in self.samplers:
            raise NotFound(f"sampler {sampler!r} is unknown")
        return self.samplers[sampler]

    async def submit_sample(self, sampler: SamplerId, seq: int, payload: SamplePayload, raw: Raw) -> RequestId:
        self._fail("submit_sample")
        self.sampler(sampler)
        check_sample(payload, INFO)
        assert decode_sample(raw.content_type, raw.body).params == payload.params
        self.samples.append((sampler, seq, payload))
        request = self._finish(RequestId(f"{sampler}-{seq}"), Op.SAMPLE, _sample(payload))
        self.clients.end(sampler, seq, request)
        return request

    # -- futures --

    def hold(self, request: RequestId) -> RequestId:
        """A request that stays pending until it is released."""
        self.held.add(request)
        return request

    def release(self, request: RequestId, output: object, op: Op = Op.OPTIM_STEP) -> None:
        self.held.remove(request)
        self._finish(request, op, output)

    def _finish(self, request: RequestId, op: Op, output: object) -> RequestId:
        self.results[request] = Finished(*encode_result(op, output))
        return request

    def _end(self, request: RequestId, error: OpenRLError) -> RequestId:
        self.results[request] = Finished("", b"", error=str(error), category=error.category)
        return request

    async def wait(self, request: RequestId, timeout: float) -> Finished | Pending:
        self._fail("wait")
        if request not in self.results and request not in self.held:
            raise Gone(f"request {request!r} is unknown or expired")
        self.waiting += 1
        try:
            deadline = asyncio.get_running_loop().time() + timeout
            while request in self.held and asyncio.get_running_loop().time() < deadline:
                await asyncio.sleep(0.005)
        finally:
            self.waiting -= 1
        return self.results[request] if request in self.results else Pending("paused_capacity", "loading org/tiny")

    async def checkpoint(self, path: str) -> Checkpoint:
        if path not in self.checkpoints:
            raise NotFound(f"checkpoint {path!r} is unknown")
        return self.checkpoints[path]

    def status(self) -> dict[str, Any]:
        return {"models": [model.name for model in self.models()], "runs": len(self.runs)}


def _sample(payload: SamplePayload) -> SampleOutput:
    """The prompt's last token, counting up, as many times as asked (at most 4)."""
    count = min(payload.params.max_tokens or 4, 4)
    tokens = (int(payload.prompt[-1]) + 1 + np.arange(count)).astype(np.int32)
    sequence = SampledSequence(tokens, np.full(count, LOGPROB, np.float32), "length")
    prompt = None
    if payload.prompt_logprobs:
        prompt = np.full(len(payload.prompt), LOGPROB, np.float32)
        prompt[0] = np.nan
    return SampleOutput((sequence,) * payload.num_samples, prompt)


def _same_work(again: Work, work: Work) -> None:
    if not isinstance(work, Train):
        assert again == work
        return
    assert isinstance(again, Train)
    assert again.backward == work.backward
    assert again.payload.loss_fn == work.payload.loss_fn
    for one, other in zip(again.payload.data, work.payload.data, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        assert one.inputs.keys() == other.inputs.keys()
