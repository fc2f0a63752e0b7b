"""Metered use turned into hourly events: quantities, prices, and storage over parts of hours."""

from __future__ import annotations

import pytest

from openrl.daemon.billing import byte_seconds_by_hour, storage_bills, usage_events
from openrl.settings import BillingSettings
from openrl.store.usage import HOUR, Kind, ProjectStorage, Stored, Usage
from openrl.types import SessionId

START = 1_700_000_000 // HOUR * HOUR
GB = 1_000_000_000


def stored(start: float, end: float | None, size: int = 1, project: str = "p") -> Stored:
    return Stored("m", project, size, START + start, None if end is None else START + end)


@pytest.mark.parametrize(
    ("start", "end", "by_hour"),
    [
        (0, HOUR, [HOUR, 0, 0]),
        (600, 1200, [600, 0, 0]),
        (1800, 2 * HOUR + 600, [1800, HOUR, 600]),
        (-5000, None, [HOUR, HOUR, 1800]),  # it is two and a half hours later now
        (-5000, 300, [300, 0, 0]),
        (-5000, -1000, [0, 0, 0]),
        (2 * HOUR + 1800, None, [0, 0, 0]),
    ],
)
def test_storage_is_metered_to_the_second(start: float, end: float | None, by_hour: list[float]) -> None:
    now = START + 2.5 * HOUR
    assert byte_seconds_by_hour([stored(start, end)], START, now) == pytest.approx(by_hour)


def test_storage_sums_over_checkpoints() -> None:
    spans = [stored(0, 2 * HOUR, 3), stored(HOUR, HOUR + 60, 5), stored(10, None, 7)]
    expected = [3 * HOUR + 7 * (HOUR - 10), 3 * HOUR + 5 * 60 + 7 * HOUR]
    assert byte_seconds_by_hour(spans, START, START + 2 * HOUR) == pytest.approx(expected)


def test_events_are_by_hour_then_largest_first_and_priced() -> None:
    """8.8: cost is the rate times tokens / 1e6, or times gigabyte hours / 720."""
    prices = BillingSettings(price_prefill=1.0, price_sample=2.0, price_train=4.0, price_storage=0.5)
    session = SessionId("s")
    used = [
        Usage(START + HOUR, session, "p", "m", Kind.TRAIN, 1_000_000),
        Usage(START, session, "p", "m", Kind.SAMPLE, 10),
        Usage(START, session, "p", "m", Kind.PREFILL, 250_000),
        Usage(START, session, "p", "m", Kind.CHECKPOINT, 2),
        Usage(START, session, "p", "m", Kind.TRAIN_SECONDS, 3.5),
    ]
    events = usage_events(used, [stored(0, HOUR, 72 * GB)], START, START + 2 * HOUR, prices)
    assert [(event.hour - START, event.kind, event.amount) for event in events] == [
        (0, "sampling_prefill", 250_000),
        (0, "storage", 72),
        (0, "sampling_sample", 10),
        (0, "checkpoint", 2),
        (HOUR, "training", 1_000_000),
    ]
    assert [event.cost for event in events] == [0.25, pytest.approx(0.05), pytest.approx(2e-5), None, 4.0]
    assert events[1].session_id is None


def test_without_prices_everything_costs_nothing() -> None:
    events = usage_events([], [stored(0, None, GB)], START, START + HOUR, BillingSettings())
    assert [(event.rate, event.cost) for event in events] == [(0.0, 0.0)]


def test_current_storage_is_projected_to_a_month() -> None:
    bill = storage_bills([ProjectStorage("p", 2, 3 * GB)], BillingSettings(price_storage=0.1))[0]
    assert (bill.count, bill.size_bytes, bill.monthly_cost) == (2, 3 * GB, pytest.approx(0.3))
