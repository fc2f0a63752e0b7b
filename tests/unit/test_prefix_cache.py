"""The store of prompt beginnings without tensors: what is found, what makes room, what failure leaves behind."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest

from openrl.backends.common.prefix_cache import BLOCK, Claim, PrefixCache, reusable


def tokens(seed: int, blocks: float) -> list[int]:
    return np.random.default_rng(seed).integers(0, 1000, int(blocks * BLOCK)).tolist()


def store(cache: PrefixCache, key: str, beginning: Sequence[int]) -> Claim:
    cache.begin_turn()
    with cache.claiming([(key, beginning)]) as (claim,):
        return claim


def found(cache: PrefixCache, key: str, beginning: Sequence[int]) -> int:
    """Stored blocks at the beginning, however long."""
    return len(cache.find(key, beginning, len(beginning)))


def test_whole_blocks_of_a_beginning_are_found() -> None:
    cache = PrefixCache(100 * BLOCK)
    prompt = tokens(0, 3.5)
    assert store(cache, "a", prompt) == Claim(0, [1, 2, 3])
    assert cache.find("a", prompt, len(prompt)) == [1, 2, 3]
    assert cache.find("a", prompt + tokens(1, 2), 1000) == [1, 2, 3]
    assert cache.find("a", prompt[: BLOCK + 5], 1000) == [1]
    assert cache.find("a", prompt, 3 * BLOCK - 1) == [1, 2]
    assert cache.find("a", tokens(1, 3), 1000) == []


def test_one_token_is_another_beginning() -> None:
    cache = PrefixCache(100 * BLOCK)
    prompt = tokens(0, 3)
    store(cache, "a", prompt)
    other = prompt.copy()
    other[BLOCK + 7] += 1
    assert found(cache, "a", other) == 1


def test_each_adapter_has_its_own() -> None:
    """Keys stand for immutable checkpoints: new weights never meet what old ones computed."""
    cache = PrefixCache(100 * BLOCK)
    prompt = tokens(0, 2)
    store(cache, "run/weights-1", prompt)
    assert found(cache, "run/weights-2", prompt) == found(cache, "", prompt) == 0
    assert found(cache, "run/weights-1", prompt) == 2


def test_only_what_is_missing_is_claimed() -> None:
    """A conversation that goes on; two prompts of one pass with a common beginning."""
    cache = PrefixCache(100 * BLOCK)
    prompt = tokens(0, 2)
    store(cache, "a", prompt)
    assert store(cache, "a", prompt + tokens(1, 1)) == Claim(2, [3])
    shared = tokens(2, 2)
    with cache.claiming([("a", shared + tokens(3, 1)), ("a", shared + tokens(4, 1))]) as claims:
        assert claims == [Claim(0, [4, 5, 6]), Claim(2, [7])]


def test_the_least_recently_used_makes_room() -> None:
    cache = PrefixCache(4 * BLOCK)
    first, second = tokens(0, 2), tokens(1, 2)
    store(cache, "a", first)
    store(cache, "a", second)
    cache.begin_turn()
    cache.use("a", first, 2)
    store(cache, "a", tokens(2, 1))
    assert (found(cache, "a", first), found(cache, "a", second)) == (2, 1)  # the end goes before the beginning
    store(cache, "a", tokens(3, 2))
    assert (found(cache, "a", first), found(cache, "a", second)) == (1, 0)
    assert cache.stats().evicted_tokens == 3 * BLOCK
    assert cache.stats().stored_tokens == 4 * BLOCK


def test_what_the_turn_needs_does_not_make_room() -> None:
    cache = PrefixCache(3 * BLOCK)
    needed = tokens(0, 2)
    store(cache, "a", needed)
    cache.begin_turn()
    cache.use("a", needed, 2)
    with cache.claiming([("a", tokens(1, 5)), ("a", tokens(2, 5))]) as claims:
        assert claims == [Claim(0, [3]), Claim(0, [])]
    assert found(cache, "a", needed) == 2


def test_of_what_is_too_long_the_beginning_is_stored() -> None:
    cache = PrefixCache(3 * BLOCK + 5)
    prompt = tokens(0, 9)
    assert store(cache, "a", prompt) == Claim(0, [1, 2, 3])
    assert found(cache, "a", prompt) == 3


def test_a_failed_pass_leaves_nothing_behind() -> None:
    cache = PrefixCache(4 * BLOCK)
    kept = tokens(0, 1)
    store(cache, "a", kept)
    shared = kept + tokens(1, 1)
    wanted = [("a", shared), ("a", shared + tokens(2, 1))]
    with pytest.raises(MemoryError), cache.claiming(wanted):
        raise MemoryError
    assert found(cache, "a", wanted[1][1]) == 1
    assert store(cache, "a", tokens(3, 3)).first == 0
    assert cache.stats().stored_tokens == 4 * BLOCK


def test_zero_switches_it_off() -> None:
    cache = PrefixCache(0)
    assert store(cache, "a", tokens(0, 3)) == Claim(0, [])
    assert not found(cache, "a", tokens(0, 3))


def test_giving_up_forgets_everything_and_holds_less() -> None:
    cache = PrefixCache(100 * BLOCK)
    prompt = tokens(0, 8)
    store(cache, "a", prompt)
    assert cache.give_up()
    assert not cache.give_up()
    assert not found(cache, "a", prompt)
    assert store(cache, "a", prompt) == Claim(0, [1, 2, 3, 4])
    cache.relax()
    assert store(cache, "a", prompt) == Claim(4, [5, 6, 7, 8])


def test_keys_that_depend_on_the_length_are_not_stored() -> None:
    plain, long = {"rope_type": "llama3", "factor": 8.0}, {"rope_type": "longrope"}
    assert reusable(SimpleNamespace())
    assert reusable(SimpleNamespace(rope_parameters=plain))
    assert not reusable(SimpleNamespace(rope_parameters=long))
    assert not reusable(SimpleNamespace(rope_parameters={"sliding_attention": plain, "full_attention": long}))


def test_hits_are_counted() -> None:
    cache = PrefixCache(100 * BLOCK)
    prompt = tokens(0, 2.5)
    cache.use("a", prompt, 0)
    store(cache, "a", prompt)
    cache.use("a", prompt, 2)
    stats = cache.stats()
    assert (stats.hits, stats.hit_tokens, stats.computed_tokens) == (1, 2 * BLOCK, 3 * BLOCK)
    assert (stats.stored_tokens, stats.max_tokens) == (2 * BLOCK, 100 * BLOCK)


def test_random_use_never_breaks_the_tree() -> None:
    """Against a naive model: what is found was stored under that key, and no block stands for two beginnings."""
    rng = np.random.default_rng(0)
    cache = PrefixCache(12 * BLOCK)
    written: dict[int, tuple[str, tuple[int, ...]]] = {}
    for _ in range(2000):
        key, prompt = "ab"[rng.integers(2)], [t for i in rng.integers(0, 3, rng.integers(1, 6)) for t in tokens(i, 1)]
        cache.begin_turn()
        blocks = cache.find(key, prompt, len(prompt))
        for i, block in enumerate(blocks):
            assert written[block] == (key, tuple(prompt[: (i + 1) * BLOCK]))
        cache.use(key, prompt, len(blocks))
        with cache.claiming([(key, prompt)]) as (claim,):
            assert claim.first == len(blocks)
            for i, block in enumerate(claim.blocks):
                written[block] = key, tuple(prompt[: (claim.first + i + 1) * BLOCK])
        assert cache.stats().stored_tokens <= 12 * BLOCK
        assert found(cache, key, prompt) == len(prompt) // BLOCK
