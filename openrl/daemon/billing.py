"""Metered use turned into hourly events with prices: pure functions of what the store has."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import accumulate

from openrl.daemon.work import DeviceUse, StorageBill, UsageEvent
from openrl.settings import BillingSettings
from openrl.store.usage import HOUR, Kind, ProjectStorage, Stored, Usage

GIGABYTE = 1e9
MONTH_HOURS = 720

_TYPES = {
    Kind.TRAIN: "training",
    Kind.PREFILL: "sampling_prefill",
    Kind.SAMPLE: "sampling_sample",
    Kind.CHECKPOINT: "checkpoint",
}
_ACTIVITIES = {Kind.TRAIN_SECONDS: "training", Kind.SAMPLE_SECONDS: "sampling"}


def usage_events(
    used: Iterable[Usage], stored: Iterable[Stored], start: int, end: float, prices: BillingSettings
) -> list[UsageEvent]:
    """Events of the hours in [start, end), by hour, then the largest amount first (8.8). `end` is not in the future."""
    events = [_event(row, prices) for row in used if row.kind in _TYPES]
    events += _storage_events(stored, start, end, prices.price_storage)
    return sorted(events, key=lambda event: (event.hour, -event.amount))


def device_use(used: Iterable[Usage]) -> list[DeviceUse]:
    return [
        DeviceUse(row.hour, _ACTIVITIES[row.kind], row.amount, row.base_model, row.session_id)
        for row in used
        if row.kind in _ACTIVITIES
    ]


def storage_bills(stored: Iterable[ProjectStorage], prices: BillingSettings) -> list[StorageBill]:
    return [
        StorageBill(row.project_id, row.count, row.size_bytes, _monthly(row.size_bytes, prices), row.owner)
        for row in stored
    ]


def _monthly(size_bytes: int, prices: BillingSettings) -> float:
    return size_bytes / GIGABYTE * prices.price_storage


def _event(row: Usage, prices: BillingSettings) -> UsageEvent:
    rates = {Kind.TRAIN: prices.price_train, Kind.PREFILL: prices.price_prefill, Kind.SAMPLE: prices.price_sample}
    rate = rates.get(row.kind)
    return UsageEvent(
        hour=row.hour,
        kind=_TYPES[row.kind],
        amount=row.amount,
        base_model=row.base_model,
        project_id=row.project_id,
        session_id=row.session_id,
        rate=rate,
        cost=None if rate is None else rate * row.amount / 1e6,
        owner=row.owner,
    )


def _storage_events(stored: Iterable[Stored], start: int, end: float, rate: float) -> Iterator[UsageEvent]:
    groups: dict[tuple[str, str, str], list[Stored]] = defaultdict(list)
    for span in stored:
        groups[span.project_id, span.base_model, span.owner].append(span)
    for (project, base_model, owner), spans in groups.items():
        for index, byte_seconds in enumerate(byte_seconds_by_hour(spans, start, end)):
            if byte_seconds > 0:
                hours = byte_seconds / GIGABYTE / HOUR
                cost = rate * hours / MONTH_HOURS
                hour = start + index * HOUR
                yield UsageEvent(hour, "storage", hours, base_model, project, rate=rate, cost=cost, owner=owner)


def byte_seconds_by_hour(spans: Iterable[Stored], start: int, end: float) -> list[float]:
    """Bytes times seconds stored in each hour from `start` up to `end`: whole hours of a span are one entry in a list
    of differences, so that the work grows with the spans and not with their length."""
    count = max(0, -int(-(end - start) // HOUR))
    steps, parts = [0.0] * (count + 1), [0.0] * (count + 1)
    for span in spans:
        begin, stop = max(span.from_at, start) - start, min(end if span.to_at is None else span.to_at, end) - start
        if stop <= begin:
            continue
        first, last = int(begin // HOUR), int(stop // HOUR)
        steps[first] += span.size_bytes * HOUR
        steps[last] -= span.size_bytes * HOUR
        parts[first] -= span.size_bytes * (begin - first * HOUR)
        parts[last] += span.size_bytes * (stop - last * HOUR)
    return [whole + part for whole, part in zip(accumulate(steps), parts, strict=True)][:count]
