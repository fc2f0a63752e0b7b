"""What sessions may have of a device: weights and caps from the settings."""

from __future__ import annotations

from fnmatch import fnmatchcase

from openrl.daemon.sessions import Sessions
from openrl.errors import NotFound
from openrl.settings import SharingSettings
from openrl.store.records import DEFAULT_PROJECT, Session
from openrl.types import SessionId


def labels(session: Session) -> tuple[str, ...]:
    """What the patterns of `sharing.weights` are compared with: the session's owner, its project and its tags.

    With their kind in front: project and tags are a client's own words, and must not pass for an owner.
    """
    tags = (f"tag:{tag}" for tag in session.tags)
    return (f"owner:{session.owner}", f"project:{session.project_id or DEFAULT_PROJECT}", *tags)


class Entitlements:
    """Answers for each session; the settings do not change while the daemon runs, but a session's project may."""

    def __init__(self, sessions: Sessions, settings: SharingSettings) -> None:
        self._sessions = sessions
        self._settings = settings

    def weight(self, session: SessionId) -> float:
        """The weight of the first pattern that matches one of the session's labels, else 1."""
        if not self._settings.weights:
            return 1.0
        try:
            found = labels(self._sessions.get(session))
        except NotFound:  # its runs outlived its row
            return 1.0
        matching = (w for pattern, w in self._settings.weights.items() if any(fnmatchcase(x, pattern) for x in found))
        return next(matching, 1.0)

    def too_many_samples(self, held: int, total: int, sessions: int, limit: int) -> bool:
        """Whether a session that has `held` samples under way may have no further one.

        `total` is that of all, from `sessions` sessions. Above `limit` only those sessions are held back that have
        their equal part of it, so that one session's flood does not shut out the others.
        """
        most = self._settings.max_samples
        return bool(most and held >= most) or (total >= limit and held >= limit / max(1, sessions))
