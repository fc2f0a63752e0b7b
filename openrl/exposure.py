"""Whether a server may be reached by others: only with keys that were made for them, or when told so in words."""

from __future__ import annotations

import time
from pathlib import Path

from openrl.errors import SettingsError
from openrl.keys.file import read_keys
from openrl.settings import Resolved, is_loopback
from openrl.store import keys
from openrl.store.reading import FILE, reading


def check_exposure(resolved: Resolved) -> None:
    """Raises SettingsError for a server that others reach though nobody has a key but the machine's own."""
    server = resolved.settings.server
    filed = [] if server.keys_file is None else read_keys(server.keys_file)  # a bad one stops the start in any case
    if is_loopback(server.host) or server.shared_key == "allow" or resolved.api_key is not None:
        return
    proxied = resolved.settings.engine.backend == "remote"  # a proxy knows the machine's own key alone
    if not proxied and (filed or _are_kept(resolved.settings.data_dir)):
        return
    raise SettingsError(
        f"server.host {server.host!r} is reached from other machines, but no API keys were made: all callers would "
        "share the machine's own, which opens and changes everything.",
        "Make one for each user (openrl keys create --owner NAME), name a --keys-file, or choose the machine's own in "
        "OPENRL_API_KEY; to share one key knowingly, add --allow-shared-key.",
    )


def _are_kept(data_dir: Path) -> bool:
    if not (data_dir / FILE).is_file():
        return False
    with reading(data_dir) as db:
        return keys.any_live(db, time.time())
