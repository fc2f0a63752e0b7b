"""Cases about drawn tokens: which, with what logprobs, and when they end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from openrl.selftest import data
from openrl.selftest.case import Case, Figures
from openrl.selftest.expected import Drawn
from openrl.selftest.measures import Figure, apart, far, flat, holds
from openrl.selftest.models import text
from openrl.selftest.subject import Subject
from openrl.types import AdapterRef, Array, SampledSequence, SampleOutput, SamplingParams

_DRAWS = 256  # enough for a frequency of 0.1 to be known to 0.02
_DEVIATIONS = 5.0  # standard deviations that a frequency may be away (S13)


def greedy(s: Subject) -> Figures:
    """S3: temperature 0 takes the likeliest token and reports logprobs at temperature 1."""
    for name in ("base", "a", "b", "head"):
        wanted = s.expected.greedy(name)
        output = s.sample(data.greedy(wanted.prompt, len(wanted.tokens)), name)
        yield from _drawn(s, f"under {name}", output, wanted)


def temperature(s: Subject) -> Figures:
    """S1, S13: logprobs and frequencies are those of the logits divided by the temperature."""
    for heat in (0.6, 1.0, 1.7):
        table = _log_softmax(s.expected.following("a") / heat)
        drawn = s.sample(data.draws(_DRAWS, temperature=heat), "a").sequences
        yield Figure(f"logprobs at {heat}", _off(drawn, table), s.limit.logprob / min(heat, 1.0))
        yield Figure(f"frequencies at {heat}", _unlikely(drawn, np.exp(table)), _DEVIATIONS)


def top_p(s: Subject) -> Figures:
    """S2, S13: the smallest prefix with that mass, the token that crosses it too; logprobs are those before the cut."""
    heat = 1.3
    table = _log_softmax(s.expected.following("b") / heat)
    kept = _clearly_likeliest(table)
    mass = np.exp(table[kept])
    cut = float(mass.sum() - 0.5 * mass[-1])  # in the middle of the last token's mass
    yield from _truncated(s, table, kept, temperature=heat, top_p=cut)


def top_k(s: Subject) -> Figures:
    """S2, S13: no token but the k likeliest; logprobs are those before the cut."""
    heat = 1.3
    table = _log_softmax(s.expected.following("b") / heat)
    kept = _clearly_likeliest(table)
    yield from _truncated(s, table, kept, temperature=heat, top_k=len(kept))


def seeds(s: Subject) -> Figures:
    """S11, S12: a seed gives a request that is alone the same tokens again, whatever ran before; sample i is a lone
    request with seed + i; no seed, other tokens."""
    together = _tokens(s.sample(data.draws(8), "a"))
    yield holds("the same seed, the same tokens", together == _tokens(s.sample(data.draws(8), "a")))
    # One adapter under two keys: for the first nothing is stored, for the second what a batch of others began with.
    cold, warm = (AdapterRef(f"{s.world.family}/seeds-{name}", s.world.adapters["a"]) for name in ("cold", "warm"))
    again = data.draws(4, max_tokens=24)
    first = _tokens(s.sample(again, cold))
    s.samples(*(s.job(other, warm) for other in data.same_beginning()))
    yield holds("the same tokens whatever is stored", first == _tokens(s.sample(again, warm)))
    yield holds("the same tokens whatever ran before", first == _tokens(s.sample(again, cold)))
    alone = [_tokens(s.sample(data.draws(1, seed=data.SEED + i), "a"))[0] for i in range(8)]
    different = sum(a != b for a, b in zip(together, alone, strict=True)) / 8
    yield Figure("samples that differ from lone requests", different, s.limit.other_draws)
    long = replace(data.draws(2).params, seed=None, max_tokens=12)
    free = [_tokens(s.sample(replace(data.draws(2), params=long), "a")) for _ in range(2)]
    yield holds("without a seed all differ", len({tuple(t) for pair in free for t in pair}) == 4)


def stop_tokens(s: Subject) -> Figures:
    """S8, S9: a stop token is in the answer, with its logprob; one at the very end is a stop, too."""
    wanted = s.expected.greedy("base")
    end = 1 + max(wanted.tokens.index(token) for token in wanted.tokens[:-1])  # the last that is new
    stop = (wanted.tokens[end - 1],)
    for most in (len(wanted.tokens), end):
        output = s.sample(data.greedy(wanted.prompt, most, stop=stop))
        yield from _drawn(s, "until a stop", output, _first(wanted, end), "stop")


def eos(s: Subject) -> Figures:
    """S9: no stop given means the model's end of sequence; an empty list means no end at all."""
    wanted = s.expected.until_eos()
    output = s.sample(data.greedy(wanted.prompt, len(wanted.tokens) + 3, stop=None))
    yield from _drawn(s, "until the end of sequence", output, wanted, "stop")
    endless = s.sample(data.greedy(wanted.prompt, len(wanted.tokens) + 3)).sequences[0]
    yield holds("stop=[] goes past it", len(endless.tokens) == len(wanted.tokens) + 3)
    yield holds("stop=[] ends by length", endless.stop_reason == "length")
    capped = s.sample(data.greedy(wanted.prompt, 1, stop=None)).sequences[0]
    yield holds("one token is one token", (len(capped.tokens), capped.stop_reason) == (1, "length"))


def stop_strings(s: Subject) -> Figures:
    """S8: text of several tokens ends a sequence with the token that completes it."""
    wanted = s.expected.greedy("a")
    string = text(wanted.tokens[3:5])
    end = next(n for n in range(1, 9) if string in text(wanted.tokens[:n]))
    output = s.sample(data.greedy(wanted.prompt, len(wanted.tokens), stop=("never to be", string)), "a")
    yield from _drawn(s, "until a string", output, _first(wanted, end), "stop")


def cancelling(s: Subject) -> Figures:
    """A job that is given up is never answered; those beside it are."""
    wanted = s.expected.greedy("a")
    long = SamplingParams(max_tokens=60, seed=1, stop=())
    gone, queued = (s.job(replace(data.draws(3), params=long), "a") for _ in range(2))
    kept = s.job(data.greedy(wanted.prompt, len(wanted.tokens)), "a")
    s.add(gone, kept)
    early = dict(s.backend.sample.step())
    s.cancel(gone)
    s.add(queued)
    s.cancel(queued)
    found = early or s.finish(kept)
    output = found[kept.request]
    yield holds("only the other one is answered", found.keys() == {kept.request})
    if isinstance(output, SampleOutput):
        yield from _drawn(s, "beside a cancelled job", output, wanted)
    for _ in range(5):
        yield holds("nothing comes later", not s.backend.sample.step())
    yield holds("nothing is left to do", not s.backend.sample.busy)


def _clearly_likeliest(table: Array) -> Array:
    """The two, three or four likeliest tokens, whichever are farthest ahead of the next: no rounding swaps them."""
    order = np.argsort(-table)[:5]
    return order[: 2 + int(np.argmax(table[order[1:4]] - table[order[2:5]]))]


def _truncated(s: Subject, table: Array, kept: Array, **params: object) -> Figures:
    drawn = s.sample(data.draws(_DRAWS, **params), "b").sequences
    yield holds("no token from beyond the cut", set(flat([x.tokens for x in drawn]).astype(int)) <= set(kept.tolist()))
    yield Figure("logprobs as before the cut", _off(drawn, table), s.limit.logprob)
    inside = np.zeros(len(table))
    inside[kept] = np.exp(table[kept]) / np.exp(table[kept]).sum()
    yield Figure("frequencies within the cut", _unlikely(drawn, inside), _DEVIATIONS)


def _off(drawn: Sequence[SampledSequence], table: Array) -> float:
    """The worst logprob of single tokens against a table [V]."""
    return apart([x.logprobs for x in drawn], [table[x.tokens] for x in drawn])


def _unlikely(drawn: Sequence[SampledSequence], p: Array) -> float:
    """The frequency farthest from its probability, in standard deviations; rare tokens are counted together."""
    counts = np.bincount([int(x.tokens[0]) for x in drawn], minlength=len(p)).astype(float)
    common = p * len(drawn) >= 8
    counts = np.append(counts[common], counts[~common].sum())
    p = np.append(p[common], p[~common].sum()).clip(1e-3, 1 - 1e-3)
    return float((np.abs(counts / len(drawn) - p) / np.sqrt(p * (1 - p) / len(drawn))).max())


def _log_softmax(z: Array) -> Array:
    z = z - z.max()
    return z - np.log(np.exp(z).sum())


def _tokens(output: SampleOutput) -> list[list[int]]:
    return [x.tokens.tolist() for x in output.sequences]


def _first(wanted: Drawn, count: int) -> Drawn:
    return Drawn(wanted.prompt, wanted.tokens[:count], wanted.logprobs[:count])


def _drawn(s: Subject, where: str, output: SampleOutput, wanted: Drawn, reason: str = "length") -> Figures:
    """One sequence against its expected tokens, logprobs and end."""
    sequence = output.sequences[0]
    yield holds(f"tokens {where}", sequence.tokens.tolist() == wanted.tokens)
    yield holds(f"end {where}", sequence.stop_reason == reason)
    yield from far(f"logprobs {where}", [sequence.logprobs], [wanted.logprobs], s.limit)


CASES = (
    Case("greedy", "greedy tokens", greedy),
    Case("temperature", "temperature", temperature),
    Case("top_p", "top-p", top_p),
    Case("top_k", "top-k", top_k),
    Case("seeds", "seeds", seeds),
    Case("stop_tokens", "stop tokens", stop_tokens),
    Case("eos", "end of sequence", eos),
    Case("stop_strings", "stop strings", stop_strings),
    Case("cancelling", "cancelling", cancelling),
)
