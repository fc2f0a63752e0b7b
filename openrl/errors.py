"""The exception tree: what can go wrong, in words for the person who reads the message.

Classes know nothing of HTTP; `openrl.server.errors` holds the one table that maps them to answers. Two
families matter. *Refusals* are raised before a request is accepted. *Failures* happen to accepted work and
become the `error` and `category` of its future.
"""

from __future__ import annotations

from typing import Literal

Category = Literal["user", "server"]


class OpenRLError(Exception):
    """An error with a message for the user: what is wrong, which values are legal, what to do next."""

    category: Category = "server"

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} {self.hint}".rstrip()

    def __reduce__(self) -> tuple[type[OpenRLError], tuple[str, str]]:
        return type(self), (self.message, self.hint)


class BadRequest(OpenRLError):
    """The caller sent something that can never work; repeating it will not help."""

    category: Category = "user"


class Unauthorized(OpenRLError):
    """The API key is missing or wrong."""

    category: Category = "user"


class InvalidToken(Unauthorized):
    """A token that has expired or is not this server's: the client should exchange its key for a new one."""


class Forbidden(OpenRLError):
    """The API key is good, but not for this."""

    category: Category = "user"


class NotFound(OpenRLError):
    """The session, run, sampler, checkpoint or model does not exist."""

    category: Category = "user"


class Gone(OpenRLError):
    """It existed once (an expired result, a finished session) and will not come back."""

    category: Category = "user"


class TooLarge(OpenRLError):
    """The body is larger than the server takes."""

    category: Category = "user"


class TooSlow(OpenRLError):
    """The body did not arrive in time."""

    category: Category = "user"


class QuotaExceeded(BadRequest):
    """The owner of the key has used up what it may have."""


class Conflict(OpenRLError):
    """A checkpoint of that name exists and `overwrite` was not given."""

    category: Category = "user"


class Cancelled(OpenRLError):
    """The client gave the request up before it was done."""

    category: Category = "user"


class Busy(OpenRLError):
    """The server is full for the moment; try again soon."""


class NotReady(OpenRLError):
    """The server is starting or stopping, or a model is still loading; try again soon."""


class OutOfMemory(OpenRLError):
    """The device ran out of memory on this request, also after retrying with less at a time."""


class BackendFault(OpenRLError):
    """The backend failed in a way it should not have: a bug or a broken machine."""


class WorkerDied(OpenRLError):
    """The worker process ended while it had work; the daemon starts another and recovers the runs."""


class SettingsError(OpenRLError):
    """A setting has an unknown key or an illegal value; the start is refused."""

    category: Category = "user"


class ModelError(OpenRLError):
    """A model cannot be found, fetched, converted, or served by this backend or machine."""

    category: Category = "user"


class NoRoom(ModelError):
    """A model does not fit into the memory that is there now."""
