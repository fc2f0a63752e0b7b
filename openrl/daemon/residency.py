"""Which base models are in memory, and whose turn is next: pure functions over plain data.

Whoever waits longest is next, and nobody overtakes it: a model that needs room keeps later ones waiting until it has
it. Room is made by models that have nothing to do, the one used longest ago first; and if these are not enough, by
those that have had their turn, though they have work: they take up nothing more, and wait for their next turn.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

_LULL_SECONDS = 1.0  # without work, after which a model counts as idle although its turn is not over


class Phase(StrEnum):
    """Where a model is, as the planner sees it."""

    ASLEEP = "asleep"  # it has no worker
    OPENING = "opening"  # its worker is on its way, also after a crash
    AWAKE = "awake"
    LEAVING = "leaving"  # what it has in hand ends, then its worker does


@dataclass(frozen=True, slots=True)
class Resident:
    """A model. Bytes are of the memory that models share; times are seconds of one clock.

    `need` is what it takes once loaded, by its files; `held` what its worker has now. `wanted_since`: since when work
    waits for a model that is asleep, None if none does. `busy`: it is awake and has work in hand or waiting.
    """

    name: str
    phase: Phase
    need: int
    held: int = 0
    wanted_since: float | None = None
    busy: bool = False
    awake_since: float = 0.0
    used_at: float = 0.0
    load_seconds: float = 0.0

    @property
    def charge(self) -> int:
        """Bytes that nobody else can have."""
        return 0 if self.phase is Phase.ASLEEP else max(self.need, self.held)


@dataclass(frozen=True, slots=True)
class Rules:
    """`turn_seconds`: for which a model with work keeps its place while another waits. `idle_seconds`: without work,
    after which a model leaves although nobody waits; 0 for never."""

    turn_seconds: float
    idle_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """Names of models to load and to put to sleep, and of those that would not fit if they were alone."""

    load: tuple[str, ...] = ()
    sleep: tuple[str, ...] = ()
    too_large: tuple[str, ...] = ()


def plan(models: Sequence[Resident], capacity: int, now: float, rules: Rules) -> Plan:
    """What to do now. `capacity` is the memory for all models together, in bytes, with what they hold already."""
    idle = [model for model in models if _long_idle(model, now, rules)]
    leaving = [*idle, *(model for model in models if model.phase is Phase.LEAVING)]
    free = capacity - sum(model.charge for model in models)
    load: list[str] = []
    sleep = [model.name for model in idle]
    too_large: list[str] = []
    for waiting in _queue(models):
        if waiting.need > capacity:
            too_large.append(waiting.name)
        elif waiting.need <= free:
            load.append(waiting.name)
            free -= waiting.need
        else:
            missing = waiting.need - free - sum(model.charge for model in leaving)
            stay = [model for model in models if model not in leaving]
            sleep += [model.name for model in _givers(stay, missing, now, rules)]
            break
    return Plan(tuple(load), tuple(sleep), tuple(too_large))


def thread_shares(working: Iterable[str], threads: int) -> dict[str, int]:
    """The CPU threads of each model that works: equal parts, the first ones get what is left over; 1 at least."""
    names = list(working)
    return {name: max(1, (threads + len(names) - 1 - place) // len(names)) for place, name in enumerate(names)}


def turn_of(model: Resident, rules: Rules) -> float:
    """Seconds of a model's turn: never less than it took to load, or most of the time would go into loading."""
    return max(rules.turn_seconds, model.load_seconds)


def _queue(models: Iterable[Resident]) -> list[Resident]:
    """The models that wait, whoever waits longest first."""
    waiting = [
        (model.wanted_since, model.name, model)
        for model in models
        if model.phase is Phase.ASLEEP and model.wanted_since is not None
    ]
    return [model for _, _, model in sorted(waiting, key=lambda entry: entry[:2])]


def _long_idle(model: Resident, now: float, rules: Rules) -> bool:
    quiet = model.phase is Phase.AWAKE and not model.busy
    return quiet and rules.idle_seconds > 0 and now - model.used_at >= rules.idle_seconds


def _givers(models: Sequence[Resident], missing: int, now: float, rules: Rules) -> list[Resident]:
    """Who makes room for `missing` bytes, and no more of them than it takes; nobody if all together cannot yet."""
    if missing <= 0:
        return []
    chosen: list[Resident] = []
    for model in _by_preference(models, now, rules):
        chosen.append(model)
        missing -= model.charge
        if missing <= 0:
            break
    if missing > 0:
        return []
    for model in chosen[::-1]:  # a large one may have made those before it unnecessary
        if missing + model.charge <= 0:
            chosen.remove(model)
            missing += model.charge
    return chosen


def _by_preference(models: Iterable[Resident], now: float, rules: Rules) -> Iterator[Resident]:
    """The models that may be put to sleep for another's sake: idle ones, then those whose turn is over.

    A job that thinks between two steps is not idle at once. Loading again costs what loading cost before; so a model
    counts as idle once it has been without work for as long, which is at most twice the best that could be done.
    """
    awake = [model for model in models if model.phase is Phase.AWAKE]
    over = {model.name for model in awake if now - model.awake_since >= turn_of(model, rules)}
    idle = [
        model
        for model in awake
        if not model.busy and (model.name in over or now - model.used_at >= max(_LULL_SECONDS, model.load_seconds))
    ]
    yield from sorted(idle, key=lambda model: model.used_at)
    busy = [model for model in awake if model.busy and model.name in over]
    yield from sorted(busy, key=lambda model: model.awake_since)
