"""Which base models are in memory, and whose turn is next: each rule, and that nobody starves under random arrivals."""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openrl.daemon.memory import Memory, resident
from openrl.daemon.residency import Phase, Plan, Resident, Rules, plan, thread_shares, turn_of
from openrl.types import DeviceReport, ModelInfo
from openrl.workers.protocol import Worker

RULES = Rules(turn_seconds=60.0)
NOW = 1000.0


def awake(name: str, need: int = 10, **more: Any) -> Resident:
    """Idle for long, and awake for longer than a turn, unless said otherwise."""
    return Resident(name, Phase.AWAKE, need, **{"awake_since": 100.0, "used_at": 200.0, **more})


def waiting(name: str, since: float, need: int = 10) -> Resident:
    return Resident(name, Phase.ASLEEP, need, wanted_since=since)


def asleep(name: str, need: int = 10) -> Resident:
    return Resident(name, Phase.ASLEEP, need)


def planned(*models: Resident, capacity: int = 20, rules: Rules = RULES) -> Plan:
    return plan(models, capacity, NOW, rules)


def test_what_is_wanted_and_fits_is_loaded_and_nothing_else() -> None:
    assert planned(asleep("a"), waiting("b", 990), awake("c")) == Plan(load=("b",))


def test_models_that_fit_beside_each_other_are_loaded_together() -> None:
    assert planned(waiting("a", 990), waiting("b", 980)).load == ("b", "a")


def test_a_model_that_cannot_fit_even_alone_is_told_and_holds_nobody_up() -> None:
    assert planned(waiting("a", 980, need=21), waiting("b", 990)) == Plan(load=("b",), too_large=("a",))


def test_what_a_worker_really_holds_counts_when_it_is_more_than_was_thought() -> None:
    assert planned(awake("a", held=15, busy=True, awake_since=999), waiting("b", 990)).load == ()


def test_the_idle_model_that_was_used_longest_ago_makes_room() -> None:
    models = (awake("a", used_at=300), awake("b", used_at=200), waiting("c", 990))
    assert planned(*models) == Plan(sleep=("b",))


def test_no_more_is_put_to_sleep_than_it_takes() -> None:
    models = (awake("small", 4, used_at=100), awake("large", 16, used_at=200), waiting("c", 990, need=16))
    assert planned(*models).sleep == ("large",)


def test_nothing_is_put_to_sleep_in_vain() -> None:
    """The idle one alone would not do, and the other has not had its turn: so both stay for now."""
    models = (awake("idle"), awake("busy", busy=True, awake_since=NOW - 10), waiting("c", 990, need=15))
    assert planned(*models) == Plan()


def test_a_job_that_thinks_between_two_steps_is_not_idle_at_once() -> None:
    thinking = awake("a", awake_since=NOW - 30, used_at=NOW - 4, load_seconds=5.0)
    assert planned(thinking, awake("b", busy=True, awake_since=NOW - 30), waiting("c", 990)) == Plan()
    longer = replace(thinking, used_at=NOW - 6)
    assert planned(longer, awake("b", busy=True, awake_since=NOW - 30), waiting("c", 990)).sleep == ("a",)


@pytest.mark.parametrize(("had", "sleep"), [(59.0, ()), (60.0, ("a",))])
def test_a_model_with_work_gives_way_once_it_has_had_its_turn(had: float, sleep: tuple[str, ...]) -> None:
    assert planned(awake("a", busy=True, awake_since=NOW - had), waiting("b", 990), capacity=10).sleep == sleep


def test_a_turn_is_no_shorter_than_loading_took() -> None:
    slow = awake("a", busy=True, awake_since=NOW - 90, load_seconds=100.0)
    assert turn_of(slow, RULES) == 100.0
    assert planned(slow, waiting("b", 990), capacity=10) == Plan()


def test_nobody_gives_way_while_no_one_waits() -> None:
    assert planned(awake("a", busy=True), awake("b"), asleep("c")) == Plan()


def test_one_that_leaves_already_is_enough() -> None:
    leaving = replace(awake("a"), phase=Phase.LEAVING)
    assert planned(leaving, awake("b"), waiting("c", 990)) == Plan()


def test_nobody_overtakes_a_model_that_waits_for_room() -> None:
    """The small one would fit now, and then keep the large one waiting for as long as it works."""
    models = (
        awake("a", busy=True, awake_since=NOW - 10),
        waiting("large", 980, need=20),
        waiting("small", 990, need=5),
    )
    assert planned(*models) == Plan()


def test_idle_models_leave_by_the_clock_if_that_is_asked_for() -> None:
    models = (awake("a", used_at=NOW - 100), awake("b", used_at=NOW - 99), awake("c", used_at=0.0, busy=True))
    assert planned(*models, capacity=30, rules=Rules(60.0, idle_seconds=100.0)).sleep == ("a",)
    assert planned(*models, capacity=30).sleep == ()


def test_threads_are_divided_among_those_that_work() -> None:
    assert thread_shares(["a"], 2) == {"a": 2}
    assert thread_shares(["a", "b"], 5) == {"a": 3, "b": 2}
    assert thread_shares(["a", "b", "c"], 2) == {"a": 1, "b": 1, "c": 1}
    assert thread_shares([], 2) == {}


# -- a machine in steps of a second, under random arrivals --


@dataclass
class Machine:
    """Models with amounts of work, which is done while they are awake. Loading and leaving take some seconds."""

    capacity: int
    rules: Rules
    models: dict[str, Resident]
    work: dict[str, int] = field(default_factory=dict[str, int])
    until: dict[str, int] = field(default_factory=dict[str, int])  # when a model is loaded, or has left

    def arrive(self, name: str, amount: int) -> None:
        self.work[name] = self.work.get(name, 0) + amount

    def step(self, now: int) -> None:
        for name, model in self.models.items():
            self.models[name] = self._passed(model, now)
        found = plan(list(self.models.values()), self.capacity, now, self.rules)
        for name in found.load:
            self._enter(name, Phase.OPENING, now + 3, wanted_since=None)
        for name in found.sleep:
            self._enter(name, Phase.LEAVING, now + 2)
        assert sum(model.charge for model in self.models.values()) <= self.capacity

    def _enter(self, name: str, phase: Phase, until: int, **more: Any) -> None:
        self.models[name], self.until[name] = replace(self.models[name], phase=phase, **more), until

    def _passed(self, model: Resident, now: int) -> Resident:
        left = self.work.get(model.name, 0)
        if model.phase is Phase.OPENING and self.until[model.name] <= now:
            return replace(model, phase=Phase.AWAKE, awake_since=now, used_at=now, load_seconds=3.0, busy=left > 0)
        if model.phase is Phase.LEAVING and self.until[model.name] <= now:
            return replace(model, phase=Phase.ASLEEP, busy=False)
        if model.phase is Phase.AWAKE:
            self.work[model.name] = max(0, left - 1)
            return replace(model, busy=left > 0, used_at=now if left else model.used_at)
        if model.phase is Phase.ASLEEP:
            since = None if not left else now if model.wanted_since is None else model.wanted_since
            return replace(model, wanted_since=since)
        return model


ARRIVALS = st.lists(st.tuples(st.integers(0, 100), st.integers(0, 3), st.integers(1, 30)), max_size=12)


@settings(deadline=None, max_examples=60)
@given(
    sizes=st.lists(st.integers(1, 10), min_size=4, max_size=4),
    capacity=st.integers(10, 25),
    turn=st.integers(1, 20),
    arrivals=ARRIVALS,
)
def test_everyone_has_a_turn_and_memory_is_never_overdrawn(
    sizes: list[int], capacity: int, turn: int, arrivals: list[tuple[int, int, int]]
) -> None:
    names = [f"m{place}" for place in range(len(sizes))]
    models = {name: Resident(name, Phase.ASLEEP, size) for name, size in zip(names, sizes, strict=True)}
    machine = Machine(capacity, Rules(float(turn)), models)
    # A turn, its loading and leaving, for each of the others: nobody waits longer than that.
    longest = len(names) * (max(turn, 3) + 3 + 2 + 2)
    amount = sum(work for _, _, work in arrivals)
    for now in range(101 + amount + longest * (2 + amount)):
        for _, place, work in (arrival for arrival in arrivals if arrival[0] == now):
            machine.arrive(names[place], work)
        machine.step(now)
        for model in machine.models.values():
            assert model.wanted_since is None or now - model.wanted_since <= longest, (now, machine)
        if now > 100 and not any(machine.work.values()):
            break
    assert not any(machine.work.values())


# -- how much memory there is --


def test_a_budget_counts_before_everything_else() -> None:
    assert Memory(budget=7, available=lambda: 100).capacity(held=50) == 7


def test_the_machine_has_what_is_free_and_what_workers_hold() -> None:
    assert Memory(available=lambda: 100).capacity(held=50) == 150


def test_a_device_with_memory_of_its_own_counts_once_its_workers_report_it() -> None:
    memory = Memory(available=lambda: 100)
    report = DeviceReport("torch", "cuda:0", "bfloat16", 1, 0, device_bytes=30, device_free_bytes=500)
    memory.note(report, others=20)
    assert memory.capacity(held=50) == 550
    assert memory.held(cast("Worker", object()), report) == 30
    assert memory.held(None, report) == 0


def test_what_a_process_holds_is_seen() -> None:
    size = 64 << 20
    with mmap.mmap(
        -1, size, flags=mmap.MAP_PRIVATE
    ) as block:  # memory that goes back to the system at once, unlike what `free` is given
        block.write(b"x" * size)
        before = resident(os.getpid())
        assert before > size
    assert resident(os.getpid()) < before - size // 2


def test_without_any_word_of_memory_everything_fits() -> None:
    assert Memory().need(ModelInfo(1, 1, 1, 10**15, "huge")) == 0
