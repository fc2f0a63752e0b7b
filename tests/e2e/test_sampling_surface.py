"""Sampling with the real SDK against a tiny `openrl serve`: the poller, clones, cancelling, every sampling field."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
from tinker import types

from openrl_recipes.local_server import Endpoint
from support.proxied import local_server
from support.real_server import KillableServer, client, ints

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

MODEL = "local/tiny"
PROMPT = [5, 9, 11, 40, 41, 22, 7]
PARAMS = types.SamplingParams(max_tokens=8, seed=3, stop=[])
LONG = types.SamplingParams(max_tokens=200, stop=[])  # some hundred turns of the device
ROWS = 4  # sequences that the server decodes together

# What a process of its own does with a clone: draw, and say which numbers its requests had.
CLONE = """
import json, os, pickle, sys
from tinker import SamplingClient, types
how, key, prompt = json.load(sys.stdin)
client = pickle.loads(bytes.fromhex(how["pickle"])) if "pickle" in how else SamplingClient.from_sampler_handle(
    how["handle"], api_key=key)
params = types.SamplingParams(max_tokens=8, seed=3, stop=[])
drawn = [client.sample(types.ModelInput.from_ints(prompt), 1, params) for _ in range(3)]
results = [future.result(timeout=60).sequences[0] for future in drawn]
print(json.dumps([[sequence.sequence_id, sequence.tokens] for sequence in results]), flush=True)
os._exit(0)  # the SDK's transport threads now and then abort an interpreter that is being taken down
"""


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    folder = tmp_path_factory.mktemp("sampling")
    arguments = ["--data-dir", str(folder / "data"), "--model", str(tiny_model), "--dtype", "float32"]
    with local_server(folder / "server.log", arguments, {"OPENRL_MAX_SAMPLE_ROWS": str(ROWS)}) as endpoint:
        yield endpoint


@pytest.fixture(scope="module")
def service(server: Endpoint) -> Iterator[tinker.ServiceClient]:
    service = client(server)
    yield service
    service.close("success")


@pytest.fixture
def sampler(service: tinker.ServiceClient) -> tinker.SamplingClient:
    return service.create_sampling_client(base_model=MODEL).result(timeout=60)


def call(server: Endpoint, path: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    headers = {"x-api-key": server.api_key, "content-type": "application/json"}
    request = urllib.request.Request(f"{server.base_url}/api/v1/{path}", data, headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


def depth(server: Endpoint) -> int:
    return call(server, "status")["queue"]["sample"]


def until(condition: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def in_a_process(server: Endpoint, how: dict[str, str]) -> list[tuple[str, list[int]]]:
    """Sequence ids and tokens of three equal samples that a clone drew in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", CLONE],
        input=json.dumps([how, server.api_key, PROMPT]),
        env={**os.environ, **server.environment()},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def clone_of(sequence_id: str) -> int:
    return int(sequence_id.split(":")[3]) // 1_000_000_000


# ---- the poller ----


def test_samples_come_through_the_poller(server: Endpoint, service: tinker.ServiceClient) -> None:
    """4.5: one long poll for all of a client's samples, bad ones among them; no long poll for each."""
    flags = service.holder.get_client_config()
    assert flags.sample_use_retrieve_futures
    assert flags.sample_join_sampling_session
    assert not flags.proto_compress_fwdbwd
    sampler = service.create_sampling_client(base_model=MODEL).result(timeout=60)
    seeds = range(30)
    drawn = [sampler.sample(ints(PROMPT), 2, types.SamplingParams(max_tokens=5, seed=s, stop=[])) for s in seeds]
    results = [future.result(timeout=60) for future in drawn]
    assert sampler._futures_poller is not None
    assert len({s.sequence_id for result in results for s in result.sequences}) == 60
    again = sampler.sample(ints(PROMPT), 2, types.SamplingParams(max_tokens=5, seed=7, stop=[])).result(timeout=60)
    assert [s.tokens for s in again.sequences] == [s.tokens for s in results[7].sequences]
    with pytest.raises(tinker.BadRequestError, match=r"legal: 0\.\."):
        sampler.sample(ints([5, 99999]), 1, PARAMS).result(timeout=60)


def test_t43_results_are_given_up_once_the_client_has_them(server: Endpoint, sampler: tinker.SamplingClient) -> None:
    """T43: not before it says so; then their bytes go early, and an id without a result is 410."""
    sequence = sampler.sample(ints(PROMPT), 1, PARAMS).result(timeout=60).sequences[0]
    request = sequence.sequence_id.rpartition(":")[0]

    def gone() -> bool:
        try:
            call(server, "retrieve_future", {"request_id": request})
        except urllib.error.HTTPError as error:
            return error.code == 410
        return False

    until(gone)


def test_t41_t42_the_poller_lives_through_a_kill(tiny_arguments: Callable[..., list[str]], tmp_path: Path) -> None:
    """T41: after kill -9 the same client goes on: what was under way is drawn, what is new too. T42: it has acks."""
    with KillableServer(tiny_arguments(), tmp_path / "server.log") as server:
        service = client(server.endpoint)
        sampler = service.create_sampling_client(base_model=MODEL).result(timeout=60)
        first = sampler.sample(ints(PROMPT), 1, PARAMS).result(timeout=60).sequences[0]
        clone = pickle.loads(pickle.dumps(sampler))
        before = clone.sample(ints(PROMPT), 1, PARAMS).result(timeout=60).sequences[0]
        waiting = [sampler.sample(ints(PROMPT), 1, LONG) for _ in range(3)]
        until(lambda: depth(server.endpoint) > 0)
        server.kill()
        server.start()
        assert [len(future.result(timeout=120).sequences[0].tokens) for future in waiting] == [200] * 3
        later = sampler.sample(ints(PROMPT), 1, PARAMS).result(timeout=60).sequences[0]
        assert later.tokens == first.tokens
        other = pickle.loads(pickle.dumps(sampler)).sample(ints(PROMPT), 1, PARAMS).result(timeout=60).sequences[0]
        assert len({clone_of(s.sequence_id) for s in (first, before, other)}) == 3  # T23, across the restart
        service.close("success")


# ---- clones ----


def test_t22_t23_clones_in_other_processes_have_numbers_of_their_own(
    server: Endpoint, sampler: tinker.SamplingClient
) -> None:
    """T22, T23, 6.2: pickled and from a handle, all with the tokens that their seed gives, none with another's ids."""
    expected = sampler.sample(ints(PROMPT), 1, PARAMS).result(timeout=60).sequences[0]
    pickled = {"pickle": pickle.dumps(sampler).hex()}
    drawn = in_a_process(server, pickled), in_a_process(server, {"handle": sampler.get_sampler_handle()})
    assert all(tokens == expected.tokens for clone in drawn for _, tokens in clone)
    ids = [sequence_id for clone in drawn for sequence_id, _ in clone]
    assert len({*ids, expected.sequence_id}) == 7
    assert sorted(clone_of(sequence_id) for sequence_id in ids) == [1, 1, 1, 2, 2, 2]
    assert clone_of(expected.sequence_id) == 0


# ---- cancelling ----


def test_a_cancelled_future_frees_its_slot(server: Endpoint, sampler: tinker.SamplingClient) -> None:
    """4.6: running ones and queued ones stop; what waits behind them is drawn long before they would have ended."""
    sampler.compute_logprobs(ints(PROMPT)).result(timeout=60)  # the model is loaded
    started = time.monotonic()
    sampler.sample(ints(PROMPT), ROWS, LONG).result(timeout=60)
    alone = time.monotonic() - started
    doomed = [sampler.sample(ints(PROMPT), ROWS, LONG).future() for _ in range(40)]
    # The client tells the server only of those whose promise has reached it.
    until(lambda: sampler._futures_poller is not None and len(sampler._futures_poller._events) == 40)
    assert depth(server) == 40
    started = time.monotonic()
    for future in doomed:
        assert future.cancel()
    last = sampler.sample(ints(PROMPT), 1, PARAMS)
    until(lambda: depth(server) <= 1)
    assert last.result(timeout=60).sequences[0].tokens
    assert time.monotonic() - started < 20 * alone
    assert depth(server) == 0
    with pytest.raises(CancelledError):
        doomed[0].result()


# ---- fields ----


def logprobs_of(sampler: tinker.SamplingClient, tokens: list[int]) -> np.ndarray:
    """[N - 1] of all tokens but the first, as `compute_logprobs` has them."""
    return np.array(sampler.compute_logprobs(ints(tokens)).result(timeout=60)[1:], np.float64)


def test_target_logprobs_are_those_of_prompts_that_hold_the_token(sampler: tinker.SamplingClient) -> None:
    """6.3, T33: each named token's logprob is what `compute_logprobs` says of the prompt with it in that place."""
    ids = np.array([[PROMPT[i + 1], 60 + i, -1] for i in range(6)], np.int64)
    dense = tinker.TensorData(data=ids.reshape(-1), dtype="int64", shape=[6, 3])
    answer = sampler.sample(ints(PROMPT), 1, PARAMS, target_prompt_logprobs=dense).result(timeout=60)
    assert answer.target_prompt_logprobs is not None
    assert (answer.target_prompt_logprobs.dtype, answer.target_prompt_logprobs.shape) == ("float32", [6, 3])
    got = np.array(answer.target_prompt_logprobs.data).reshape(6, 3)
    np.testing.assert_allclose(got[:, 0], logprobs_of(sampler, PROMPT), atol=1e-4)
    for i in range(6):
        changed = [*PROMPT[: i + 1], 60 + i]
        np.testing.assert_allclose(got[i, 1], logprobs_of(sampler, changed)[-1], atol=1e-4)
    assert got[:, 2].tolist() == [0.0] * 6
    assert answer.prompt_logprobs is None

    rows, cols = [0, 1, 1, 1, 1, 1, 2], [500, 3]  # token [0, 500] and [5, 3] of a wide, nearly empty table
    sparse = tinker.TensorData(
        data=np.array([PROMPT[1], 65], np.int64),
        dtype="int64",
        shape=[6, 1000],
        sparse_crow_indices=rows,
        sparse_col_indices=cols,
    )
    answer = sampler.sample(ints(PROMPT), 1, PARAMS, target_prompt_logprobs=sparse).result(timeout=60)
    assert answer.target_prompt_logprobs is not None
    assert answer.target_prompt_logprobs.sparse_crow_indices == rows
    assert answer.target_prompt_logprobs.sparse_col_indices == cols
    np.testing.assert_allclose(answer.target_prompt_logprobs.data, [got[0, 0], got[5, 1]], atol=1e-5)


def test_alternatives_have_the_logprobs_of_their_place(sampler: tinker.SamplingClient) -> None:
    """6.3: [N - 1, k] draws, the same for the same seed, each with its logprob as a prompt token."""
    answers = [
        sampler.sample(ints(PROMPT), 1, PARAMS, prompt_alt_tokens_k=4).result(timeout=60).prompt_alt_tokens
        for _ in range(2)
    ]
    assert answers[0] is not None
    assert answers[1] is not None
    tokens, logprobs = answers[0].tokens.to_numpy(), answers[0].logprobs.to_numpy()
    assert tokens.shape == logprobs.shape == (6, 4)
    assert tokens.tolist() == answers[1].tokens.to_numpy().tolist()
    assert len({tuple(column) for column in tokens.T.tolist()}) > 1
    for row in (0, 5):
        found = logprobs_of(sampler, [*PROMPT[: row + 1], int(tokens[row, 2])])[-1]
        np.testing.assert_allclose(logprobs[row, 2], found, atol=1e-4)


def test_t34_only_the_last_prompt_tokens(sampler: tinker.SamplingClient) -> None:
    """6.3, T34: `prompt_logprobs_last_n` leaves None before them, in the logprobs and in the top-k."""
    whole = logprobs_of(sampler, PROMPT)
    answer = sampler.sample(
        ints(PROMPT), 1, PARAMS, include_prompt_logprobs=True, topk_prompt_logprobs=2, prompt_logprobs_last_n=3
    ).result(timeout=60)
    assert answer.prompt_logprobs is not None
    assert answer.topk_prompt_logprobs is not None
    assert answer.prompt_logprobs[:4] == [None] * 4
    np.testing.assert_allclose(answer.prompt_logprobs[4:], whole[3:], atol=1e-4)
    assert answer.topk_prompt_logprobs[:4] == [None] * 4
    for row, token, logprob in zip(answer.topk_prompt_logprobs[4:], PROMPT[4:], whole[3:], strict=True):
        assert row is not None
        assert row[0][1] >= row[1][1]
        assert token in dict(row) or logprob <= row[1][1] + 1e-4
    cut = sampler.compute_logprobs(ints(PROMPT), prompt_logprobs_last_n=1).result(timeout=60)
    assert cut[:-1] == [None] * 6
    np.testing.assert_allclose(cut[-1], whole[-1], atol=1e-4)


def test_top_of_prompts_and_of_samples(sampler: tinker.SamplingClient) -> None:
    """6.3: the likeliest tokens and their logprobs, which are those that the tokens have as a prompt."""
    answer = sampler.sample(
        ints(PROMPT), 2, PARAMS, include_prompt_logprobs=True, topk_prompt_logprobs=3, topk_sample_logprobs=3
    ).result(timeout=60)
    assert answer.topk_prompt_logprobs is not None
    assert answer.topk_prompt_logprobs[0] is None
    best = answer.topk_prompt_logprobs[3]
    assert best is not None
    for token, logprob in best:
        np.testing.assert_allclose(logprob, logprobs_of(sampler, [*PROMPT[:3], token])[-1], atol=1e-4)
    for sequence in answer.sequences:
        assert sequence.topk_logprobs is not None
        assert sequence.logprobs is not None
        whole = [*PROMPT, *sequence.tokens]
        np.testing.assert_allclose(sequence.logprobs, logprobs_of(sampler, whole)[-8:], atol=1e-4)
        for i, row in enumerate(sequence.topk_logprobs):
            assert row is not None
            token, logprob = row[0]
            changed = [*whole[: len(PROMPT) + i], token]
            if i in (0, 7):
                np.testing.assert_allclose(logprob, logprobs_of(sampler, changed)[-1], atol=1e-4)


def test_recorded_samples_and_the_ids_that_training_names(service: tinker.ServiceClient) -> None:
    """6.3: `record_stability_info` is taken; training data may say which sampled tokens it is made of."""
    recorder = service.create_sampling_client(base_model=MODEL, record_stability_info=True).result(timeout=60)
    drawn = recorder.sample(ints(PROMPT), 2, PARAMS).result(timeout=60)
    assert len({sequence.sequence_id for sequence in drawn.sequences}) == 2
    sequence = drawn.sequences[0]
    assert len(sequence.tokens) == 8
    whole, size = [*PROMPT, *sequence.tokens], len(PROMPT) + 7
    weights = np.ones(size, np.float32)
    datum = types.Datum(
        model_input=ints(whole[:-1]),
        loss_fn_inputs={"target_tokens": np.array(whole[1:], np.int64), "weights": weights},
    ).with_provenance(
        model_input=[
            types.PromptProvenanceSpan(sequence_id=sequence.sequence_id, offset=0, length=len(PROMPT)),
            types.SampledProvenanceSpan(sequence_id=sequence.sequence_id, offset=0, length=7),
        ],
        loss_fn_inputs=[
            types.PromptProvenanceSpan(sequence_id=sequence.sequence_id, offset=1, length=len(PROMPT) - 1),
            types.SampledProvenanceSpan(sequence_id=sequence.sequence_id, offset=0, length=8),
        ],
    )
    trainer = service.create_lora_training_client(MODEL, rank=4).result(timeout=60)
    output = trainer.forward([datum], "cross_entropy").result(timeout=60)
    found = np.asarray(output.loss_fn_outputs[0]["logprobs"].data)
    np.testing.assert_allclose(found[-8:], sequence.logprobs, atol=1e-4)


@pytest.mark.parametrize(
    ("chunk", "kind"),
    [
        (types.ImageChunk(data=b"\x89PNG", format="png"), "image"),
        (types.ImageAssetPointerChunk(location="x", format="png"), "image_asset_pointer"),
    ],
)
def test_what_is_no_text_is_refused_in_words(sampler: tinker.SamplingClient, chunk: Any, kind: str) -> None:
    prompt = types.ModelInput(chunks=[types.EncodedTextChunk(tokens=[5, 6]), chunk])
    with pytest.raises(tinker.BadRequestError, match=f"of kind '{kind}'; this server reads 'encoded_text'"):
        sampler.sample(prompt, 1, PARAMS).result(timeout=60)


def test_audio_is_refused_in_words(server: Endpoint, sampler: tinker.SamplingClient) -> None:
    body = {
        "sampling_session_id": sampler._sampling_session_id,
        "seq_id": 5,
        "prompt": {"chunks": [{"type": "dmel", "dmel": "AAAA"}]},
    }
    with pytest.raises(urllib.error.HTTPError) as caught:
        call(server, "asample", body)
    assert caught.value.code == 400
    assert "of kind 'dmel'" in json.load(caught.value)["detail"]
