"""What each call of the API is to someone who passes it on: can it be repeated, and by what is a repetition known.

The protocol gives every call that starts work something by which a server knows it again (4.7): the numbers in its
body, or the idempotency key in its header. Such a call is *kept* and sent again until it is answered. All else either
changes nothing when it is repeated, or is left to the client to repeat.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from openrl.codec import decode_json
from openrl.errors import BadRequest
from openrl.wire import proto
from openrl.wire.bodies import is_protobuf
from openrl.wire.compression import inflate

API = "/api/v1/"

Headers = tuple[tuple[bytes, bytes], ...]  # names in lower case


class Family(Enum):
    """What a kept call is about."""

    RUN = "run"  # ordered requests of a run: a number that never arrives holds up all later ones (O5, O7)
    SAMPLE = "sample"
    MAKE = "make"  # sessions, runs, samplers, custom losses, copies


class Repeat(Enum):
    """What may be done with a call that is not kept, when its answer was lost."""

    YES = "yes"
    NO = "no"  # only if it was never sent


@dataclass(frozen=True, slots=True)
class Key:
    """By which a kept call is known again. For a run or sampler, `scope` is its id and `number` the seq_id."""

    family: Family
    scope: str
    number: int | str


@dataclass(frozen=True, slots=True)
class Call:
    """A request without its body. `target` is the raw path with the query."""

    method: str
    path: str
    target: bytes
    headers: Headers

    def header(self, name: bytes) -> str:
        """A header's value, "" if it is not there."""
        return next((value.decode("latin-1") for key, value in self.headers if key == name), "")

    @property
    def name(self) -> str:
        """The path below the API's root, "" for paths elsewhere."""
        return self.path.removeprefix(API) if self.path.startswith(API) else ""


# ---- bodies, as far as they are looked at ----


@dataclass(frozen=True, slots=True)
class _OfRun:
    model_id: str
    seq_id: int


@dataclass(frozen=True, slots=True)
class _OfSampler:
    sampling_session_id: str
    seq_id: int


@dataclass(frozen=True, slots=True)
class _NewRun:
    session_id: str
    model_seq_id: int


@dataclass(frozen=True, slots=True)
class _NewSampler:
    session_id: str
    sampling_session_seq_id: int


@dataclass(frozen=True, slots=True)
class _NewLoss:
    session_id: str
    custom_loss_seq_id: int


_TRAINING = frozenset(
    {
        "forward",
        "forward_backward",
        "optim_step",
        "save_weights",
        "save_weights_for_sampler",
        "save_weights_external",
        "load_weights",
        "unload_model",
    }
)
_MAKERS: Mapping[str, type[_NewRun] | type[_NewSampler] | type[_NewLoss]] = {
    "create_model": _NewRun,
    "load_weights": _NewRun,
    "copy_weights": _NewRun,
    "create_sampling_session": _NewSampler,
    "create_custom_loss": _NewLoss,
}
_BY_HEADER = frozenset({"create_session", "copy_weights"})
_KEPT = _TRAINING | frozenset(_MAKERS) | _BY_HEADER | {"asample"}
# POSTs that may simply be sent again: they read, or say what is so already. A clone's number that is lost on the way
# stays unused, which is allowed (6.2).
_REPEATABLE_POSTS = frozenset(
    {
        "client/config",
        "client/dynamic_config",
        "session_heartbeat",
        "sessions/search",
        "get_info",
        "weights_info",
        "join_sampling_session",
        "cancel_future",
        "uploads",  # the same announcement finds the same upload again
    }
)
_REPEATABLE_ENDINGS = ("/finish", "/publish", "/commit")


def is_kept(call: Call) -> bool:
    return call.method == "POST" and call.name in _KEPT


def repeatable(call: Call) -> Repeat:
    """For calls that are not kept."""
    if call.method in ("GET", "HEAD", "PUT", "DELETE") or call.name in _REPEATABLE_POSTS:
        return Repeat.YES
    return Repeat.YES if call.name.endswith(_REPEATABLE_ENDINGS) or call.path.startswith("/hf/") else Repeat.NO


def early_key(call: Call, head: bytes) -> Key | None:
    """The key of a training request in protobuf, from its first bytes: run and number come first there. None if they
    are not all here, or if it is another kind of body, whose key is known once all of it is here."""
    if call.name not in ("forward", "forward_backward") or not is_protobuf(call.header(b"content-type")):
        return None
    try:
        address = proto.read_address(_plain(call, head, len(head) * 4))
    except BadRequest:
        return None
    return Key(Family.RUN, address.model_id, address.seq_id)


def key_of(call: Call, body: bytes, limit: int) -> Key | None:
    """The key of a call that is kept, from its whole body (or what there is of it); None if it has none, and so cannot
    be kept. `limit` bounds the decompressed size."""
    try:
        return _key(call, _plain(call, body, limit))
    except BadRequest:
        return None


def _plain(call: Call, body: bytes, limit: int) -> bytes:
    encoding = call.header(b"content-encoding").strip().lower()
    return inflate(body, limit) if encoding == "zstd" else body


def _key(call: Call, body: bytes) -> Key | None:
    if is_protobuf(call.header(b"content-type")):
        address = proto.read_address(body)
        return Key(Family.RUN, address.model_id, address.seq_id)
    if call.name == "asample":
        sample = decode_json(_OfSampler, body)
        return Key(Family.SAMPLE, sample.sampling_session_id, sample.seq_id)
    return _run_key(call, body) or _maker_key(call, body) or _header_key(call)


def _run_key(call: Call, body: bytes) -> Key | None:
    if call.name not in _TRAINING:
        return None
    try:
        found = decode_json(_OfRun, body)
    except BadRequest:
        return None
    return Key(Family.RUN, found.model_id, found.seq_id)


def _maker_key(call: Call, body: bytes) -> Key | None:
    kind = _MAKERS.get(call.name)
    if kind is None:
        return None
    try:
        found = decode_json(kind, body)
    except BadRequest:
        return None
    match found:
        case _NewRun(session, number):
            what = "train"
        case _NewSampler(session, number):
            what = "sample"
        case _NewLoss(session, number):
            what = "loss"
    return Key(Family.MAKE, f"{session}:{what}", number)


def _header_key(call: Call) -> Key | None:
    given = call.header(b"x-idempotency-key")
    return Key(Family.MAKE, call.name, given) if given and call.name in _BY_HEADER else None
