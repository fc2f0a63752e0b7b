"""Cases about scored prompts, many adapters in one sampler, and sampler against trainer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from openrl.selftest import data
from openrl.selftest.case import Case, Figures
from openrl.selftest.measures import Figure, apart, far, holds
from openrl.selftest.subject import Subject, gaps
from openrl.types import AdamParams, AdapterRef, Array, Cells, SamplingParams

_ADAPTERS = ("base", "a", "b", "head")
_LAST = 10


def prompt_logprobs(s: Subject) -> Figures:
    """S5: at temperature 1 whatever the request's; nothing for the first token. The unembed adapter counts, too."""
    for name in _ADAPTERS:
        yield from _scores(s, f"under {name}", s.sample(data.scored(), name).prompt_logprobs, name)
    alone = s.sample(data.scored(data.PROMPT[:1]), "a").prompt_logprobs
    yield holds("a prompt of one token has none", alone is not None and bool(np.isnan(alone).all()))


def last_logprobs(s: Subject) -> Figures:
    """S7: only the last tokens of a prompt, where only these are asked for."""
    found = s.sample(data.scored(prompt_logprobs_last_n=_LAST), "a").prompt_logprobs
    if found is None:
        yield holds("prompt logprobs are there", False)
        return
    yield holds("none for the others", bool(np.isnan(found[:-_LAST]).all()))
    yield from far("logprobs", [found[-_LAST:]], [s.expected.prompt("a")[-_LAST:]], s.limit)


def top_logprobs(s: Subject) -> Figures:
    """S7: the likeliest tokens of each place in a prompt, and of a drawn token's."""
    ids, logprobs = s.expected.top("a")
    output = s.sample(data.scored(topk_prompt_logprobs=ids.shape[1], topk_sample_logprobs=4), "a")
    top = output.topk_prompt
    if top is None or output.sequences[0].topk is None:
        yield holds("likeliest tokens are there", False)
        return
    yield holds("the first place is empty", bool((top.logprobs[0] < -99998).all()))
    yield from far("logprobs of a prompt", [top.logprobs[1:]], [logprobs], s.limit)
    clear = logprobs[:, :-1] - logprobs[:, 1:] > 2 * s.limit.logprob  # else rounding may change the order
    yield holds("tokens of a prompt", bool((top.ids[1:, 0] == ids[:, 0])[clear[:, 0]].all()))
    following = s.expected.following("a")
    drawn = output.sequences[0].topk
    heat = data.scored().params.temperature
    scaled = following / heat - np.log(np.exp(following / heat).sum())
    wanted = np.sort(scaled)[::-1][None, :4]
    yield Figure("logprobs of a drawn token", apart([drawn.logprobs], [wanted]), s.limit.logprob / heat)


def target_logprobs(s: Subject) -> Figures:
    """S7: given tokens scored at each place; -1 asks for nothing and gives 0."""
    ids, logprobs = s.expected.top("a")
    own = np.array(data.PROMPT[1:], np.int64)
    nothing = np.full_like(own, -1)
    table = np.stack([own, ids[:, 1].astype(np.int64), nothing], axis=1)
    cells = Cells(table.ravel(), (table.shape[0], table.shape[1]))
    found = s.sample(data.scored(target_prompt_logprobs=cells), "a").target_prompt
    if found is None or found.values.size != table.size:
        yield holds("targets are scored", False)
        return
    values = found.values.reshape(table.shape)
    wanted = [s.expected.prompt("a"), logprobs[:, 1]]
    yield from far("logprobs", [values[:, 0], values[:, 1]], wanted, s.limit)
    yield holds("0 where nothing is asked for", not values[:, 2].any())


def alternatives(s: Subject) -> Figures:
    """Other tokens drawn at each place of a prompt, with their logprobs at temperature 1."""
    ids, logprobs = s.expected.top("a")
    params = SamplingParams(max_tokens=1, temperature=0.3, seed=5, stop=())
    found = s.sample(replace(data.scored(prompt_alt_tokens_k=4), params=params), "a").alt_tokens
    if found is None or found.ids.shape != (len(ids), 4):
        yield holds("alternatives are there", False)
        return
    known = found.ids[:, :, None] == ids[:, None, :]
    known_logprobs = (known * logprobs[:, None, :]).sum(-1)
    hit = known.any(-1)
    yield holds("most are likely tokens", bool(hit.mean() > 0.6))
    yield from far("logprobs", [found.logprobs[hit]], [known_logprobs[hit]], s.limit)


def mixed_adapters(s: Subject) -> Figures:
    """S11, B6: requests of several adapters that are drawn together, one prompt scored and one continued each."""
    wanted = {name: s.expected.greedy(name) for name in _ADAPTERS}
    drawn = [s.job(data.greedy(w.prompt, len(w.tokens)), name) for name, w in wanted.items()]
    scored = [s.job(data.scored(), name) for name in _ADAPTERS]
    outputs = s.samples(*drawn, *scored)
    for name, output in zip(_ADAPTERS, outputs, strict=False):
        yield holds(f"tokens under {name}", output.sequences[0].tokens.tolist() == wanted[name].tokens)
        logprobs = [output.sequences[0].logprobs]
        yield from far(f"logprobs under {name}", logprobs, [wanted[name].logprobs], s.limit)
    for name, output in zip(_ADAPTERS, outputs[len(_ADAPTERS) :], strict=True):
        yield from _scores(s, f"under {name}", output.prompt_logprobs, name)


def prefix_cache(s: Subject) -> Figures:
    """S15: what was computed of a prompt under one adapter is not used under another, nor under new weights."""
    for name in ("base", "a", "a", "b", "head", "a", "base", "b"):
        drawn = s.sample(data.draws(8), name).sequences
        table = s.expected.following(name)
        gap = apart([x.logprobs for x in drawn], [table[x.tokens] for x in drawn])
        yield Figure(f"logprobs under {name}", gap, s.limit.logprob)
    run = s.hold("a")
    for number in range(2):
        s.forward_backward(run, data.weighted())
        s.step(run, AdamParams(learning_rate=0.02))
        ref = s.snapshot(run)
        for again in ("", " again"):
            drawn = s.sample(data.draws(4, max_tokens=4), ref)
            gap, _ = gaps(s, run, data.PROMPT, drawn)
            yield Figure(f"against the trainer, step {number}{again}", gap, s.limit.logprob)


def agreement(s: Subject) -> Figures:
    """S6, S14, S15: sampler and trainer give the same logprobs; a snapshot stays as it was when training goes on."""
    run = s.hold("b")
    s.forward_backward(run, data.weighted())
    s.step(run, AdamParams(learning_rate=0.02))
    ref = s.snapshot(run)
    prompt = data.PROMPT[:9]
    params = SamplingParams(max_tokens=40, seed=2, stop=())
    drawn = s.sample(replace(data.draws(6), prompt=np.array(prompt, np.int32), params=params), ref)
    worst, v2 = gaps(s, run, prompt, drawn)
    yield Figure("KL v2 of drawn tokens", v2, s.limit.agreement)
    yield Figure("worst token", worst, s.limit.logprob)
    whole = prompt + drawn.sequences[0].tokens.tolist()
    trained = s.next_logprobs(run, [whole])[0]
    yield Figure("a scored prompt", _scored(s, whole, ref, trained), s.limit.logprob)
    s.forward_backward(run, data.weighted())
    s.step(run, AdamParams(learning_rate=0.3))
    yield Figure("the snapshot, later", _scored(s, whole, ref, trained), s.limit.logprob)
    moved = apart([s.next_logprobs(run, [whole])[0]], [trained])
    yield holds("the run has moved on", moved > 2 * s.limit.logprob)


def _scores(s: Subject, where: str, found: Array | None, adapter: str) -> Figures:
    if found is None or len(found) != len(data.PROMPT):
        yield holds(f"as many as tokens {where}", False)
        return
    yield holds(f"none for the first token {where}", bool(np.isnan(found[0])))
    yield from far(f"logprobs {where}", [found[1:]], [s.expected.prompt(adapter)], s.limit)


def _scored(s: Subject, tokens: list[int], ref: AdapterRef, wanted: Array) -> float:
    found = s.sample(data.scored(tokens), ref).prompt_logprobs
    return float("nan") if found is None else apart([found[1:]], [wanted])


CASES = (
    Case("prompt_logprobs", "prompt logprobs", prompt_logprobs),
    Case("last_logprobs", "prompt logprobs of the last tokens", last_logprobs),
    Case("top_logprobs", "likeliest tokens", top_logprobs),
    Case("target_logprobs", "given tokens scored in a prompt", target_logprobs, optional=True),
    Case("alternatives", "alternatives in a prompt", alternatives, optional=True),
    Case("mixed_adapters", "adapters together in the sampler", mixed_adapters),
    Case("prefix_cache", "no stale prefix cache", prefix_cache),
    Case("agreement", "sampler against trainer", agreement),
)
