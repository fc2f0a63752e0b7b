"""Ending in order within a stated time: running batches end, runs are written down, workers go.

Whatever does not fit into the time is left to the journal, exactly as after a kill: it costs a replay, never work.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress

from openrl.daemon.models import ModelPool
from openrl.daemon.recovery import Recovery
from openrl.daemon.runs import Runs
from openrl.daemon.samplers import Sampling
from openrl.daemon.scheduler import Scheduler
from openrl.errors import OpenRLError

log = logging.getLogger(__name__)

_DRAIN = 0.5  # of the time, for the batches under way; runs are written down in the rest
_CLOSE_SECONDS = 2.0  # of it, kept for the workers' own end


async def wind_down(
    sampling: Sampling, scheduler: Scheduler, runs: Runs, recovery: Recovery, pool: ModelPool, seconds: float
) -> None:
    """Leave nothing on a device, in at most about `seconds`."""
    end = time.monotonic() + seconds
    await sampling.stop()
    await scheduler.stop(seconds * _DRAIN)
    await _suspend_all(runs, recovery, end - time.monotonic() - min(_CLOSE_SECONDS, seconds / 4))
    await pool.close(max(0.0, end - time.monotonic()))


async def _suspend_all(runs: Runs, recovery: Recovery, seconds: float) -> None:
    """Write down every run, longest idle last: what was used a moment ago has most to lose by a replay."""
    handles = sorted(runs.all(), key=lambda handle: handle.served, reverse=True)
    with suppress(TimeoutError):
        async with asyncio.timeout(max(0.0, seconds)):
            for handle in handles:
                try:
                    await recovery.suspend(handle)
                except (OpenRLError, OSError) as error:  # the journal still has what the snapshot would have held
                    log.warning("run %s could not be written down: %s", handle.id, error)
    left = [handle.id for handle in handles if handle.worker is not None and handle.dirty]
    if left:
        log.warning("the next start will replay what the snapshots lack of %s", ", ".join(left))
