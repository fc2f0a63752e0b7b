"""The record of what the devices did, and the counts of samples under way."""

from __future__ import annotations

import pytest

from openrl.daemon.device_lanes import DeviceLanes
from openrl.daemon.sample_counts import Place, SampleCounts
from openrl.types import RequestId, SessionId
from openrl.workers.messages import Kind, Span
from support.daemons import BASE
from support.wired import Wired, over_http


def span(kind: Kind, start: float, end: float, seconds: float, **sessions: float) -> Span:
    shares = {SessionId(name): amount for name, amount in sessions.items()}
    return Span(kind, start, end, seconds, seconds, 1, 1, shares)


def test_use_counts_what_began_before_in_part() -> None:
    lanes = DeviceLanes()
    lanes.add("m", (span(Kind.TRAIN, 0, 10, 8, a=8), span(Kind.SAMPLE, 10, 11, 1, a=0.25, b=0.75)))
    lanes.add("m", (span(Kind.OTHER, 20, 21, 1, b=1),))
    use = lanes.use("m", since=5)
    assert use.kinds == {Kind.TRAIN: 4, Kind.SAMPLE: 1, Kind.OTHER: 1}
    assert use.sessions[SessionId("a")] == {Kind.TRAIN: 4, Kind.SAMPLE: 0.25, Kind.OTHER: 0}
    assert use.seconds == 6
    assert lanes.use("m", since=30).seconds == 0
    assert lanes.use("nobody", since=0).seconds == 0
    assert [s.start for s in lanes.spans("m", since=10)] == [10, 20]


def test_the_record_is_bounded() -> None:
    lanes = DeviceLanes()
    for i in range(300):
        lanes.add("m", tuple(span(Kind.TRAIN, i + n / 100, i + n / 100, 0) for n in range(100)))
    assert len(lanes.spans("m", since=-1)) == 20_000


def request(session: str, number: int) -> RequestId:
    return RequestId(f"{session}:sample:0:{number}")


def test_samples_are_counted_from_acceptance_to_their_end() -> None:
    counts = SampleCounts()
    for i in range(4):
        counts.add(request("a", i), "m")
    counts.add(request("b", 0), "m")
    counts.begin(request("a", 0))
    assert counts.place(request("a", 0)) is None
    assert counts.place(request("a", 1)) == Place(2, 4, (SessionId("b"),))
    assert counts.place(request("b", 0)) == Place(2, 4, (SessionId("a"),))
    counts.again(request("a", 0))
    assert counts.place(request("a", 0)) == Place(5, 5, (SessionId("b"),))
    for i in (3, 1):
        counts.end(request("a", i))
        counts.end(request("a", i))
    counts.begin(request("a", 3))
    assert counts.sessions() == {"a": 2, "b": 1}
    for ended in (request("a", 0), request("a", 2), request("b", 0)):
        counts.end(ended)
    assert (len(counts), counts.sessions(), counts.at("m")) == (0, {}, {})


@pytest.mark.parametrize("since", ["", "?since=0", "?since=1e12"])
def test_device_lanes_over_http(since: str, tmp_path: object) -> None:
    @over_http()
    async def look(w: Wired) -> None:
        answer = await w.get(f"device_lanes{since}")
        assert answer.status_code == 200
        assert answer.json()["models"] == {BASE: []}
        assert (await w.get("device_lanes?since=yesterday")).status_code == 400
        assert (await w.get("device_lanes?since=nan")).status_code == 400

    look(tmp_path)  # type: ignore[arg-type]
