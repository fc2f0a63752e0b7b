"""What each call is to someone who passes it on, and by what it is known again (tinker-protocol 4.7)."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import zstandard

from openrl.backends.remote.calls import Call, Family, Key, Repeat, early_key, is_kept, key_of, repeatable
from openrl.wire import tinker_pb2 as pb

RUN = "s1:train:0"


def call(name: str, method: str = "POST", **headers: str) -> Call:
    named = {"content_type": "application/json"} | headers
    raw = tuple((key.replace("_", "-").encode(), value.encode()) for key, value in named.items())
    return Call(method, f"/api/v1/{name}", f"/api/v1/{name}".encode(), raw)


def passes(datums: int) -> bytes:
    request = pb.ForwardBackwardRequest(model_id=RUN, seq_id=7, loss_fn="cross_entropy", forward_only=True)
    for i in range(datums):
        chunk = request.data.add().model_input.add()
        chunk.encoded_text.tokens = np.random.default_rng(i).integers(0, 50_000, 200, np.int32).tobytes()
    return request.SerializeToString()


def key(made: Call, body: dict[str, Any] | bytes) -> Key | None:
    return key_of(made, body if isinstance(body, bytes) else json.dumps(body).encode(), 1 << 20)


@pytest.mark.parametrize(
    ("name", "body", "expected"),
    [
        ("optim_step", {"model_id": RUN, "seq_id": 3, "adam_params": {}}, Key(Family.RUN, RUN, 3)),
        ("forward", {"model_id": RUN, "seq_id": 3}, Key(Family.RUN, RUN, 3)),
        ("load_weights", {"model_id": RUN, "seq_id": 1, "path": "x"}, Key(Family.RUN, RUN, 1)),
        ("load_weights", {"session_id": "s1", "model_seq_id": 2, "path": "x"}, Key(Family.MAKE, "s1:train", 2)),
        ("create_model", {"session_id": "s1", "model_seq_id": 2}, Key(Family.MAKE, "s1:train", 2)),
        (
            "create_sampling_session",
            {"session_id": "s1", "sampling_session_seq_id": 0},
            Key(Family.MAKE, "s1:sample", 0),
        ),
        ("create_custom_loss", {"session_id": "s1", "custom_loss_seq_id": 1}, Key(Family.MAKE, "s1:loss", 1)),
        ("asample", {"sampling_session_id": "s1:sample:0", "seq_id": 5}, Key(Family.SAMPLE, "s1:sample:0", 5)),
        ("copy_weights", {"session_id": "s1", "model_seq_id": 4}, Key(Family.MAKE, "s1:train", 4)),
        ("unload_model", {"model_id": RUN}, None),  # without a number it cannot be known again
        ("create_session", {}, None),
    ],
)
def test_keys(name: str, body: dict[str, Any], expected: Key | None) -> None:
    assert is_kept(call(name))
    assert key(call(name), body) == expected


def test_an_ephemeral_save_is_known_by_its_run_and_number() -> None:
    """Its other number changes with each of the client's outer tries (4.7)."""
    first, second = ({"model_id": RUN, "seq_id": 9, "sampling_session_seq_id": n} for n in (0, 1))
    assert key(call("save_weights_for_sampler"), first) == key(call("save_weights_for_sampler"), second)


@pytest.mark.parametrize("name", ["create_session", "copy_weights"])
def test_keys_in_the_header(name: str) -> None:
    assert key(call(name, x_idempotency_key="k1"), {"destination_project_id": "p"}) == Key(Family.MAKE, name, "k1")


def test_protobuf_plain_and_compressed() -> None:
    body = passes(3)
    plain = call("forward_backward", content_type="application/x-protobuf")
    packed = call("forward_backward", content_type="application/x-protobuf", content_encoding="zstd")
    assert key(plain, body) == Key(Family.RUN, RUN, 7)
    assert key(packed, zstandard.compress(body)) == Key(Family.RUN, RUN, 7)


def test_run_and_number_are_found_in_the_beginning_of_a_body() -> None:
    body = passes(2000)
    plain = call("forward_backward", content_type="application/x-protobuf")
    packed = call("forward_backward", content_type="application/x-protobuf", content_encoding="zstd")
    assert early_key(plain, body[:64]) == Key(Family.RUN, RUN, 7)
    assert early_key(packed, zstandard.compress(body)[: 200 << 10]) == Key(Family.RUN, RUN, 7)
    assert early_key(plain, body[:8]) is None
    assert early_key(packed, zstandard.compress(body)[:100]) is None
    assert early_key(call("forward_backward"), b'{"model_id": "s1:train:0", "seq_id": 7') is None


@pytest.mark.parametrize("body", [b"", b"{", b"\x00\xff", b'{"model_id": 3}', b'{"model_id": "m", "seq_id": "1"}'])
def test_an_unreadable_body_has_no_key(body: bytes) -> None:
    assert key(call("optim_step"), body) is None
    assert key(call("forward_backward", content_type="application/x-protobuf"), body) is None
    assert key(call("asample", content_encoding="zstd"), body) is None


@pytest.mark.parametrize(
    ("method", "name", "expected"),
    [
        ("GET", "training_runs", Repeat.YES),
        ("DELETE", "training_runs/r/checkpoints/weights/x", Repeat.YES),
        ("PUT", "sessions/s/project", Repeat.YES),
        ("POST", "session_heartbeat", Repeat.YES),
        ("POST", "training_runs/r/checkpoints/weights/x/publish", Repeat.YES),
        ("POST", "sessions/s/finish", Repeat.YES),
        ("POST", "unload_model", Repeat.NO),
        ("POST", "something_new", Repeat.NO),
    ],
)
def test_what_may_be_repeated(method: str, name: str, expected: Repeat) -> None:
    assert repeatable(call(name, method)) is expected
