"""Every route over a fake daemon: bodies in, typed calls to the daemon, answers as the SDK's models want them."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import zstandard
from tinker.proto.response_conv import deserialize_forward_backward_output, deserialize_sample_response

from openrl.daemon.work import LoadState, OptimStep, SaveSampler, SaveState, Train
from openrl.errors import TooLarge
from openrl.server.app import create_app
from openrl.types import AdamParams, FullSpec, LoraSpec, Op, RequestId, RunId, SessionId
from openrl.wire import tinker_pb2 as pb
from support.fake_daemon import MODEL, FakeDaemon, server_settings
from support.http import KEY, Http

PROTO = {"content-type": "application/x-protobuf"}
RUN = RunId("s0:train:0")


@pytest.fixture
def daemon() -> FakeDaemon:
    daemon = FakeDaemon()
    daemon.sessions[SessionId("s0")] = "active"
    daemon.add_run(RUN, LoraSpec(rank=8, seed=0), {"a": 1, "b": "x"})
    return daemon


@pytest.fixture
def http(daemon: FakeDaemon) -> Http:
    return Http(create_app(daemon.as_daemon, server_settings(), KEY))


def proto_body(seq_id: int = 1, *, loss: str = "cross_entropy", tokens: int = 3, forward_only: bool = False) -> bytes:
    ids = np.arange(tokens)
    datum = pb.Datum(
        model_input=[pb.Chunk(encoded_text=pb.EncodedTextChunk(tokens=ids.astype("<i4").tobytes()))],
        loss_fn_inputs={"target_tokens": pb.Tensor(dense=ids.astype("<i8").tobytes(), dtype=pb.DTYPE_INT64)},
    )
    message = pb.ForwardBackwardRequest(
        model_id=RUN, seq_id=seq_id, data=[datum], loss_fn=loss, forward_only=forward_only
    )
    return message.SerializeToString()


# ---- the server itself ----


def test_root_and_health_need_no_key(http: Http) -> None:
    http.headers = {}
    assert http.get("healthz").json() == {"status": "ok"}
    assert "/api/v1" in http.get("//").json()["hint"]
    assert http.get("status").status_code == 401


def test_t29_client_config_has_no_nulls(http: Http) -> None:
    """2.2: every flag typed, and on only what is served."""
    config = http.post("client/config", {"sdk_version": "0.38.0"}).json()
    assert None not in config.values()
    assert not any(config[flag] for flag in ["proto_compress_fwdbwd", "custom_loss_server_side", "sample_no_retries"])
    assert config["sample_use_retrieve_futures"]
    assert config["sample_join_sampling_session"]
    assert config["pjwt_auth_enabled"]
    assert config["parallel_fwdbwd_chunks"]
    assert config["create_model_via_load_weights"]
    assert config["billing_exception_max_pause_duration_sec"] == 0
    dynamic = http.post("client/dynamic_config", {"sdk_version": "0.38.0"}).json()
    assert dynamic == {
        "refresh_interval_sec": 300,
        "sample_cancel_enabled": True,
        "sample_cancel_max_batch_size": 64,
    }


@pytest.mark.parametrize(("host", "remote"), [("127.0.0.1", False), ("::1", False), ("0.0.0.0", True)])
def test_bodies_are_compressed_over_a_network_only(host: str, remote: bool) -> None:
    app = create_app(FakeDaemon().as_daemon, server_settings(host=host), KEY)
    assert Http(app).post("client/config", {}).json()["proto_compress_fwdbwd"] is remote


def test_capabilities(http: Http) -> None:
    models = http.get("get_server_capabilities").json()["supported_models"]
    assert models[0] == {
        "model_name": MODEL,
        "max_context_length": 256,
        "max_lora_rank": 64,
        "trainable": True,
        "sampleable": True,
        "state": "ready",
        "custom_losses": False,
    }
    assert "max_context_length" not in models[1]


def test_status(http: Http) -> None:
    assert http.get("status").json()["runs"] == 1


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"events": None},
        {"events": [{"event": "SESSION_START"}, {"event": 3}, {}], "platform": "x", "session_id": "y"},
    ],
)
def test_t28_telemetry_is_accepted(http: Http, body: dict[str, Any]) -> None:
    assert http.post("telemetry", body).json() == {"status": "accepted"}


def test_t52_telemetry_is_scrubbed(http: Http, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    event = {"event": "GENERIC_EVENT", "event_data": {"request_headers": {"x-api-key": "tml-secret"}}}
    http.post("telemetry", {"events": [event]})
    assert "1 'GENERIC_EVENT'" in caplog.text
    assert "tml-" not in caplog.text


# ---- sessions ----


def test_session_life(http: Http, daemon: FakeDaemon) -> None:
    body = {"tags": ["a"], "user_metadata": {"k": [1]}, "sdk_version": "0.38.0", "display_name": None}
    session = http.post("create_session", body).json()["session_id"]
    assert daemon.created[0].tags == ("a",)
    assert daemon.created[0].user_metadata == {"k": [1]}
    assert http.post("session_heartbeat", {"session_id": session}).json() == {"type": "session_heartbeat"}
    reason = {"reason": {"type": "success"}, "detail": None}
    assert http.post(f"sessions/{session}/finish", reason).status_code == 200
    assert http.post(f"sessions/{session}/finish", b"").status_code == 200
    assert http.post("session_heartbeat", {"session_id": session}).status_code == 410
    assert http.post("session_heartbeat", {"session_id": "other"}).status_code == 404


# ---- runs ----


def test_create_model(http: Http, daemon: FakeDaemon) -> None:
    body = {
        "session_id": "s0",
        "model_seq_id": 3,
        "base_model": MODEL,
        "lora_config": {"rank": 4, "seed": 7, "train_unembed": False},
        "optimizer_config": {"type": "adamw"},
        "user_metadata": None,
        "type": "create_model",
    }
    promise = http.post("create_model", body)
    assert http.future(promise).json() == {"model_id": "s0:train:3"}  # T19
    assert daemon.new_runs[0].seed == 7
    assert not daemon.new_runs[0].train_unembed


def test_f1_c9_a_missing_lora_config_is_full_fine_tuning(http: Http, daemon: FakeDaemon) -> None:
    """F1, C9: as rank 0 is; such a run has no rank."""
    body = {"session_id": "s0", "base_model": MODEL}
    for number, more in enumerate([{}, {"lora_config": None}, {"lora_config": {"rank": 0, "seed": 3}}]):
        made = http.future(http.post("create_model", body | {"model_seq_id": number} | more)).json()
        info = http.post("get_info", made).json()
        assert (info["is_lora"], info["lora_rank"]) == (False, None)
        assert daemon.runs[RunId(made["model_id"])].spec == FullSpec()


def test_get_info(http: Http) -> None:
    """5.10, T32."""
    assert http.post("get_info", {"model_id": RUN}).json() == {
        "type": "get_info",
        "model_id": RUN,
        "model_data": {"arch": "llama", "model_name": MODEL, "tokenizer_id": MODEL},
        "model_name": MODEL,
        "is_lora": True,
        "lora_rank": 8,
        "optimizer_config": {"type": "adamw"},
    }


def test_training_run(http: Http) -> None:
    """8.2, T24, T31."""
    got = http.get(f"training_runs/{RUN}?access_scope=owned").json()
    assert got["training_run_id"] == RUN
    assert got["user_metadata"] == {"a": "1", "b": "x"}
    assert got["last_request_time"].endswith("Z")
    assert got["corrupted"] is False


def test_unload_with_and_without_seq(http: Http, daemon: FakeDaemon) -> None:
    """L2."""
    assert http.future(http.post("unload_model", {"model_id": RUN})).json() == {"model_id": RUN}
    assert http.future(http.post("unload_model", {"model_id": RUN, "seq_id": 4})).json() == {"model_id": RUN}
    assert [(sent.op, sent.seq) for sent in daemon.submitted] == [(Op.UNLOAD, 4)]


# ---- training ----


def test_forward_backward_in_protobuf(http: Http, daemon: FakeDaemon) -> None:
    promise = http.post("forward_backward", proto_body(), headers=PROTO)
    answer = http.future(promise)
    assert answer.headers["content-type"] == "application/x-protobuf"
    output = deserialize_forward_backward_output(answer.content)
    assert output.metrics == {"loss:sum": 1.5}
    assert output.loss_fn_outputs[0]["logprobs"].shape == [3]
    sent = daemon.submitted[0]
    assert (sent.run, sent.seq, sent.op) == (RUN, 1, Op.FORWARD_BACKWARD)
    assert sent.raw.content_type == "application/x-protobuf"
    assert sent.raw.body == proto_body()


def test_forward_only_is_a_forward(http: Http, daemon: FakeDaemon) -> None:
    http.future(http.post("forward_backward", proto_body(forward_only=True), headers=PROTO))
    assert daemon.submitted[0].op is Op.FORWARD
    assert isinstance(daemon.submitted[0].work, Train)
    assert not daemon.submitted[0].work.backward


def test_zstd_is_decoded_and_stored_plain(http: Http, daemon: FakeDaemon) -> None:
    packed = zstandard.compress(proto_body())
    promise = http.post("forward_backward", packed, headers=PROTO | {"content-encoding": "zstd"})
    assert http.future(promise).status_code == 200
    assert daemon.submitted[0].raw.body == proto_body()


@pytest.mark.parametrize(
    ("path", "key"), [("forward_backward", "forward_backward_input"), ("forward", "forward_input")]
)
def test_json_bodies_of_old_sdks(http: Http, daemon: FakeDaemon, path: str, key: str) -> None:
    """L1 and 4.3: JSON in, and JSON out since Accept does not name protobuf."""
    inputs = {"target_tokens": {"data": [1, 2], "dtype": "int64", "shape": [2]}}
    datum = {"model_input": {"chunks": [{"tokens": [1, 2]}]}, "loss_fn_inputs": inputs}
    content = {"data": [datum], "loss_fn": "cross_entropy"}
    answer = http.future(http.post(path, {key: content, "model_id": RUN, "seq_id": 1}), "application/json")
    assert answer.headers["content-type"] == "application/json"
    assert answer.json() == {
        "loss_fn_output_type": "ArrayRecord",
        "loss_fn_outputs": [{"logprobs": {"data": [-0.5, -0.5], "dtype": "float32", "shape": [2]}}],
        "metrics": {"loss:sum": 1.0},
    }
    assert daemon.submitted[0].op == path


def test_optim_step_saves_and_loads(http: Http, daemon: FakeDaemon) -> None:
    def call(route: str, seq: int, **fields: Any) -> dict[str, Any]:
        return http.future(http.post(route, {"model_id": RUN, "seq_id": seq} | fields)).json()

    metrics = call("optim_step", 1, adam_params={"learning_rate": 0.5})["metrics"]
    assert metrics == {"grad_norm:mean": 1.25, "lr:mean": 0.5}
    state = call("save_weights", 2, path="a", user_metadata={"k": "v"})
    assert state == {"path": f"tinker://{RUN}/weights/a"}
    assert call("save_weights_for_sampler", 3, path="b") == {"path": f"tinker://{RUN}/sampler_weights/b"}
    ephemeral = call("save_weights_for_sampler", 4, sampling_session_seq_id=2, kind="snapshot")
    assert ephemeral == {"sampling_session_id": "s0:sample:2"}
    assert call("load_weights", 5, path=state["path"], optimizer=True) == {"path": state["path"], "model_id": RUN}
    assert [sent.work for sent in daemon.submitted] == [
        OptimStep(AdamParams(learning_rate=0.5)),
        SaveState("a", user_metadata={"k": "v"}),
        SaveSampler("b"),
        SaveSampler(None, 2),
        LoadState(state["path"], True),
    ]


def test_load_weights_that_creates_a_run(http: Http, daemon: FakeDaemon) -> None:
    """7.3, session-addressed."""
    body = {"session_id": "s0", "model_seq_id": 5, "path": "tinker://x/weights/a", "optimizer": False}
    promise = http.post("load_weights", body | {"base_model": None, "optimizer_config": {"type": "adamw"}})
    assert http.future(promise).json()["model_id"] == "s0:train:5"
    assert daemon.loads == [("s0", 5, LoadState("tinker://x/weights/a", False), None, {})]


@pytest.mark.parametrize(
    "address",
    [{}, {"session_id": "s0"}, {"model_id": RUN, "seq_id": 1, "session_id": "s0", "model_seq_id": 1}],
)
def test_load_weights_wants_exactly_one_address(http: Http, address: dict[str, Any]) -> None:
    answer = http.post("load_weights", {"path": "x", "optimizer": False} | address)
    assert answer.status_code == 400
    assert "not both" in answer.json()["detail"]


def test_weights_info(http: Http) -> None:
    """7.4."""
    path = http.future(http.post("save_weights", {"model_id": RUN, "seq_id": 1, "path": "a"})).json()["path"]
    assert http.post("weights_info", {"tinker_path": path}).json() == {
        "base_model": MODEL,
        "is_lora": True,
        "lora_rank": 8,
        "train_attn": True,
        "train_mlp": True,
        "train_unembed": True,
        "optimizer_config": {"type": "adamw"},
    }
    assert http.post("weights_info", {"tinker_path": "tinker://a/weights/b"}).status_code == 404


# ---- sampling ----


def test_sampling(http: Http, daemon: FakeDaemon) -> None:
    body = {"session_id": "s0", "sampling_session_seq_id": 1, "base_model": MODEL, "model_path": None}
    sampler = http.post("create_sampling_session", body).json()["sampling_session_id"]
    assert http.get(f"samplers/{sampler}").json() == {"sampler_id": sampler, "base_model": MODEL, "model_path": None}
    seq = 999_999_999_000_000_007  # 6.2: needs 64 bits
    promise = http.post(
        "asample",
        {
            "sampling_session_id": sampler,
            "seq_id": seq,
            "num_samples": 2,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]},
            "sampling_params": {"max_tokens": 3},
            "prompt_logprobs": True,
        },
    )
    request = promise.json()["request_id"]
    assert promise.json()["sample_sequence_ids"] == [f"{request}:0", f"{request}:1"]  # T14
    got = deserialize_sample_response(http.future(promise).content)
    assert [sequence.tokens for sequence in got.sequences] == [[3, 4, 5]] * 2
    assert got.prompt_logprobs == [None, -0.5]
    as_json = http.future(promise, "application/json").json()
    assert as_json["sequences"][0] == {"stop_reason": "length", "tokens": [3, 4, 5], "logprobs": [-0.5] * 3}
    assert daemon.samples[0][1] == seq


# ---- futures ----


def test_pending_is_408_with_the_queue_state(http: Http, daemon: FakeDaemon) -> None:
    """4.3, T6: held for the long poll's time, then asked again."""
    request = daemon.hold(RequestId("r1"))
    answer = http.post("retrieve_future", {"request_id": request, "allow_metadata_only": True})
    assert answer.status_code == 408
    assert answer.json() == {
        "type": "try_again",
        "request_id": "r1",
        "queue_state": "paused_capacity",
        "queue_state_reason": "loading org/tiny",
    }
    daemon.release(request, {"metrics": {}})
    for _ in range(2):  # T43: results stay
        assert http.post("retrieve_future", {"request_id": request}).json() == {"metrics": {}}


def test_unknown_future_is_410(http: Http) -> None:
    assert http.post("retrieve_future", {"request_id": "nope"}).status_code == 410
    assert http.post("retrieve_future", {}).status_code == 400


def test_a_result_that_comes_while_a_client_waits(daemon: FakeDaemon) -> None:
    app = create_app(daemon.as_daemon, server_settings(long_poll_seconds=20.0), KEY)
    request = daemon.hold(RequestId("r1"))

    async def scenario() -> tuple[int, Any]:
        poll = asyncio.create_task(Http(app).acall("POST", "retrieve_future", json={"request_id": request}))
        await asyncio.sleep(0.05)
        daemon.release(request, {"path": "x"})
        answer = await poll
        return answer.status_code, answer.json()

    assert asyncio.run(scenario()) == (200, {"path": "x"})


def test_a_client_that_hangs_up_leaves_nothing_behind(daemon: FakeDaemon) -> None:
    app = create_app(daemon.as_daemon, server_settings(long_poll_seconds=20.0), KEY)
    request = daemon.hold(RequestId("r1"))
    hung_up = asyncio.Event()
    sent: list[Any] = []

    async def scenario() -> None:
        messages = [{"type": "http.request", "body": b'{"request_id": "r1"}', "more_body": False}]

        async def receive() -> dict[str, Any]:
            if messages:
                return messages.pop()
            await hung_up.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        headers = [(b"host", b"localhost"), (b"x-api-key", KEY.encode())]
        scope = {"type": "http", "method": "POST", "path": "/api/v1/retrieve_future", "headers": headers}
        scope |= {"query_string": b"", "root_path": "", "http_version": "1.1"}
        call = asyncio.create_task(app(scope, receive, send))
        await asyncio.sleep(0.05)
        assert daemon.waiting == 1
        hung_up.set()
        await asyncio.wait_for(call, 2)
        assert daemon.waiting == 0
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(scenario())
    assert daemon.held == {request}


# ---- bad bodies ----


def failed(http: Http, answer: Any) -> str:
    """The error of a call whose future failed with category user, HTTP being 200 all along (O6)."""
    result = http.future(answer)
    assert result.status_code == 200
    assert result.json()["category"] == "user"
    return result.json()["error"]


def test_t1_bad_content_fails_the_future_and_the_run_goes_on(http: Http, daemon: FakeDaemon) -> None:
    bad = [
        ("forward_backward", proto_body(1, loss="ppo2"), PROTO, "loss_fn 'ppo2' is unknown"),
        ("forward_backward", proto_body(2)[:-10], PROTO, "cut short or damaged"),
        ("forward_backward", proto_body(3, tokens=0), PROTO, "data[0].model_input has 0 tokens"),
        ("optim_step", {"model_id": RUN, "seq_id": 4, "adam_params": {"eps": "x"}}, {}, "adam_params.eps should be a"),
        ("optim_step", {"model_id": RUN, "seq_id": 5, "adam_params": {"beta1": 2}}, {}, "beta1 must be in [0, 1)"),
        ("save_weights", {"model_id": RUN, "seq_id": 6, "path": "a/b"}, {}, "is no checkpoint name"),
        ("save_weights", {"model_id": RUN, "seq_id": 7, "path": "a", "ttl_seconds": 1}, {}, "ttl_seconds must lie in"),
        ("save_weights_for_sampler", {"model_id": RUN, "seq_id": 8}, {}, "path (a name) or sampling_session_seq_id"),
        ("load_weights", {"model_id": RUN, "seq_id": 9, "path": 3}, {}, "path should be a valid string, got 3"),
    ]
    for path, body, headers, message in bad:
        assert message in failed(http, http.post(path, body, headers=headers))
    assert [sent.seq for sent in daemon.submitted] == list(range(1, 10))
    assert http.future(http.post("forward_backward", proto_body(10), headers=PROTO)).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "headers"),
    [
        ("forward_backward", b"", PROTO),
        ("forward_backward", b"\xff\xff\xff", PROTO),
        ("forward_backward", proto_body()[:5], PROTO),
        ("forward_backward", b"{", {}),
        ("optim_step", b'{"model_id": "s0:train:0"', {}),
        ("optim_step", {"model_id": RUN}, {}),
        ("optim_step", {"model_id": RUN, "seq_id": 0}, {}),
        ("optim_step", {"model_id": RUN, "seq_id": -1}, {}),
        ("create_model", {"session_id": "s0"}, {}),
        ("create_model", {"session_id": "s0", "model_seq_id": 0, "base_model": "other"}, {}),
        ("asample", {"prompt": {"chunks": []}}, {}),
        ("forward_backward", b"no zstd", PROTO | {"content-encoding": "zstd"}),
        ("forward_backward", b"x", PROTO | {"content-encoding": "br"}),
    ],
)
def test_t3_what_cannot_be_read_is_a_400_with_a_body(
    http: Http, daemon: FakeDaemon, path: str, body: Any, headers: dict[str, str]
) -> None:
    answer = http.post(path, body, headers=headers)
    assert answer.status_code == 400
    assert answer.json()["detail"]
    assert int(answer.headers["content-length"]) > 0
    assert not daemon.submitted


def test_bad_samples_are_400(http: Http) -> None:
    body = {"session_id": "s0", "sampling_session_seq_id": 1}
    sampler = http.post("create_sampling_session", body).json()["sampling_session_id"]
    good = {"sampling_session_id": sampler, "seq_id": 0, "prompt": {"chunks": [{"tokens": [1]}]}}
    bad = [
        ({"sampling_params": {"temperature": -1}}, "temperature must be a finite number >= 0"),
        ({"sampling_params": {"max_tokens": 256}}, "the model's context holds 256"),
        ({"prompt": {"chunks": [{"tokens": [5000]}]}}, "token id 5000 at position 0; legal: 0..999"),
        ({"num_samples": 0}, "num_samples must lie in"),
    ]
    for fields, message in bad:
        answer = http.post("asample", good | fields)
        assert answer.status_code == 400
        assert message in answer.json()["detail"]
    assert http.post("asample", good | {"sampling_session_id": "x"}).status_code == 404


def test_a5_bad_ranks_fail_the_future(http: Http) -> None:
    base = {"session_id": "s0", "base_model": MODEL}
    low = http.post("create_model", base | {"model_seq_id": 1, "lora_config": {"rank": -1}})
    assert "must lie in 1..64, got -1" in failed(http, low)
    part = http.post("create_model", base | {"model_seq_id": 2, "lora_config": {"rank": 0, "train_attn": False}})
    assert "rank 0 trains all parameters" in failed(http, part)
    big = http.post("create_model", base | {"model_seq_id": 3, "lora_config": {"rank": 65}})
    assert "must lie in 1..64, got 65" in failed(http, big)


def test_unknown_things_are_404(http: Http) -> None:
    assert http.post("optim_step", {"model_id": "x:train:0", "seq_id": 1}).status_code == 404
    assert http.post("get_info", {"model_id": "x"}).status_code == 404
    assert http.get("samplers/x").status_code == 404
    assert http.get("training_runs/x").status_code == 404


@pytest.mark.parametrize("announced", [True, False])
def test_a_body_that_is_too_large_fails_its_future(http: Http, daemon: FakeDaemon, announced: bool) -> None:
    """Run and seq are in its first bytes, so the seq is used up and nothing after it waits (O5)."""
    body = proto_body(tokens=200_000)
    assert len(body) > 1 << 20

    async def parts() -> Any:
        for at in range(0, len(body), 60_000):
            yield body[at : at + 60_000]

    headers = PROTO | ({"content-length": str(len(body))} if announced else {})
    answer = http.call("POST", "forward_backward", content=parts(), headers=headers)
    assert "the body is over 1048576 bytes" in failed(http, answer)
    assert isinstance(daemon.submitted[0].work, TooLarge)
    assert daemon.submitted[0].raw.body == b""


def test_a_zstd_bomb_fails_its_future(http: Http, daemon: FakeDaemon) -> None:
    packed = zstandard.compress(proto_body() + b"\0" * (1 << 22))
    assert len(packed) < 1000
    answer = http.post("forward_backward", packed, headers=PROTO | {"content-encoding": "zstd"})
    assert "the decompressed body is over 1048576 bytes" in failed(http, answer)


def test_other_bodies_that_are_too_large_are_413(http: Http) -> None:
    for path in ("asample", "create_session", "optim_step"):
        answer = http.post(path, b" " * (1 << 21))
        assert answer.status_code == 413
        assert "the body is over 1048576 bytes" in answer.json()["detail"]
