"""Signed URLs in the remote's answers lead back through us: the client may not reach the remote itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from openrl.backends.remote.calls import Call, is_kept
from openrl.backends.remote.headers import through_us as own_url
from openrl.backends.remote.link import Link, Reply
from openrl.codec import decode_json, encode_json
from openrl.errors import BadRequest

_IN_BODY = ("/archive", "/external_weights_urls", "/trace_export")


def plainly(call: Call) -> Call:
    """A call whose answer will be read here must not be answered compressed."""
    if not is_kept(call) and not call.name.endswith(_IN_BODY):
        return call
    return replace(call, headers=tuple(header for header in call.headers if header[0] != b"accept-encoding"))


def through_us(link: Link, call: Call, reply: Reply, own_base: str) -> Reply:
    """The reply with its signed URLs as this server's: in `Location`, and in the bodies that hold some (7.6, 7.7,
    8.6)."""

    def owned(url: str) -> str:
        return own_url(url, link.url(), link.name, own_base)

    headers = tuple(
        (name, owned(value.decode("latin-1")).encode("latin-1") if name == b"location" else value)
        for name, value in reply.headers
    )
    reply = replace(reply, headers=headers)
    if reply.status == 200 and call.name.endswith(_IN_BODY):
        reply.content = _owned_body(reply.content, owned)
    return reply


def _owned_body(content: bytes, owned: Callable[[str], str]) -> bytes:
    try:
        fields = decode_json(dict[str, Any], content)
    except BadRequest:
        return content
    if isinstance(fields.get("url"), str):
        fields["url"] = owned(fields["url"])
    urls = fields.get("urls")
    if isinstance(urls, dict):
        fields["urls"] = {name: owned(url) if isinstance(url, str) else url for name, url in urls.items()}
    return encode_json(fields)
