"""Who owns what, in the wire's words."""

from __future__ import annotations

ORGANIZATION = "local"

_URN = "tml:user:"


def user_urn(owner: str) -> str:
    return _URN + owner


def owner_of_urn(urn: str) -> str:
    """The owner that an URN names; what is none names nobody."""
    return urn.removeprefix(_URN) if urn.startswith(_URN) else ""


def email(owner: str) -> str:
    """An owner's address: the SDK wants one."""
    return owner if "@" in owner else f"{owner}@localhost"
