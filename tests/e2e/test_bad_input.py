"""Bad input through the real SDK and server: one clear error within a second, and the run stays usable."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
import tinker
from tinker import types

from support.real_server import KillableServer, client, datum, ints

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

MODEL = "local/tiny"
GOOD = [1, 5, 9, 11]


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KillableServer]:
    folder = tmp_path_factory.mktemp("bad")
    arguments = ["--data-dir", str(folder), "--model", str(tiny_model), "--dtype", "float32"]
    with KillableServer(arguments, folder / "log") as server:
        yield server


@pytest.fixture(scope="module")
def service(server: KillableServer) -> tinker.ServiceClient:
    return client(server.endpoint)


@pytest.fixture(scope="module")
def trainer(service: tinker.ServiceClient) -> tinker.TrainingClient:
    return service.create_lora_training_client(MODEL, rank=4).result()


def rl_datum(**changed: np.ndarray) -> types.Datum:
    n = len(GOOD) - 1
    inputs = {
        "target_tokens": np.array(GOOD[1:], np.int64),
        "logprobs": np.full(n, -1, np.float32),
        "advantages": np.ones(n, np.float32),
    }
    inputs |= changed
    return types.Datum(ints(GOOD[:-1]), {k: v for k, v in inputs.items() if v.size})


BAD_TRAINING: dict[str, tuple[str, Callable[[tinker.TrainingClient], object]]] = {
    "unknown loss": ("cross_entropy", lambda t: t.forward_backward([datum(GOOD)], "nope")),  # type: ignore[arg-type]
    "unknown config key": ("clip_low_threshold", lambda t: t.forward_backward([rl_datum()], "ppo", {"epsilon": 0.2})),
    "thresholds in disorder": (
        "clip_low_threshold",
        lambda t: t.forward_backward([rl_datum()], "ppo", {"clip_low_threshold": 1.5}),
    ),
    "wrong length": ("advantages", lambda t: t.forward_backward([rl_datum(advantages=np.ones(9, np.float32))], "ppo")),
    "token out of range": ("97", lambda t: t.forward_backward([datum([1, 5, 97])], "cross_entropy")),
    "NaN in advantages": (
        "advantages",
        lambda t: t.forward_backward([rl_datum(advantages=np.array([1, np.nan, 1], np.float32))], "ppo"),
    ),
    "missing key": ("logprobs", lambda t: t.forward_backward([rl_datum(logprobs=np.array([], np.float32))], "ppo")),
    "custom loss on the server": (
        "importance_sampling",
        lambda t: t.forward_backward([rl_datum()], "stable_reinforce"),
    ),
    "too long": ("256", lambda t: t.forward_backward([datum([1] * 300)], "cross_entropy")),
    "negative learning rate": ("learning_rate", lambda t: t.optim_step(types.AdamParams(learning_rate=-1.0))),
    "bad checkpoint name": ("name", lambda t: t.save_state("no/slash")),
    "TTL too short": ("ttl_seconds", lambda t: t.save_state("ttl", ttl_seconds=5)),
}


@pytest.mark.parametrize("case", BAD_TRAINING)
def test_a_bad_training_request_fails_its_future(trainer: tinker.TrainingClient, case: str) -> None:
    """11.2: HTTP 200 and a failed future of category user, naming the field or the legal values; the run goes on."""
    expected, call = BAD_TRAINING[case]
    start = time.monotonic()
    with pytest.raises(tinker.RequestFailedError) as caught:
        call(trainer).result()  # type: ignore[attr-defined]
    assert time.monotonic() - start < 1
    assert expected in str(caught.value)
    assert trainer.forward([datum(GOOD)], "cross_entropy").result().metrics["loss:sum"] > 0


@pytest.mark.parametrize("rank", [-1, 100_000])
def test_a_bad_rank_names_the_legal_ones(service: tinker.ServiceClient, rank: int) -> None:
    with pytest.raises(tinker.RequestFailedError, match="rank"):
        service.create_lora_training_client(MODEL, rank=rank).result()


def test_an_unknown_base_model_names_those_that_are_served(service: tinker.ServiceClient) -> None:
    with pytest.raises(tinker.APIStatusError, match="local/tiny"):
        service.create_lora_training_client("no/such-model").result()
    with pytest.raises(tinker.APIStatusError, match="local/tiny"):
        service.create_sampling_client(base_model="no/such-model").result()


@pytest.mark.filterwarnings("ignore:DEPRECATED.*load_state:FutureWarning")  # old, and still served
def test_checkpoint_kinds_and_paths(service: tinker.ServiceClient, trainer: tinker.TrainingClient) -> None:
    path = trainer.save_weights_for_sampler("s").result().path
    with pytest.raises(tinker.RequestFailedError, match="optimizer"):
        trainer.load_state_with_optimizer(path).result()
    with pytest.raises(tinker.RequestFailedError, match="exists"):
        trainer.save_weights_for_sampler("s").result()
    missing = path.removesuffix("/s") + "/missing"
    with pytest.raises(tinker.RequestFailedError, match="does not exist"):
        trainer.load_state(missing).result()
    with pytest.raises((tinker.APIStatusError, tinker.RequestFailedError), match="does not exist"):
        service.create_training_client_from_state(missing).result()


BAD_SAMPLES = {
    "negative temperature": ("temperature", types.SamplingParams(max_tokens=1, temperature=-1.0)),
    "top_p": ("top_p", types.SamplingParams(max_tokens=1, top_p=1.5)),
    "top_k": ("top_k", types.SamplingParams(max_tokens=1, top_k=0)),
    "no tokens": ("max_tokens", types.SamplingParams(max_tokens=0)),
    "beyond the context": ("256", types.SamplingParams(max_tokens=300)),
}


@pytest.mark.parametrize("case", BAD_SAMPLES)
def test_a_bad_sample_is_refused(service: tinker.ServiceClient, case: str) -> None:
    expected, params = BAD_SAMPLES[case]
    sampler = service.create_sampling_client(base_model=MODEL).result()
    start = time.monotonic()
    with pytest.raises((tinker.APIStatusError, tinker.RequestFailedError), match=expected):
        sampler.sample(ints(GOOD), 1, params).result()
    assert time.monotonic() - start < 1


def test_raw_bodies(server: KillableServer, trainer: tinker.TrainingClient) -> None:
    """Truncated protobuf, invalid JSON, a body too large, a missing key, unknown ids: 4xx with a JSON body (T3)."""
    url = f"{server.endpoint.base_url}/api/v1"
    key = {"X-API-Key": server.endpoint.api_key}
    protobuf = {**key, "Content-Type": "application/x-protobuf"}
    with httpx.Client(timeout=10) as http:
        answers = {
            "truncated": (400, http.post(f"{url}/forward_backward", content=b"\x0a\xff\x01abc", headers=protobuf)),
            "json": (400, http.post(f"{url}/optim_step", content=b"{oops", headers=key)),
            "types": (400, http.post(f"{url}/create_session", json={"tags": 7}, headers=key)),
            "too large": (413, http.post(f"{url}/asample", content=b"x" * (65 << 20), headers=key)),
            "no key": (401, http.post(f"{url}/create_session", json={})),
            "unknown run": (
                404,
                http.post(f"{url}/optim_step", json={"model_id": "x:train:0", "seq_id": 1}, headers=key),
            ),
            "unknown future": (
                410,
                http.post(f"{url}/retrieve_future", json={"request_id": "x:train:0:1"}, headers=key),
            ),
            "unknown route": (404, http.post(f"{url}/nothing", json={}, headers=key)),
        }
    for case, (status, answer) in answers.items():
        assert answer.status_code == status, (case, answer.status_code, answer.text)
        assert answer.json()["detail"], case
        assert int(answer.headers["Content-Length"]) > 0, case
