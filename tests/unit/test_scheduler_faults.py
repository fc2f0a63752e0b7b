"""A bug of ours in the middle of a batch: those who wait for it hear so, once, and what comes next is neither skipped
nor run twice."""

from __future__ import annotations

import logging

import pytest

from openrl.workers import messages
from openrl.workers.messages import WorkerOp
from support.daemons import expected_weight
from support.wired import Wired, over_http


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)


@over_http()
async def test_an_unforeseen_error_fails_its_request_alone(w: Wired) -> None:
    """O9: the next ones, which have arrived meanwhile, run as usual."""
    run = await w.open_run()
    faults: list[WorkerOp] = []

    def fault(op: WorkerOp) -> bool:
        if isinstance(op, messages.TrainPass) and not faults:
            faults.append(op)
            raise ZeroDivisionError("a bug")
        return False

    w.h.worker.die_on = fault
    requests = [await w.train(run, seq, seq) for seq in (1, 2, 3)]
    step = await w.step(run, 4)
    failed = (await w.result(requests[0])).json()
    assert failed["category"] == "server"
    assert "ZeroDivisionError" in failed["error"]
    assert await w.weight(step) == expected_weight(2 + 3)
    assert [(await w.result(request)).status_code for request in requests] == [200, 200, 200]
    assert len(faults) == 1
    passes = [op for op in w.h.worker.calls if isinstance(op, messages.TrainPass)]
    assert len(passes) == 3
