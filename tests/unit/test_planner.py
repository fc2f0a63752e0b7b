"""What goes to which device next."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openrl.daemon.planner import TRAIN, Batch, Device, Ready, Underway, cost, order, plan
from openrl.shares import Account, Shares
from openrl.types import Op, RequestId, RunId, SessionId

OPS = [Op.FORWARD, Op.FORWARD_BACKWARD, Op.OPTIM_STEP, Op.SAVE_STATE]


def ready(
    run: str,
    op: Op = Op.FORWARD_BACKWARD,
    *,
    session: str = "s",
    tokens: int = 10,
    model: str = "m",
    served: int = 0,
    alone: bool = False,
) -> Ready:
    return Ready(RunId(run), SessionId(session), RequestId(f"{run}:1"), op, tokens, model, served, alone)


def device(*underway: Underway, model: str = "m", **counters: float) -> Device:
    """With accounts of sessions "s" and "t", unless others are given."""
    counters = {"s": 0.0, "t": 0.0} | counters
    return Device(model, {SessionId(name): Account(counter) for name, counter in counters.items()}, underway)


def underway(*sessions: str, long: bool = False, alone: bool = False) -> Underway:
    return Underway(frozenset(map(SessionId, sessions)), long, alone)


def runs(batch: Batch) -> list[str]:
    return [str(member.run) for member in batch.members]


heads = st.lists(
    st.builds(
        Ready,
        run=st.integers(0, 1_000_000).map(lambda n: RunId(f"r{n}")),
        session=st.sampled_from("stuv").map(SessionId),
        request=st.just(RequestId("x")),
        op=st.sampled_from(OPS),
        tokens=st.integers(0, 200),
        model=st.sampled_from(["a", "b"]),
        served=st.integers(0, 50),
        alone=st.booleans(),
    ),
    unique_by=lambda r: r.run,
    max_size=20,
)
accounts = st.fixed_dictionaries(
    {SessionId(name): st.builds(Account, st.floats(0, 500), st.sampled_from([0.5, 1.0, 3.0])) for name in "stuv"}
)
in_hand = st.lists(
    st.builds(Underway, st.sets(st.sampled_from("stuv").map(SessionId), min_size=1).map(frozenset), st.booleans()),
    max_size=3,
).map(tuple)
devices = st.lists(
    st.builds(Device, st.sampled_from(["a", "b"]), accounts, in_hand), unique_by=lambda d: d.model, max_size=2
)


@given(heads, devices, st.integers(1, 300))
def test_properties_of_a_plan(found: list[Ready], devices: list[Device], budget: int) -> None:
    batches = plan(found, devices, budget)
    assert len({batch.model for batch in batches}) == len(batches)
    for batch in batches:
        mine = [r for r in found if r.model == batch.model]
        (device,) = [d for d in devices if d.model == batch.model]
        assert set(batch.members) <= set(mine)
        assert len({member.run for member in batch.members}) == len(batch.members), "one request of a run"
        assert all(u.long and not u.alone for u in device.underway), "whoever waits for something short joins it"
        assert not batch.underway.alone or not device.underway
        assert batch.underway.sessions.isdisjoint(s for u in device.underway for s in u.sessions)
        if len(batch.members) > 1:
            kinds = {member.op in TRAIN or member.op for member in batch.members}
            assert kinds in ({True}, {Op.OPTIM_STEP})
            assert not any(member.alone for member in batch.members)
            assert sum(m.tokens for m in batch.members) <= budget
    idle = {d.model for d in devices if not d.underway}
    assert {r.model for r in found} & idle <= {b.model for b in batches}, "no idle device is left without work"


def test_the_session_that_was_served_least_goes_first() -> None:
    found = [ready("a", tokens=90), ready("b", session="t", tokens=90)]
    (batch,) = plan(found, [device(s=5, t=4)], 100)
    assert runs(batch) == ["b"]
    (batch,) = plan(found, [device(s=4, t=5)], 100)
    assert runs(batch) == ["a"]


def test_among_a_sessions_runs_the_one_served_longest_ago_goes_first() -> None:
    (batch,) = plan([ready("a", tokens=90, served=5), ready("b", tokens=90, served=3)], [device()], 100)
    assert runs(batch) == ["b"]


def test_training_of_other_runs_joins_whatever_their_session() -> None:
    found = [ready("a"), ready("b", Op.FORWARD, session="t"), ready("c"), ready("d", Op.SAVE_STATE)]
    (batch,) = plan([r for r in found if r.op in TRAIN], [device()], 100)
    assert sorted(runs(batch)) == ["a", "b", "c"]


def test_sessions_take_turns_within_a_joined_pass() -> None:
    """Eight runs of one session fill no pass that another session's run would fit into."""
    many = [ready(f"s{i}", tokens=40) for i in range(8)]
    (batch,) = plan([*many, ready("t", session="t", tokens=40)], [device()], 100)
    assert sorted(member.session for member in batch.members) == ["s", "t"]


def test_what_a_request_costs() -> None:
    """With a backward as much again as a forward; a short pass counts as a thirty-second of the budget."""
    assert cost(ready("a", Op.FORWARD, tokens=50), 320) == 50
    assert cost(ready("a", tokens=50), 320) == 100
    assert cost(ready("a", tokens=1), 320) == 10
    assert cost(ready("a", Op.OPTIM_STEP, tokens=0), 320) == 0


def test_what_does_not_fit_is_not_overtaken_for_ever() -> None:
    """Passes of a session that is ahead fill up a pass only as long as it is not far ahead."""
    found = [ready("a"), ready("b", session="t", tokens=200), ready("c", session="u", tokens=20)]
    assert runs(plan(found, [device(s=0, t=1, u=50)], 100)[0]) == ["a", "c"]
    assert runs(plan(found, [device(s=0, t=1, u=102)], 100)[0]) == ["a"]


def test_short_work_goes_before_passes_so_that_the_next_passes_join() -> None:
    """A run's step takes little; after it, the run's next pass can go with the others'."""
    found = [ready("a", session="s"), ready("b", Op.OPTIM_STEP, session="t", tokens=0)]
    (batch,) = plan(found, [device(s=0, t=50)], 100)
    assert runs(batch) == ["b"]
    (batch,) = plan(found, [device(s=0, t=101)], 100)
    assert runs(batch) == ["a"], "but a session that is far ahead has no head start"


def test_short_work_of_one_run_does_not_starve_passes_of_its_session() -> None:
    found = [ready("a", served=0), ready("b", Op.OPTIM_STEP, tokens=0, served=20)]
    assert runs(plan(found, [device()], 100)[0]) == ["b"]
    found = [ready("a", served=0), ready("b", Op.OPTIM_STEP, tokens=0, served=200)]
    assert runs(plan(found, [device()], 100)[0]) == ["a"]


def test_steps_of_several_runs_go_together() -> None:
    steps = [ready(f"r{i}", Op.OPTIM_STEP, tokens=0) for i in range(40)]
    (batch,) = plan([*steps, ready("save", Op.SAVE_STATE, tokens=0, served=1)], [device()], 100)
    assert len(batch.members) == 16
    assert {member.op for member in batch.members} == {Op.OPTIM_STEP}


def test_one_request_may_exceed_the_budget() -> None:
    (batch,) = plan([ready("a", tokens=1000), ready("b", tokens=1, served=1)], [device()], 100)
    assert (runs(batch), batch.long) == (["a"], True)


@pytest.mark.parametrize(
    ("hand", "expected"),
    [
        ([underway("s")], []),
        ([underway("s", long=True)], ["b"]),
        ([underway("s", long=True), underway("u")], []),
        ([underway("s", long=True, alone=True)], []),
        ([underway("t", long=True)], ["a"]),
    ],
    ids=["short", "long", "long and short", "alone", "own"],
)
def test_beside_a_long_pass_other_sessions_go_on(hand: list[Underway], expected: list[str]) -> None:
    found = [ready("a", session="s"), ready("b", session="t", served=1)]
    assert [run for batch in plan(found, [device(*hand, u=0.0)], 100) for run in runs(batch)] == expected


def test_not_more_than_a_few_long_passes_at_a_time() -> None:
    long = [underway(f"x{i}", long=True) for i in range(4)]
    assert plan([ready("a", tokens=1000)], [device(*long)], 100) == []
    assert len(plan([ready("a", tokens=100)], [device(*long)], 100)) == 1


def test_a_suspect_goes_when_nothing_else_is_in_hand() -> None:
    """What was in hand when a worker died takes nobody with it a second time."""
    found = [ready("a", alone=True), ready("b", served=1)]
    assert plan(found[:1], [device(underway("t", long=True))], 100) == []
    assert runs(plan(found, [device()], 100)[0]) == ["a"]


def test_the_order_is_that_of_the_turns() -> None:
    found = [ready("a1", tokens=50), ready("a2", tokens=50, served=1), ready("b1", session="t", tokens=10)]
    assert [head.run for head in order(found, device(), 100)] == ["a1", "b1", "a2"]
    assert [head.run for head in order(found, device(s=5), 100)] == ["b1", "a1", "a2"]


# ---- over time ----


class Device1:
    """A device that does one batch after the other, and the sessions' runs that use it."""

    def __init__(self, sessions: dict[str, list[list[int]]], budget: int) -> None:
        """`sessions`: for each, for each of its runs, the tokens of its passes, over and over."""
        self.shares = Shares()
        self.budget = budget
        self.sessions = sessions
        self.served: dict[str, int] = {}
        self.passes: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
        self.turn = 0

    def head(self, session: str, number: int) -> Ready:
        run = f"{session}{number}"
        sizes = self.sessions[session][number]
        tokens = sizes[self.passes[run] % len(sizes)]
        return ready(run, session=session, tokens=tokens, served=self.served.get(run, 0))

    def step(self) -> Batch:
        self.shares.sync({SessionId(session): 1.0 for session in self.sessions})
        found = [self.head(session, i) for session, own in self.sessions.items() for i in range(len(own))]
        (batch,) = plan(found, [Device("m", self.shares.accounts())], self.budget)
        self.turn += 1
        for member in batch.members:
            self.shares.serve(member.session, cost(member, self.budget))
            self.passes[member.run] += 1
            self.served[member.run] = self.turn
            self.tokens[member.session] += member.tokens
        return batch


BUDGET = 100
large = st.lists(st.integers(BUDGET // 2, 4 * BUDGET), min_size=1, max_size=4)
session_runs = st.lists(large, min_size=1, max_size=8)


@settings(deadline=None, max_examples=40)
@given(st.dictionaries(st.sampled_from("abcd"), session_runs, min_size=2), st.booleans())
def test_sessions_that_always_train_get_equal_tokens(sessions: dict[str, list[list[int]]], tiny: bool) -> None:
    """Whatever their numbers of runs and the sizes of their passes, and also beside a session of tiny passes, which
    asks for less than its share and is in every batch: they are apart by a largest request and what fills up others'
    passes."""
    device = Device1(sessions | ({"tiny": [[1], [2]]} if tiny else {}), BUDGET)
    for _ in range(120):
        device.step()
    largest = max(size for own in sessions.values() for run in own for size in run)
    tokens = [device.tokens[session] for session in sessions]
    assert max(tokens) - min(tokens) <= largest + 2 * BUDGET
    assert min(tokens) > 0


def test_a_flood_of_runs_is_one_share() -> None:
    device = Device1({"many": [[90]] * 8, "one": [[90]]}, 100)
    for _ in range(100):
        device.step()
    assert device.tokens["many"] == device.tokens["one"]


def test_equal_runs_of_equal_sessions_keep_joining() -> None:
    """Eight small runs of eight sessions: every pass takes all of them."""
    device = Device1({f"x{i}": [[10]] for i in range(8)}, 100)
    assert all(len(device.step().members) == 8 for _ in range(20))


def test_a_plan_for_many_runs_is_quick() -> None:
    """Work for 2,000 runs grows with their number, not with its square: counted in comparisons."""
    rng = random.Random(0)
    found = [
        ready(f"r{i}", session=f"x{i % 50}", tokens=rng.randint(1, 5), served=rng.randint(0, 99)) for i in range(2000)
    ]
    counters = {f"x{i}": float(i) for i in range(50)}
    (batch,) = plan(found, [device(**counters)], 100)
    assert sum(member.tokens for member in batch.members) == 100
