"""https: the server's certificate, and how programs of the same machine trust it."""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path

from openrl.errors import SettingsError
from openrl.private_file import write

log = logging.getLogger(__name__)

_COPY = "tls_cert.pem"
_EVERY_SECONDS = 30.0


def check_pair(cert: Path, key: Path) -> None:
    """Raises SettingsError for files that are no certificate and its key."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key)
    except (ssl.SSLError, OSError) as error:
        raise SettingsError(
            f"server.tls_cert {cert} and server.tls_key {key} cannot be used: {error}.",
            "They are PEM files; the certificate comes first in its file, its issuers after it.",
        ) from error


async def follow(context: ssl.SSLContext, cert: Path, key: Path) -> None:
    """Take up new files for new connections, as something that renews certificates puts them there."""
    read_as = _stamp(cert, key)
    while True:
        await asyncio.sleep(_EVERY_SECONDS)
        if (stamp := _stamp(cert, key)) == read_as:
            continue
        read_as = stamp
        try:
            check_pair(cert, key)
            context.load_cert_chain(cert, key)
            log.info("a new certificate is in use")
        except SettingsError as error:
            log.error("the certificate stays as it was: %s", error)


def _stamp(*files: Path) -> tuple[float, ...]:
    try:
        return tuple(file.stat().st_mtime for file in files)
    except OSError:
        return ()


def leave_copy(data_dir: Path, cert: Path | None) -> None:
    """Lay the certificate into the data folder, where commands of this machine find it."""
    if cert is None:
        (data_dir / _COPY).unlink(missing_ok=True)
    else:
        write(data_dir / _COPY, cert.read_text())


def trusting(data_dir: Path | None, ca_file: Path | None) -> ssl.SSLContext:
    """What a command trusts: `ca_file`, else the certificate of the server whose data folder this is, else what this
    machine's Python trusts.

    A certificate from the data folder is trusted itself, whatever name it is for: who shows it has its key.
    """
    context = ssl.create_default_context()
    if ca_file is not None:
        try:
            context.load_verify_locations(ca_file)
        except (ssl.SSLError, OSError) as error:
            raise SettingsError(f"{ca_file} holds no certificates: {error}.") from error
    elif data_dir is not None and (own := data_dir / _COPY).is_file():
        context.load_verify_locations(own)
        context.check_hostname = False
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context
