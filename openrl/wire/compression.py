"""zstd request bodies (`Content-Encoding: zstd`), which a client sends when its config asks for it."""

from __future__ import annotations

import zstandard

from openrl.errors import BadRequest


def inflate(body: bytes, limit: int) -> bytes:
    """The decompressed body, cut off after `limit + 1` bytes: repetitive data expands thousands of times.

    A frame that is cut short gives what it holds. Raises `BadRequest` for what is no zstd.
    """
    try:
        with zstandard.ZstdDecompressor().stream_reader(body) as reader:
            return reader.read(limit + 1)
    except zstandard.ZstdError as error:
        raise BadRequest(f"the body is not valid zstd, though Content-Encoding says so: {error}") from None
