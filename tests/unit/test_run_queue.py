"""Order of a run's requests (4.8)."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from openrl.daemon.run_queue import RunQueue


def drain(queue: RunQueue[int]) -> list[int]:
    ran: list[int] = []
    while (head := queue.head()) is not None:
        ran.append(head)
        queue.advance()
    return ran


@given(st.permutations(range(1, 9)), st.sets(st.integers(1, 8)))
def test_o1_o2_any_arrival_order_runs_ascending_and_steps_over_used_numbers(arrival: list[int], used: set[int]) -> None:
    """O1, O2, O5: whatever the order of arrival, requests run ascending without holes, refused ones left out."""
    queue: RunQueue[int] = RunQueue(1)
    ran: list[int] = []
    for seq in arrival:
        if seq in used:
            queue.use_up(seq)
        else:
            queue.push(seq, seq)
        ran += drain(queue)
    assert ran == [seq for seq in range(1, 9) if seq not in used]
    assert queue.next_seq == 9
    assert len(queue) == 0


def test_chunk_one_last_holds_the_others_back() -> None:
    """O2, T2: chunks 2..N arrive first and wait for chunk 1."""
    queue: RunQueue[str] = RunQueue(1)
    queue.push(2, "b")
    queue.push(3, "c")
    assert queue.head() is None
    assert queue.has_gap
    queue.push(1, "a")
    assert queue.head() == "a"
    assert not queue.has_gap


def test_after_head_looks_over_used_numbers() -> None:
    queue: RunQueue[str] = RunQueue(1)
    queue.push(1, "a")
    queue.use_up(2)
    queue.use_up(3)
    assert queue.after_head() == 4
    queue.advance()
    assert queue.next_seq == 4


def test_used_numbers_in_the_past_change_nothing() -> None:
    queue: RunQueue[str] = RunQueue(5)
    queue.use_up(3)
    assert queue.next_seq == 5
    assert not queue.has_gap


def test_clear_moves_past_everything() -> None:
    queue: RunQueue[str] = RunQueue(1)
    queue.push(3, "c")
    queue.push(7, "g")
    queue.clear()
    assert queue.next_seq == 8
    assert len(queue) == 0
