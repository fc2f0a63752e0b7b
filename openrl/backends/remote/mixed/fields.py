"""What is looked at of bodies in JSON to know whose a call is, and of answers to know what a remote gave."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from openrl.backends.remote.mixed.book import SCHEME

# Which field says what a call is about.
ABOUT: Mapping[str, str] = {
    "get_info": "model_id",
    "unload_model": "model_id",
    "forward": "model_id",
    "forward_backward": "model_id",
    "optim_step": "model_id",
    "save_weights": "model_id",
    "save_weights_for_sampler": "model_id",
    "save_weights_external": "model_id",
    "asample": "sampling_session_id",
    "join_sampling_session": "sampling_session_id",
    "retrieve_future": "request_id",
    "cancel_future": "request_id",
    "weights_info": "tinker_path",
}
# And of calls that make something in a session out of a checkpoint.
FROM: Mapping[str, str] = {
    "load_weights": "path",
    "create_sampling_session": "model_path",
    "copy_weights": "source_path",
}


@dataclass(frozen=True, slots=True)
class Target:
    sampling_session_id: str | None = None


@dataclass(frozen=True, slots=True)
class Fields:
    """Of a request."""

    model_id: str | None = None
    sampling_session_id: str | None = None
    request_id: str | None = None
    tinker_path: str | None = None
    source_path: str | None = None
    session_id: str | None = None
    model_seq_id: int | None = None
    base_model: str | None = None
    path: str | None = None
    model_path: str | None = None
    target: Target | None = None


@dataclass(frozen=True, slots=True)
class Given:
    """Of an answer."""

    request_id: str | None = None
    sampling_session_id: str | None = None
    model_id: str | None = None
    path: str | None = None
    tinker_path: str | None = None

    def owned(self) -> list[str]:
        """What the remote has from now on."""
        runs = [
            path.removeprefix(SCHEME).partition("/")[0]
            for path in (self.path, self.tinker_path)
            if path is not None and path.startswith(SCHEME)
        ]
        return [identifier for identifier in (self.sampling_session_id, self.model_id, *runs) if identifier]


@dataclass(frozen=True, slots=True)
class Found:
    """The remote that gets a call, and the fields that are named differently there."""

    remote: str
    changes: dict[str, Any]
