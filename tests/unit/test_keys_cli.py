"""`openrl keys` with and without a server, https, and which servers may be reached by others."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from pathlib import Path
from typing import Any

import pytest
import trustme
from typer.testing import CliRunner

from openrl import tls
from openrl.errors import OpenRLError, SettingsError
from openrl.exposure import check_exposure
from openrl.keys.key import digest
from openrl.server.connections import fitting_connections
from openrl.settings import Resolved, load
from openrl.tls import check_pair, leave_copy, trusting
from openrl_cli.main import app

KEY = "tml-" + "k" * 40


def run(*arguments: str) -> Any:
    """A command's JSON, or its text."""
    done = CliRunner().invoke(app, ["keys", *arguments])
    if isinstance(done.exception, OpenRLError):
        raise done.exception
    assert done.exit_code == 0, (done.output, done.exception)
    return json.loads(done.stdout) if "--json" in arguments else done.stdout


# ---- without a server ----


def test_keys_without_a_server(tmp_path: Path) -> None:
    where = ["--data-dir", str(tmp_path)]
    quotas = ["--runs", "2", "--tokens-per-day", "1000", "--checkpoint-bytes", "5GB"]
    scopes = ["--scope", "use", "--scope", "read"]
    made = run("create", "--owner", "alice", *scopes, "--expires", "30d", *quotas, *where, "--json")
    assert made["owner"] == "alice"
    assert made["scopes"] == ["read", "use"]
    assert (made["runs"], made["tokens_per_day"], made["checkpoint_bytes"]) == (2, 1000, 5 * 10**9)
    assert made["expires_at"] == pytest.approx(time.time() + 30 * 86400, abs=60)
    assert made["id"] == digest(made["api_key"])[:12]
    printed = run("create", "--owner", "bob", *where)
    assert printed.strip().startswith("tml-"), "the key alone, so that a script can take it"
    listed = run("list", *where, "--json")
    assert [key["owner"] for key in listed] == ["alice", "bob"]
    assert not any("api_key" in key for key in listed)
    assert "revoked" in run("revoke", made["id"], *where)
    assert run("list", *where, "--json")[0]["revoked_at"] is not None
    assert "good" in run("list", *where)
    assert made["api_key"].encode() not in b"".join(file.read_bytes() for file in tmp_path.glob("openrl.sqlite*"))


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["create", "--owner", "a b"], "owner"),
        (["create", "--owner", "a", "--scope", "root"], "use, read, admin"),
        (["create", "--owner", "a", "--expires", "soon"], "30d"),
        (["create", "--owner", "a", "--expires", "2001-01-01"], "past"),
        (["create", "--owner", "a", "--checkpoint-bytes", "many"], "10GB"),
        (["create", "--owner", "local", "--runs", "1"], "no quotas"),
        (["revoke", "0123456789ab"], "does not exist"),
    ],
)
def test_what_cannot_be_is_said(tmp_path: Path, arguments: list[str], part: str) -> None:
    with pytest.raises(OpenRLError, match=part):
        run(*arguments, "--data-dir", str(tmp_path))


# ---- who may be reached ----


def resolved(tmp_path: Path, host: str = "0.0.0.0", **flags: object) -> Resolved:
    return load({"data_dir": str(tmp_path), "server.host": host, **flags})


def test_beyond_this_machine_only_with_keys_or_when_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENRL_API_KEY", raising=False)
    check_exposure(resolved(tmp_path, "127.0.0.1"))
    for host in ("0.0.0.0", "::", "192.168.1.5", "gpu-box"):
        with pytest.raises(SettingsError, match="allow-shared-key"):
            check_exposure(resolved(tmp_path, host))
    check_exposure(resolved(tmp_path, **{"server.shared_key": "allow"}))
    with pytest.raises(SettingsError, match="auth"):
        resolved(tmp_path, **{"server.auth": "off", "server.shared_key": "allow"})
    monkeypatch.setenv("OPENRL_API_KEY", KEY)
    check_exposure(resolved(tmp_path))
    monkeypatch.delenv("OPENRL_API_KEY")
    made = run("create", "--owner", "alice", "--data-dir", str(tmp_path), "--json")
    check_exposure(resolved(tmp_path))
    run("revoke", made["id"], "--data-dir", str(tmp_path))
    with pytest.raises(SettingsError):
        check_exposure(resolved(tmp_path))


def test_a_keys_file_counts_and_a_bad_one_stops_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENRL_API_KEY", raising=False)
    file = tmp_path / "keys.toml"
    file.write_text("")
    with pytest.raises(SettingsError, match="allow-shared-key"):
        check_exposure(resolved(tmp_path, **{"server.keys_file": str(file)}))
    file.write_text(f'[[key]]\nowner = "alice"\nkey = "{KEY}"\n')
    check_exposure(resolved(tmp_path, **{"server.keys_file": str(file)}))
    with pytest.raises(SettingsError, match="allow-shared-key"):  # a proxy's callers share its own key
        check_exposure(resolved(tmp_path, **{"server.keys_file": str(file), "engine.backend": "remote"}))
    file.write_text("[[key]]\n")
    for host in ("127.0.0.1", "0.0.0.0"):
        with pytest.raises(SettingsError, match="key 1"):
            check_exposure(resolved(tmp_path, host, **{"server.keys_file": str(file)}))


# ---- TLS ----


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path, Path]:
    """Certificate, its key, and the authority's certificate."""
    authority = trustme.CA()
    issued = authority.issue_cert("cluster.example")
    cert, key, ca = (tmp_path / name for name in ("cert.pem", "key.pem", "ca.pem"))
    issued.cert_chain_pems[0].write_to_path(cert)
    issued.private_key_pem.write_to_path(key)
    authority.cert_pem.write_to_path(ca)
    return cert, key, ca


def test_certificates_are_checked_before_the_start(certificate: tuple[Path, Path, Path], tmp_path: Path) -> None:
    cert, key, ca = certificate
    check_pair(cert, key)
    for bad in ((cert, ca), (key, key), (ca, key), (cert, tmp_path / "none.pem")):
        with pytest.raises(SettingsError, match="tls_cert"):
            check_pair(*bad)
    with pytest.raises(SettingsError, match="go together"):
        resolved(tmp_path, **{"server.tls_cert": str(cert)})


def test_a_data_folders_certificate_is_trusted_whatever_its_name(
    certificate: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    cert, _, ca = certificate
    leave_copy(tmp_path, cert)
    own = trusting(tmp_path, None)
    assert not own.check_hostname
    assert own.verify_mode is ssl.CERT_REQUIRED
    assert trusting(tmp_path, ca).check_hostname
    leave_copy(tmp_path, None)
    assert trusting(tmp_path, None).check_hostname
    with pytest.raises(SettingsError, match="no certificates"):
        trusting(None, tmp_path)


def test_a_renewed_certificate_is_taken_up_and_a_broken_one_is_not(
    certificate: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For connections from then on; a renewal that is half written waits until it is whole."""
    cert, key, _ = certificate
    monkeypatch.setattr(tls, "_EVERY_SECONDS", 0.02)
    taken: list[str] = []

    class Context(ssl.SSLContext):
        def load_cert_chain(self, certfile: Any, keyfile: Any = None, password: Any = None) -> None:
            taken.append(Path(certfile).read_text())

    async def main() -> None:
        following = asyncio.create_task(tls.follow(Context(ssl.PROTOCOL_TLS_SERVER), cert, key))
        await asyncio.sleep(0.1)
        good = cert.read_text()
        for content in ("torn", good):
            cert.write_text(content)
            await asyncio.sleep(0.3)
        following.cancel()
        assert taken == [good]

    asyncio.run(main())


def test_connections_fit_into_the_files_that_may_be_open() -> None:
    assert 16 <= fitting_connections(100) <= 100
