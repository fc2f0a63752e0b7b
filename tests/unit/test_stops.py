"""Stop strings over real tokenizers: characters split over tokens, strings that span tokens, and bounded work (S8)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from openrl.backends.common.stops import Stops, StopWatch, TextStop
from openrl.errors import BadRequest
from support.tokenizers import save_bpe_tokenizer, save_metaspace_tokenizer

Decode = Callable[[list[int]], str]


@pytest.fixture(scope="module")
def bpe_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bpe")
    save_bpe_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def bpe(bpe_folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(bpe_folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def metaspace(tmp_path_factory: pytest.TempPathFactory) -> Decode:
    return save_metaspace_tokenizer(tmp_path_factory.mktemp("metaspace"))


def ends_at(watch: StopWatch, tokens: list[int]) -> int | None:
    """How many tokens were seen when the watch said stop."""
    return next((i + 1 for i, token in enumerate(tokens) if watch.push(token)), None)


def naive(decode: Decode, strings: list[str], tokens: list[int]) -> int | None:
    """The whole text anew after each token; a character counts once it is whole."""
    for i in range(1, len(tokens) + 1):
        text = decode(tokens[:i]).rstrip("\ufffd")
        if any(s in text for s in strings):
            return i
    return None


def test_a_string_across_tokens_ends_after_the_token_that_completes_it_s8(bpe_folder: Path, bpe: Tokenizer) -> None:
    tokens = bpe.encode("the cat sat on the mat, and the dog", add_special_tokens=False).ids
    watch = Stops(bpe_folder, frozenset()).watch(("t, a",), [])
    end = ends_at(watch, tokens)
    assert end is not None
    assert "t, a" in bpe.decode(tokens[:end])
    assert "t, a" not in bpe.decode(tokens[: end - 1])


@pytest.mark.parametrize("stop", ["ü", "🙂", "日本", "n: 日", "🙂🙃", "\n\n", " s", "<|end|>"])
def test_equals_decoding_everything(bpe_folder: Path, bpe: Tokenizer, stop: str) -> None:
    """Characters of two, three and four bytes, split over tokens or not."""
    text = "zz the Grüße aus Köln: 日本語 🙂🙃 \n\nStop<|end|> the cat sat"
    tokens = bpe.encode(text, add_special_tokens=False).ids
    assert len(bpe.encode("🙃", add_special_tokens=False).ids) > 1
    watch = Stops(bpe_folder, frozenset()).watch((stop,), [])
    assert ends_at(watch, tokens) == naive(lambda ids: bpe.decode(ids, skip_special_tokens=False), [stop], tokens)


def test_random_bytes_equal_decoding_everything(bpe_folder: Path, bpe: Tokenizer) -> None:
    """Nonsense tokens, with characters that never become whole: the watch may neither miss a string nor invent one."""
    rng = np.random.default_rng(0)
    stops, found = Stops(bpe_folder, frozenset()), 0

    def decode(ids: list[int]) -> str:
        return bpe.decode(ids, skip_special_tokens=False)

    for _ in range(150):
        tokens = rng.integers(0, bpe.get_vocab_size(), 60).tolist()
        whole = decode(tokens).replace("\ufffd", "")
        start = int(rng.integers(0, max(1, len(whole) - 3)))
        stop = whole[start : start + int(rng.integers(1, 4))]
        want = naive(decode, [stop], tokens)
        assert ends_at(stops.watch((stop, "never there"), []), tokens) == want
        found += want is not None
    assert found > 100


def test_the_prompts_text_does_not_count(bpe_folder: Path, bpe: Tokenizer) -> None:
    """A stop string that only the prompt completes, or holds, does not end the sequence."""
    prompt = bpe.encode("the dog ate the ca", add_special_tokens=False).ids
    tokens = bpe.encode("t sat. cat", add_special_tokens=False).ids
    watch = Stops(bpe_folder, frozenset()).watch(("cat", "dog"), prompt)
    assert ends_at(watch, tokens) == naive(bpe.decode, ["cat"], tokens)


def test_a_character_begun_in_the_prompt(bpe_folder: Path, bpe: Tokenizer) -> None:
    ids = bpe.encode("🙃 end", add_special_tokens=False).ids
    watch = Stops(bpe_folder, frozenset()).watch((" end",), ids[:2])
    assert ends_at(watch, ids[2:]) == len(ids) - 2


def test_spaces_that_decoders_drop_at_the_start(metaspace: Decode) -> None:
    """A Llama-2-style decoder drops the first space of what it is given; the text of a sequence has it."""
    the, cat, s, sat = 1, 2, 3, 4
    assert metaspace([cat]) == "cat"
    assert ends_at(TextStop([" cat"], metaspace, [the]), [cat, s]) == 1
    assert ends_at(TextStop(["the cat"], metaspace, []), [the, cat, s]) == 2
    assert ends_at(TextStop(["cats sat"], metaspace, [the]), [cat, s, sat]) == 3


def test_bytes_of_a_fallback_character(metaspace: Decode) -> None:
    face = [7 + b for b in "🙂".encode()]
    assert ends_at(TextStop(["🙂!"], metaspace, [1]), [2, *face, 6]) == 6


def test_work_does_not_grow_with_length(bpe: Tokenizer) -> None:
    """Each token decodes a bounded number of ids, also when nothing ever becomes a whole character."""
    sizes: list[int] = []

    def decode(ids: list[int]) -> str:
        sizes.append(len(ids))
        return bpe.decode(ids)

    broken = bpe.token_to_id("Ľ")
    watch = TextStop(["absent"], decode, bpe.encode("the cat sat on the mat").ids)
    assert ends_at(watch, bpe.encode("the cat " * 300).ids + [broken] * 300) is None
    assert max(sizes) <= 16


def test_ids_and_defaults_s9(bpe_folder: Path) -> None:
    stops = Stops(bpe_folder, frozenset({7}))
    assert ends_at(stops.watch(None, []), [1, 2, 7, 8]) == 3
    assert ends_at(stops.watch((), []), [1, 2, 7, 8]) is None
    assert ends_at(stops.watch((8, 2), []), [1, 2, 7, 8]) == 2


def test_what_cannot_work_is_refused_at_once(bpe_folder: Path, tmp_path: Path) -> None:
    Stops(bpe_folder, frozenset()).check(("x", "y"))
    Stops(tmp_path, frozenset()).check((1, 2))
    with pytest.raises(BadRequest, match="tokenizer"):
        Stops(tmp_path, frozenset()).check(("x",))
    with pytest.raises(BadRequest, match="empty"):
        Stops(bpe_folder, frozenset()).check(("x", ""))
