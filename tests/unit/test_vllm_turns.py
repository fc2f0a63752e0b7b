"""Whose weights vLLM holds and whose are next: the rule by itself."""

from __future__ import annotations

from openrl.backends.vllm.turns import BASE, Turns
from openrl.types import RequestId


class Queue:
    """Requests that wait or run, named by their weights' letter and a number; "-" stands for the base model."""

    def __init__(self) -> None:
        self.turns = Turns()
        self.names: list[str] = []
        self.loads: list[str] = []

    def look(self) -> list[str]:
        """Whose turn it is, once what is to be loaded is there."""
        pairs = [(RequestId(name), BASE if name[0] == "-" else name[0]) for name in self.names]
        wanted = self.turns.take(pairs)
        if wanted is not None:
            self.loads.append(wanted)
            self.turns.load(wanted)
            assert not any(self.turns.has(request) for request, _ in pairs), "nobody's turn while it loads"
            self.turns.loaded(wanted)
            return self.look()
        return [name for name in self.names if self.turns.has(RequestId(name))]

    def come(self, *names: str) -> list[str]:
        self.names += names
        return self.look()

    def end(self, *names: str) -> list[str]:
        self.names = [name for name in self.names if name not in names]
        return self.look()


def test_without_others_all_go_at_once() -> None:
    queue = Queue()
    assert queue.come("-1", "-2") == ["-1", "-2"]
    assert queue.come("-3") == ["-1", "-2", "-3"]
    assert queue.loads == []


def test_a_turn_is_of_those_that_waited_when_it_began() -> None:
    """Others come when these are done, however many follow; each change of weights serves all that wait for them."""
    queue = Queue()
    queue.come("-1", "-2")
    assert queue.come("a1", "-3", "a2") == ["-1", "-2"]
    assert queue.end("-1") == ["-2"]
    assert queue.end("-2") == ["a1", "a2"]
    assert queue.come("a3") == ["a1", "a2"], "the base model's request waits"
    assert queue.end("a1", "a2") == ["-3"]
    assert queue.end("-3") == ["a3"]
    assert queue.loads == ["a", BASE, "a"]


def test_who_waits_longest_is_next() -> None:
    queue = Queue()
    queue.come("a1")
    assert queue.come("c1", "b1", "c2", "-1") == ["a1"]
    assert queue.end("a1") == ["c1", "c2"]
    assert queue.end("c1", "c2") == ["b1"]
    assert queue.end("b1") == ["-1"]
    assert queue.loads == ["a", "c", "b", BASE]


def test_weights_stay_until_others_are_wanted() -> None:
    queue = Queue()
    queue.come("a1")
    assert queue.end("a1") == []
    assert queue.come("a2") == ["a2"]
    assert queue.come("a3") == ["a2", "a3"]
    assert queue.loads == ["a"]


def test_those_that_joined_while_nobody_waited_belong_to_the_turn() -> None:
    queue = Queue()
    queue.come("a1")
    queue.come("a2")
    queue.come("-1", "a3")
    assert queue.end("a1") == ["a2"]
    assert queue.end("a2") == ["-1"]


def test_a_request_that_is_given_up_holds_nobody_up() -> None:
    queue = Queue()
    queue.come("-1")
    queue.come("a1", "-2")
    assert queue.end("a1") == ["-1", "-2"], "nobody waits for other weights any more"
    queue.come("a2")
    assert queue.end("-1", "-2") == ["a2"]


def test_a_new_vllm_has_the_base_models_weights() -> None:
    queue = Queue()
    queue.come("a1")
    queue.turns.clear()
    assert queue.look() == ["a1"]
    assert queue.loads == ["a", "a"]
    queue.turns.load("b")
    queue.turns.clear()
    assert (queue.turns.holds, queue.turns.loading) == (BASE, False)
