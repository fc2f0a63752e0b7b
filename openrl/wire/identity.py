"""Who owns everything on a server of one user, in the wire's words."""

from __future__ import annotations

USER = "tml:user:local"
USER_NAME = "local"
EMAIL = "local@localhost"
ORGANIZATION = "local"
