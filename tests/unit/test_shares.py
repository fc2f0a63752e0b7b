"""Virtual token counters: sessions that always have work get equal tokens by weight; idle ones gather no credit."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from openrl.shares import Shares
from openrl.types import SessionId

A, B, C = SessionId("a"), SessionId("b"), SessionId("c")


def first(shares: Shares) -> SessionId:
    """Whose turn it is."""
    return min(shares.active, key=lambda session: (shares.account(session).rank, session))


requests = st.lists(st.integers(1, 500), min_size=1, max_size=5)


@given(st.lists(st.tuples(requests, st.sampled_from([0.5, 1.0, 2.0, 5.0])), min_size=2, max_size=6))
def test_backlogged_sessions_get_tokens_by_weight(sessions: list[tuple[list[int], float]]) -> None:
    """However large the requests of each, no two sessions are ever further apart than a largest request of either."""
    shares = Shares()
    names = [SessionId(f"s{i}") for i in range(len(sessions))]
    shares.sync({name: weight for name, (_, weight) in zip(names, sessions, strict=True)})
    served = dict.fromkeys(names, 0)
    for turn in range(200):
        session = first(shares)
        sizes, _ = sessions[names.index(session)]
        tokens = sizes[turn % len(sizes)]
        shares.serve(session, tokens)
        served[session] += tokens
    levels = [served[name] / weight for name, (_, weight) in zip(names, sessions, strict=True)]
    largest = max(max(sizes) / weight for sizes, weight in sessions)
    assert max(levels) - min(levels) <= largest * (1 + 1e-9)  # sums of tokens over weight are floats


def test_idle_time_gives_no_credit() -> None:
    shares = Shares()
    shares.sync({A: 1, B: 1})
    shares.serve(A, 10)
    shares.sync({B: 1})
    for _ in range(100):
        shares.serve(B, 10)
    shares.sync({A: 1, B: 1})
    order: list[SessionId] = []
    for _ in range(10):
        order.append(first(shares))
        shares.serve(order[-1], 10)
    assert order == [A, B] * 5


def test_whoever_comes_to_an_idle_device_has_no_advantage_over_who_was_there_last() -> None:
    shares = Shares()
    shares.sync({A: 1})
    shares.serve(A, 1000)
    shares.sync({})
    shares.sync({B: 1})
    shares.serve(B, 1)
    shares.sync({A: 1, B: 1})
    assert first(shares) == A, "which has not become indebted by using what nobody else wanted"


def test_ties_go_to_who_was_served_longest_ago() -> None:
    shares = Shares()
    shares.sync({A: 1, B: 1, C: 1})
    for session in (B, A, C):
        shares.serve(session, 10)
    assert first(shares) == B


def test_too_high_a_guess_is_taken_back() -> None:
    shares = Shares()
    shares.sync({A: 1, B: 1})
    shares.serve(A, 100)
    shares.serve(B, 20)
    shares.charge(A, -90)
    assert first(shares) == A


@given(st.lists(st.tuples(st.sets(st.integers(0, 5)), st.integers(0, 1000)), max_size=60))
def test_a_newcomer_is_never_ahead_of_everyone(story: list[tuple[set[int], int]]) -> None:
    """Whoever comes, comes at least at the least counter of those that have work; nobody's counter ever falls."""
    shares = Shares()
    before: dict[SessionId, float] = {}
    for active, tokens in story:
        stayed = shares.active & {SessionId(str(n)) for n in active}
        floor = min((shares.account(session).counter for session in stayed), default=None)
        shares.sync({SessionId(str(n)): 1.0 for n in active})
        for session in shares.active:
            counter = shares.account(session).counter
            assert floor is None or counter >= floor
            assert counter >= before.get(session, 0.0)
        if shares.active:
            shares.serve(first(shares), tokens)
        before |= {session: shares.account(session).counter for session in shares.active}


def test_accounts_of_sessions_that_are_gone_do_not_pile_up() -> None:
    shares = Shares()
    for i in range(10_000):
        session = SessionId(str(i))
        shares.sync({session: 1})
        shares.serve(session, 5)
    assert len(shares._accounts) < 200
