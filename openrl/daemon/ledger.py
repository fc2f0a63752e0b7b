"""What is written down beside a result, in its commit: how much was used, and what was done to which checkpoint."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Mapping
from typing import Any

from openrl.daemon.runs import Entry, RunHandle
from openrl.daemon.timing import Timing
from openrl.daemon.work import LoadState, OptimStep, SaveState, Train, Unload
from openrl.store import audit, usage
from openrl.store.records import Sampler
from openrl.store.usage import Kind
from openrl.types import Op, SampleOutput, SamplePayload

_SAVES = frozenset({Op.SAVE_STATE, Op.SAVE_SAMPLER, Op.SAVE_EXTERNAL})


def note_result(db: sqlite3.Connection, handle: RunHandle, entry: Entry, output: object) -> None:
    """Usage and audit of one finished request of a run."""
    run = handle.run
    usage.add(db, run.session_id, run.base_model, _amounts(entry), time.time())
    event: dict[str, Any] = {"session": run.session_id, "run": run.id}
    match entry.work:
        case LoadState(path, optimizer):
            audit.write(db, "checkpoint_read", path=path, purpose="load_weights", optimizer=optimizer, **event)
        case Unload():
            audit.write(db, "run_unload", **event)
        case work if entry.op in _SAVES:
            answer: Mapping[str, Any] = output if isinstance(output, Mapping) else {}
            overwrite = isinstance(work, SaveState) and work.overwrite
            path, sampler = answer.get("path"), answer.get("sampling_session_id")
            audit.write(db, "checkpoint_create", path=path, overwrite=overwrite, sampler_id=sampler, **event)
        case _:
            pass


def _amounts(entry: Entry) -> dict[Kind, float]:
    seconds = entry.timing.watch.seconds
    if isinstance(entry.work, Train):
        return {Kind.TRAIN: entry.tokens, Kind.TRAIN_SECONDS: seconds}
    if isinstance(entry.work, OptimStep):
        return {Kind.TRAIN_SECONDS: seconds}
    return {Kind.CHECKPOINT: 1} if entry.op in _SAVES else {}


def note_sample(
    db: sqlite3.Connection, sampler: Sampler, payload: SamplePayload, output: SampleOutput, timing: Timing
) -> None:
    """Usage of one finished sample. Its prompt is computed once, however many sequences are drawn from it."""
    amounts = {
        Kind.PREFILL: len(payload.prompt),
        Kind.SAMPLE: sum(len(sequence.tokens) for sequence in output.sequences),
        Kind.SAMPLE_SECONDS: timing.watch.seconds,
    }
    usage.add(db, sampler.session_id, sampler.base_model, amounts, time.time())


def sampled_tokens(payload: SamplePayload, output: SampleOutput) -> int:
    """Tokens that a sample cost: its prompt once, and all that was drawn."""
    return len(payload.prompt) + sum(len(sequence.tokens) for sequence in output.sequences)
