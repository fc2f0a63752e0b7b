"""What goes to which device next."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from openrl.daemon.planner import Ready, plan
from openrl.types import Op, RequestId, RunId

OPS = [Op.FORWARD, Op.FORWARD_BACKWARD, Op.OPTIM_STEP, Op.SAVE_STATE]


def ready(run: str, op: Op = Op.FORWARD_BACKWARD, *, tokens: int = 10, model: str = "m", served: int = 0) -> Ready:
    return Ready(RunId(run), RequestId(f"{run}:1"), op, tokens, model, served)


heads = st.lists(
    st.builds(
        Ready,
        run=st.integers(0, 1_000_000).map(lambda n: RunId(f"r{n}")),
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


@given(heads, st.sets(st.sampled_from(["a", "b"])), st.integers(1, 300))
def test_properties_of_a_plan(found: list[Ready], idle: set[str], budget: int) -> None:
    batches = plan(found, idle, budget)
    assert len({batch.model for batch in batches}) == len(batches)
    for batch in batches:
        mine = [r for r in found if r.model == batch.model]
        assert batch.model in idle
        assert set(batch.members) <= set(mine)
        assert batch.members[0].served == min(r.served for r in mine), "the longest waiting goes first"
        assert len({member.run for member in batch.members}) == len(batch.members), "one request of a run"
        if len(batch.members) > 1:
            assert all(m.op in (Op.FORWARD, Op.FORWARD_BACKWARD) and not m.alone for m in batch.members)
            assert sum(m.tokens for m in batch.members) <= budget
    assert {b.model for b in batches} == {r.model for r in found} & idle, "no idle device is left without work"


def test_training_of_other_runs_joins() -> None:
    (batch,) = plan([ready("a"), ready("b", Op.FORWARD), ready("c", Op.OPTIM_STEP)], ["m"], 100)
    assert [member.run for member in batch.members] == ["a", "b"]


def test_a_step_goes_alone_when_its_turn_comes() -> None:
    (batch,) = plan([ready("a", served=3), ready("c", Op.OPTIM_STEP, served=1)], ["m"], 100)
    assert [member.run for member in batch.members] == ["c"]


def test_one_request_may_exceed_the_budget() -> None:
    (batch,) = plan([ready("a", tokens=1000), ready("b", tokens=1)], ["m"], 100)
    assert [member.run for member in batch.members] == ["a"]
