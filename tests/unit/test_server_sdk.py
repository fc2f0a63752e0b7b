"""The real SDK over a real socket against the HTTP layer, with a fake daemon that answers canned numbers."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import numpy as np
import pytest
import tinker
import torch

from openrl.server.app import create_app
from openrl.types import Op
from support.fake_daemon import MODEL, FakeDaemon, server_settings
from support.http import KEY
from support.serving import serving

# The SDK leaves the sockets of its start-up calls to the garbage collector.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module")
def daemon() -> FakeDaemon:
    return FakeDaemon()


@pytest.fixture(scope="module")
def service(daemon: FakeDaemon) -> Iterator[tinker.ServiceClient]:
    patch = pytest.MonkeyPatch()
    patch.setenv("TINKER_TELEMETRY", "0")
    app = create_app(daemon.as_daemon, server_settings(max_body_bytes=6_000_000, long_poll_seconds=2.0), KEY)
    with serving(app) as url:
        client = tinker.ServiceClient(base_url=url, api_key=KEY, user_metadata={"test": "sdk"})
        yield client
        client.close("success").result(timeout=30)
    patch.undo()
    gc.collect()  # while those warnings are ignored


@pytest.fixture(scope="module")
def training(service: tinker.ServiceClient) -> tinker.TrainingClient:
    return service.create_lora_training_client(base_model=MODEL, rank=8, seed=1).result(timeout=30)


def datum(n: int = 3, target: int = 5) -> tinker.Datum:
    inputs = {"target_tokens": [target] * n, "weights": [1.0] * n}
    return tinker.Datum(model_input=tinker.ModelInput.from_ints(list(range(n))), loss_fn_inputs=inputs)


def test_a_run_is_created_and_described(training: tinker.TrainingClient, daemon: FakeDaemon) -> None:
    info = training.get_info()
    assert info.model_data.model_name == MODEL
    assert (info.is_lora, info.lora_rank) == (True, 8)
    assert daemon.created[-1].user_metadata == {"test": "sdk"}
    assert daemon.new_runs[-1].seed == 1


def test_forward_backward_and_optim_step(training: tinker.TrainingClient) -> None:
    output = training.forward_backward([datum(3), datum(2)], "cross_entropy").result(timeout=30)
    assert [record["logprobs"].tolist() for record in output.loss_fn_outputs] == [[-0.5] * 3, [-0.5] * 2]
    assert output.metrics == {"loss:sum": 2.5}
    step = training.optim_step(tinker.AdamParams(learning_rate=0.25)).result(timeout=30)
    assert step.metrics == {"grad_norm:mean": 1.25, "lr:mean": 0.25}


def test_forward_is_sent_as_forward_only(training: tinker.TrainingClient, daemon: FakeDaemon) -> None:
    training.forward([datum()], "cross_entropy").result(timeout=30)
    assert daemon.submitted[-1].op is Op.FORWARD


def test_rank_2_targets(training: tinker.TrainingClient) -> None:
    targets = torch.zeros((3, 9), dtype=torch.int64)
    targets[1, :2] = 4
    inputs = {"target_tokens": targets, "weights": (targets > 0).float()}
    data = [tinker.Datum(model_input=tinker.ModelInput.from_ints([1, 2, 3]), loss_fn_inputs=inputs)]
    output = training.forward_backward(data, "cross_entropy").result(timeout=30)
    assert output.loss_fn_outputs[0]["logprobs"].shape == [3, 9]


def test_o2_parallel_chunks_arrive_first_one_last(training: tinker.TrainingClient, daemon: FakeDaemon) -> None:
    before = len(daemon.submitted)
    output = training.forward_backward([datum(1)] * 2500, "cross_entropy").result(timeout=60)
    assert len(output.loss_fn_outputs) == 2500
    assert output.metrics == {"loss:sum": 1250.0}
    seqs = [sent.seq for sent in daemon.submitted[before:]]
    assert len(seqs) == 3
    assert seqs[-1] == min(seqs)


def test_a_custom_loss_runs_in_the_client(training: tinker.TrainingClient) -> None:
    """1.9: forward for the logprobs, then a backward with weights of our own; both need `loss:sum` (T18)."""

    def loss(data: list[tinker.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        return sum((lp**2).sum() for lp in logprobs), {"mine": 2.0}  # type: ignore[return-value]

    output = training.forward_backward_custom([datum(4)], loss).result(timeout=30)
    assert output.metrics["mine"] == 2.0
    assert output.metrics["loss:sum"] == 1.0


@pytest.mark.parametrize(
    ("loss", "bad", "message"),
    [
        ("ppo2", datum(), "loss_fn 'ppo2' is unknown"),
        ("ppo", datum(), "lacks advantages, logprobs"),
        ("cross_entropy", datum(target=1000), "token id 1000 at position 0; legal: 0..999"),
    ],
)
def test_t1_bad_input_fails_at_once_and_the_client_goes_on(
    training: tinker.TrainingClient, loss: str, bad: tinker.Datum, message: str
) -> None:
    with pytest.raises(tinker.RequestFailedError, match=message) as caught:
        training.forward_backward([bad], loss).result(timeout=10)  # type: ignore[arg-type]
    assert caught.value.category == "user"
    training.forward_backward([datum()], "cross_entropy").result(timeout=10)


def test_a_body_that_is_too_large_fails_at_once_and_the_client_goes_on(training: tinker.TrainingClient) -> None:
    """T51: one datum beyond the chunk limit is sent whole."""
    tokens = tinker.ModelInput.from_ints([1] * 1_000_000)
    huge = tinker.Datum(model_input=tokens, loss_fn_inputs={"target_tokens": np.ones(1_000_000, np.int64)})
    with pytest.raises(tinker.RequestFailedError, match="the body is over 6000000 bytes"):
        training.forward_backward([huge], "cross_entropy").result(timeout=20)
    training.forward_backward([datum()], "cross_entropy").result(timeout=10)


def test_bad_ranks_and_models_are_refused(service: tinker.ServiceClient) -> None:
    with pytest.raises(tinker.RequestFailedError, match=r"lora_config\.rank must lie in 1\.\.64, got 65"):
        service.create_lora_training_client(base_model=MODEL, rank=65).result(timeout=10)
    with pytest.raises(tinker.RequestFailedError, match="rank 0 trains all parameters: train_attn"):
        service.create_lora_training_client(base_model=MODEL, rank=0, train_mlp=False).result(timeout=10)
    with pytest.raises(tinker.BadRequestError, match=f"legal: {MODEL}"):
        service.create_lora_training_client(base_model="other/model").result(timeout=10)


def test_f1_c9_rank_0_is_full_fine_tuning(service: tinker.ServiceClient) -> None:
    """F1, C9: the SDK's only way to ask for it."""
    info = service.create_lora_training_client(base_model=MODEL, rank=0).result(timeout=10).get_info()
    assert (info.is_lora, info.lora_rank) == (False, None)


def test_save_and_resume(training: tinker.TrainingClient, service: tinker.ServiceClient) -> None:
    path = training.save_state("step-1").result(timeout=30).path
    assert path.endswith("/weights/step-1")
    with pytest.warns(FutureWarning, match="load_state"):
        training.load_state_with_optimizer(path).result(timeout=30)
    resumed = service.create_training_client_from_state(path).result(timeout=30)
    assert resumed.get_info().model_data.model_name == MODEL
    resumed.forward_backward([datum()], "cross_entropy").result(timeout=30)
    info = tinker.RestClient(base_url=service.holder._base_url, api_key=KEY)
    assert info.get_weights_info_by_tinker_path(path).result(timeout=30).lora_rank == 8


def test_sample_from_an_ephemeral_sampler(training: tinker.TrainingClient) -> None:
    sampler = training.save_weights_and_get_sampling_client().result(timeout=30)
    params = tinker.SamplingParams(max_tokens=3, temperature=0.5, stop=["x"])
    prompt = tinker.ModelInput.from_ints([7, 8])
    got = sampler.sample(prompt, num_samples=2, sampling_params=params).result(timeout=30)
    assert [sequence.tokens for sequence in got.sequences] == [[9, 10, 11]] * 2
    assert got.sequences[0].logprobs == [-0.5] * 3
    assert len({sequence.sequence_id for sequence in got.sequences}) == 2
    assert sampler.compute_logprobs(prompt).result(timeout=30) == [None, -0.5]


def test_sample_from_a_named_checkpoint_and_the_base(
    training: tinker.TrainingClient, service: tinker.ServiceClient
) -> None:
    path = training.save_weights_for_sampler("s1").result(timeout=30).path
    for client in (service.create_sampling_client(model_path=path), service.create_sampling_client(base_model=MODEL)):
        got = client.result(timeout=30).sample(
            tinker.ModelInput.from_ints([1]), num_samples=1, sampling_params=tinker.SamplingParams(max_tokens=1)
        )
        assert got.result(timeout=30).sequences[0].tokens == [2]


def test_a_bad_sample_is_refused_at_once(service: tinker.ServiceClient) -> None:
    sampler = service.create_sampling_client(base_model=MODEL).result(timeout=30)
    params = tinker.SamplingParams(max_tokens=1000)
    with pytest.raises(tinker.BadRequestError, match="the model's context holds 256"):
        sampler.sample(tinker.ModelInput.from_ints([1]), num_samples=1, sampling_params=params).result(timeout=10)


def test_a_wrong_key_is_refused_at_once(service: tinker.ServiceClient) -> None:
    with pytest.raises(tinker.AuthenticationError):
        tinker.RestClient(base_url=service.holder._base_url, api_key="tml-wrong").get_server_capabilities().result(10)


def test_capabilities(service: tinker.ServiceClient) -> None:
    rest = tinker.RestClient(base_url=service.holder._base_url, api_key=KEY)
    models = rest.get_server_capabilities().result(timeout=30).supported_models
    assert (models[0].model_name, models[0].max_context_length) == (MODEL, 256)
