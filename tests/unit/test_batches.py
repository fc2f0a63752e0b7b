"""How a pass is cut into micro-batches."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from openrl.backends.common.batches import cut, cut_padded

Row = tuple[str, int]  # a run and a length

rows = st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 120)), min_size=1, max_size=60)


def batches(given_rows: list[Row], most: int) -> list[list[Row]]:
    return cut(given_rows, lambda row: row[1], lambda row: row[0], most)


@given(rows, st.integers(50, 300))
def test_every_row_is_in_one_micro_batch_within_the_budget(given_rows: list[Row], most: int) -> None:
    made = batches(given_rows, most)
    assert sorted(row for batch in made for row in batch) == sorted(given_rows)
    assert all(len(batch) == 1 or sum(length for _, length in batch) <= most for batch in made)


@given(rows, st.integers(50, 300))
def test_runs_stay_together(given_rows: list[Row], most: int) -> None:
    """The rows of a run lie side by side, so that few micro-batches have more than one adapter."""
    order = [run for batch in batches(given_rows, most) for run, _ in batch]
    changes = sum(one != other for one, other in pairwise(order))
    assert changes == len(set(order)) - 1


def test_small_runs_share_a_micro_batch() -> None:
    assert len(batches([(run, 30) for run in "abcd" for _ in range(4)], 600)) == 1


def test_micro_batches_are_of_about_the_same_size() -> None:
    sizes = [sum(length for _, length in batch) for batch in batches([("a", 100)] * 14, 800)]
    assert sizes == [700, 700]


def padded(given_rows: list[Row], most: int) -> list[list[Row]]:
    return cut_padded(given_rows, lambda row: row[1], lambda row: row[0], most)


@given(rows, st.integers(50, 300))
def test_padded_micro_batches_stay_within_the_budget(given_rows: list[Row], most: int) -> None:
    """Rows times the longest of them, and no row is mostly padding."""
    made = padded(given_rows, most)
    assert sorted(row for batch in made for row in batch) == sorted(given_rows)
    for batch in made:
        lengths = [length for _, length in batch]
        assert len(batch) == 1 or len(batch) * max(lengths) <= most
        assert 2 * min(lengths) >= max(lengths)


def test_padded_rows_of_like_length_share() -> None:
    assert [len(batch) for batch in padded([("a", 60)] * 3 + [("b", 55)] * 2 + [("b", 5)] * 4, 300)] == [5, 4]
