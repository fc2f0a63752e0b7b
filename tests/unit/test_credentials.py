"""Keys, tokens and signed URLs: what opens the server, and for how long."""

from __future__ import annotations

import base64
import json
import time
from pathlib import Path

import pytest

from openrl.errors import InvalidToken, SettingsError, Unauthorized
from openrl.keys.ring import Keyring
from openrl.server.app import create_app
from openrl.server.credentials import Credentials
from openrl.server.signing import Signer, signing_key
from support.fake_daemon import FakeDaemon, server_settings
from support.http import KEY, Http

SECRET = b"s" * 32


def app(key: str = KEY, secret: bytes = SECRET, **settings: str) -> Http:
    return Http(create_app(FakeDaemon().as_daemon, server_settings(**settings), key, secret), key=None)


def credentials(key: str = KEY, secret: bytes = SECRET) -> Credentials:
    ring = Keyring()
    ring.set_machine(key)
    return Credentials(ring, secret)


def issued(key: str = KEY, secret: bytes = SECRET, lifetime: float = 3600) -> str:
    giving = credentials(key, secret)
    return giving.issue(giving.principal(key), lifetime)


def claims(jwt: str) -> dict[str, object]:
    middle = jwt.split(".")[1]
    return json.loads(base64.urlsafe_b64decode(middle + "=" * (-len(middle) % 4)))


def test_a_key_is_exchanged_for_a_token_that_opens_everything() -> None:
    """2.9: the claims are those that the SDK reads."""
    http = app()
    jwt = http.post("auth/token", headers={"x-api-key": KEY}).json()["jwt"]
    assert jwt.startswith("eyJ")
    found = claims(jwt)
    assert found["sub"] == "tml:user:local"
    assert found["org_id"] == "local"
    assert http.get("status", headers={"x-api-key": jwt}).status_code == 200
    assert http.post("auth/token", headers={"x-api-key": jwt}).json()["jwt"].startswith("eyJ")


def test_t44_a_token_lives_for_hours() -> None:
    """T44: less than a minute to its end would cost an exchange before each call."""
    found = claims(issued())
    assert float(str(found["exp"])) - float(str(found["iat"])) >= 3600
    assert abs(float(str(found["iat"])) - time.time()) < 5


@pytest.mark.parametrize("kind", ["expired", "forged", "other_secret", "other_key", "torn"])
def test_t45_a_bad_token_is_called_invalid(kind: str) -> None:
    """T45: only with error="invalid_token" does the SDK exchange its key once more."""
    good = credentials()
    head, _, tail = issued().split(".")
    payload = base64.urlsafe_b64encode(json.dumps({"exp": time.time() + 999}).encode()).decode().rstrip("=")
    token = {
        "expired": issued(lifetime=-1),
        "forged": f"{head}.{payload}.{tail}",
        "other_secret": issued(secret=b"x" * 32),
        "other_key": issued("tml-another-key"),
        "torn": "eyJ.x",
    }[kind]
    answer = app().get("status", headers={"x-api-key": token})
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == 'Bearer error="invalid_token"'
    assert "exchange" in answer.json()["detail"]
    with pytest.raises(InvalidToken):
        good.principal(token)


def test_a_bad_key_is_final() -> None:
    """2.9: a bare 401 makes the SDK give up instead of exchanging for ever."""
    for headers in ({"x-api-key": "tml-wrong"}, {}):
        for path in ("status", "auth/apikey/me"):
            answer = app().get(path, headers=headers)
            assert answer.status_code == 401
            assert "www-authenticate" not in answer.headers
    with pytest.raises(Unauthorized):
        credentials().principal("ключ")


def test_an_alg_none_token_opens_nothing() -> None:
    parts = [{"alg": "none"}, {"exp": time.time() + 999}]
    head, payload = (base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in parts)
    assert app().get("status", headers={"x-api-key": f"{head}.{payload}."}).status_code == 401


def test_without_auth_any_key_is_taken_and_tokens_are_still_given() -> None:
    http = app(auth="off")
    jwt = http.post("auth/token", headers={"x-api-key": "tml-"}).json()["jwt"]
    assert http.get("status", headers={"x-api-key": jwt}).status_code == 200
    assert http.get("status").status_code == 200


def test_the_key_describes_itself_and_cannot_be_deleted() -> None:
    """2.10, E04 and E05."""
    http = app()
    shown = http.get("auth/apikey/me", headers={"x-api-key": KEY}).json()
    assert isinstance(shown["key_id"], int)
    assert shown["details"]["user_details"]["email"]
    refused = http.call("DELETE", "auth/apikey/me", headers={"x-api-key": KEY})
    assert refused.status_code == 403
    assert "data folder" in refused.json()["detail"]


def test_a_signature_opens_its_path_until_it_expires() -> None:
    signer = Signer(SECRET)
    query = signer.sign("/signed/a b", 60)
    assert signer.check("/signed/a b", query)
    assert not signer.check("/signed/other", query)
    assert not Signer(b"x" * 32).check("/signed/a b", query)
    assert not signer.check("/signed/a b", signer.sign("/signed/a b", -1))


@pytest.mark.parametrize("query", ["", "expires=x&signature=y", "expires=99999999999", "expires=²&signature=é", "%ff"])
def test_a_query_that_is_no_signature_opens_nothing(query: str) -> None:
    assert not Signer(SECRET).check("/signed/a", query)


def test_a_later_expiry_needs_a_new_signature() -> None:
    signer = Signer(SECRET)
    expires, signature = signer.sign("/signed/a", 60).split("&")
    later = f"expires={int(expires.removeprefix('expires=')) + 1}&{signature}"
    assert not signer.check("/signed/a", later)


def test_signed_paths_are_closed_to_keys_and_open_to_signatures() -> None:
    http = app()
    for headers in ({}, {"x-api-key": KEY}):
        assert http.get("//signed/traces/s0", headers=headers).status_code == 403
    query = Signer(SECRET).sign("/signed/nothing/here", 60)
    assert http.get(f"//signed/nothing/here?{query}").status_code == 404


def test_the_secret_is_kept_and_private(tmp_path: Path) -> None:
    key = signing_key(tmp_path / "data")
    assert len(key) == 32
    assert signing_key(tmp_path / "data") == key
    file = tmp_path / "data" / "signing_key"
    assert file.stat().st_mode & 0o777 == 0o600
    file.write_text("abc")
    with pytest.raises(SettingsError, match="Remove the file"):
        signing_key(tmp_path / "data")
