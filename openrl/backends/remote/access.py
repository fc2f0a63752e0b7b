"""Access tokens of other accounts in requests (7.3, 7.5): one that is this server's own key means the remote's.

A user of this server knows one key, its own. Where a script gives that as the right to read weights, the remote must
not see it: it would refuse it, and it is none of its business.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from openrl.backends.remote.body import Body
from openrl.backends.remote.calls import Call
from openrl.codec import decode_json, encode_json
from openrl.errors import BadRequest

_HEADER = b"x-tinker-weights-access-token"
_FIELD = "weights_access_token"
TAKE_TOKENS = frozenset({"load_weights", "copy_weights"})


async def with_remote_token(call: Call, body: Body, is_own: Callable[[str], bool], key: str) -> tuple[Call, Body]:
    """The call as the remote should see it; `key` is what opens the remote, and `is_own` tells this server's keys."""
    if call.name not in TAKE_TOKENS:
        return call, body
    if is_own(call.header(_HEADER)):
        others = tuple(header for header in call.headers if header[0] != _HEADER)
        call = replace(call, headers=(*others, (_HEADER, key.encode())) if key else others)
    content = await body.content()
    if _FIELD.encode() in content:
        body = _replaced(content, is_own, key) or body
    return call, body


def _replaced(content: bytes, is_own: Callable[[str], bool], key: str) -> Body | None:
    try:
        fields = decode_json(dict[str, Any], content)
    except BadRequest:
        return None
    given = fields.get(_FIELD)
    if not isinstance(given, str) or not is_own(given):
        return None
    others = {name: value for name, value in fields.items() if name != _FIELD}
    return Body(encode_json(others | {_FIELD: key} if key else others))
