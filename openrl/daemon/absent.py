"""What is said of things that do not exist here. Of what belongs to someone else the same is said, word for word."""

from __future__ import annotations

from openrl.errors import Gone, NotFound


def session(identity: str) -> NotFound:
    return NotFound(f"session {identity!r} does not exist on this server.")


def run(identity: str) -> NotFound:
    return NotFound(f"training run {identity!r} does not exist on this server.")


def sampler(identity: str) -> NotFound:
    return NotFound(f"sampling session {identity!r} does not exist on this server.")


def checkpoint(path: str) -> NotFound:
    return NotFound(f"checkpoint {path!r} does not exist on this server.")


def request(identity: str) -> Gone:
    return Gone(f"request {identity!r} is unknown, or its result has expired.")
