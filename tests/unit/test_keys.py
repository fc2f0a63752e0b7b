"""API keys: what is kept of them, how long they are good, what ends with them, and the keys file."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import httpx
import pytest

from openrl.daemon.keys import Keys
from openrl.errors import BadRequest, NotFound, SettingsError
from openrl.keys.file import read_keys
from openrl.keys.key import UNLIMITED, Key, Quotas, digest, make, scopes_of
from openrl.keys.principal import LOCAL_OWNER, Scope
from openrl.keys.ring import Keyring
from openrl.store.db import Database
from support.http import KEY
from support.tenants import World, furnish, scenario

USE = frozenset({Scope.USE})
STRONG = "tml-" + "a1_-" * 8


def key(text: str, owner: str = "alice", **fields: object) -> Key:
    return Key(digest(text), owner, USE, **fields)  # pyright: ignore


# ---- records ----


def test_a_new_key_is_what_the_sdk_takes_and_only_its_hash_is_kept() -> None:
    """1.2: `tml-` and at least 32 random characters."""
    text, made = make("alice", USE, UNLIMITED, None, "laptop")
    assert text.startswith("tml-")
    assert len(text) == 4 + 43
    assert text != make("alice", USE, UNLIMITED, None, "laptop")[0]
    assert text[4:] not in repr(made)
    assert made.digest == digest(text)


@pytest.mark.parametrize(
    ("owner", "scopes", "quotas", "expires_at", "part"),
    [
        ("", USE, UNLIMITED, None, "owner"),
        ("a/b", USE, UNLIMITED, None, "owner"),
        ("*", USE, UNLIMITED, None, "owner"),
        ("a" * 65, USE, UNLIMITED, None, "owner"),
        ("alice", frozenset[Scope](), UNLIMITED, None, "scopes"),
        ("alice", USE, Quotas(runs=-1), None, "runs"),
        ("alice", USE, UNLIMITED, 1.0, "past"),
        (LOCAL_OWNER, USE, Quotas(runs=1), None, "no quotas"),
    ],
)
def test_keys_that_cannot_be(
    owner: str, scopes: frozenset[Scope], quotas: Quotas, expires_at: float | None, part: str
) -> None:
    with pytest.raises(BadRequest, match=part):
        make(owner, scopes, quotas, expires_at, "")


def test_scopes_by_name() -> None:
    assert scopes_of(["use", "read"]) == {Scope.USE, Scope.READ}
    with pytest.raises(BadRequest, match="use, read, admin"):
        scopes_of(["root"])


def test_the_most_generous_of_an_owners_keys_counts() -> None:
    ring = Keyring()
    ring.put(key("one", quotas=Quotas(1, 10, None)), key("two", quotas=Quotas(3, 5, 7)))
    assert ring.quotas("alice") == Quotas(3, 10, None)
    ring.put(key("two", quotas=Quotas(3, 5, 7), revoked_at=1.0))
    assert ring.quotas("alice") == Quotas(1, 10, None)
    assert ring.quotas("bob") == UNLIMITED


# ---- the ring ----


def test_a_ring_opens_to_live_keys_only() -> None:
    ring = Keyring()
    ring.set_machine(KEY)
    ring.put(key("good"), key("revoked", revoked_at=1.0), key("expired", expires_at=time.time() - 1))
    assert ring.open(KEY) is not None
    assert ring.open("good") is not None
    assert [ring.open(text) for text in ("revoked", "expired", "other", "", digest("good"))] == [None] * 5
    ring.put(key("good", revoked_at=1.0))
    assert ring.open("good") is None


def test_a_key_that_the_store_has_revoked_stays_so_whatever_the_file_says() -> None:
    ring = Keyring()
    ring.put(key("text", revoked_at=1.0))
    ring.set_filed([key("text", source="file")])
    assert ring.open("text") is None
    assert ring.find(key("text").id) is None


def test_who_holds_on_to_a_key_is_told_when_it_ends() -> None:
    ring = Keyring()
    good = key("good")
    ring.put(good)
    told: list[str] = []
    with ring.holding(good.id, lambda: told.append("a")), ring.holding("", lambda: told.append("no key")):
        ring.set_filed([key("another", source="file")])
        assert told == []
        ring.put(key("good", revoked_at=1.0))
        assert told == ["a"]
        with ring.holding(good.id, lambda: told.append("late")):
            assert told == ["a", "late"]


# ---- the keys file ----


def test_a_keys_file_holds_keys_or_their_hashes(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(
        f'''
        [[key]]
        owner = "alice"
        key = "{STRONG}"
        runs = 2
        tokens_per_day = 1000
        checkpoint_bytes = 5
        [[key]]
        owner = "prometheus"
        sha256 = "{digest(STRONG + "2")}"
        scopes = ["read"]
        expires = 2030-01-01T00:00:00Z
        note = "scraper"
        '''
    )
    first, second = read_keys(file)
    assert (first.owner, first.digest, first.quotas) == ("alice", digest(STRONG), Quotas(2, 1000, 5))
    assert (first.scopes, first.source) == (USE, "file")
    assert (second.digest, second.scopes, second.expires_at) == (digest(STRONG + "2"), {Scope.READ}, 1893456000.0)


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("x", "TOML"),
        ("[key]\nowner = 'a'", "key"),
        ("keys = []", "keys"),
        ("[[key]]\nowner = 'a'", "needs key"),
        ("[[key]]\nowner = 'a'\nkey = 'tml-short'", "32"),
        (f"[[key]]\nowner = 'a'\nkey = '{STRONG}'\nsha256 = '{'0' * 64}'", "both"),
        (f"[[key]]\nowner = 'a b'\nkey = '{STRONG}'", "owner"),
        (f"[[key]]\nowner = 'a'\nkey = '{STRONG}'\nscopes = 'use'", "scopes"),
        (f"[[key]]\nowner = 'a'\nkey = '{STRONG}'\nscopes = ['all']", "use, read, admin"),
        (f"[[key]]\nowner = 'a'\nkey = '{STRONG}'\nruns = 'two'", "runs"),
        (f"[[key]]\nowner = 'a'\nkey = '{STRONG}'\nexpires = 'soon'", "expires"),
        (f"[[key]]\nowner = 'a'\nkey = '{STRONG}'\nquota = 1", "quota"),
        (f"[[key]]\nowner = 'a'\nkey = '{STRONG}'\n[[key]]\nowner = 'b'\nkey = '{STRONG}'", "twice"),
    ],
)
def test_a_bad_keys_file_is_named_without_its_secrets(tmp_path: Path, content: str, part: str) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(content)
    with pytest.raises(SettingsError, match=part) as caught:
        read_keys(file)
    assert str(file) in str(caught.value)
    assert STRONG not in str(caught.value)


def test_a_missing_keys_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"nothere\.toml"):
        read_keys(tmp_path / "nothere.toml")


# ---- over HTTP ----


@scenario
async def test_keys_are_made_listed_and_revoked_over_http(world: World) -> None:
    body = {"owner": "dora", "scopes": ["use"], "runs": 1, "note": "hers"}
    made = await world.post("admin", "keys", body)
    world.keys["dora"] = made["api_key"]
    assert (await world.call("dora", "GET", "sessions")).status_code == 200
    listed = (await world.call("admin", "GET", "keys")).json()["keys"]
    assert {entry["owner"]: entry["source"] for entry in listed} == {"local": "machine", "dora": "store"}
    assert made["api_key"] not in json.dumps(listed)
    for _ in range(2):
        answer = await world.call("admin", "DELETE", f"keys/{made['id']}")
        assert answer.status_code == 200, "idempotent"
    assert (await world.call("dora", "GET", "sessions")).status_code == 401
    for bad in ("nope", listed[0]["id"] if listed[0]["source"] == "machine" else listed[1]["id"]):
        assert (await world.call("admin", "DELETE", f"keys/{bad}")).status_code == 404
    for wrong in ({**body, "owner": "a/b"}, {**body, "scopes": ["x"]}, {**body, "scopes": []}, {"owner": "x"}):
        assert (await world.call("admin", "POST", "keys", wrong)).status_code == 400
    rows = b"".join(file.read_bytes() for file in world.harness.settings.data_dir.glob("openrl.sqlite*"))
    assert made["api_key"].encode() not in rows


@scenario
async def test_a_bearer_token_is_taken_as_well(world: World) -> None:
    """Which is what Prometheus can send."""
    await world.key("scraper", "prometheus", Scope.READ)
    bearer = {"authorization": f"Bearer {world.keys['scraper']}"}
    assert (await world.call(None, "GET", "status", **bearer)).status_code == 200
    assert (await world.call(None, "GET", "status", authorization="Bearer tml-x")).status_code == 401
    assert (await world.call(None, "GET", "status", authorization="Basic eA==")).status_code == 401
    assert (await world.call("tml-wrong", "GET", "status", **bearer)).status_code == 401, "X-API-Key counts first"


@scenario
async def test_tokens_speak_for_their_key_and_end_with_it(world: World) -> None:
    """2.9: and with `invalid_token`, so that the SDK asks again and hears that the key itself is gone (T45)."""
    await furnish(world)
    identity = await world.key("erin", "erin", Scope.USE)
    world.keys["jwt"] = (await world.post("erin", "auth/token", {}))["jwt"]
    assert (await world.call("jwt", "GET", f"sessions/{world.ids['session']}")).status_code == 404
    mine = (await world.post("jwt", "create_session", {"sdk_version": "1"}))["session_id"]
    assert (await world.call("erin", "GET", f"sessions/{mine}")).status_code == 200
    world.keys["again"] = (await world.post("jwt", "auth/token", {}))["jwt"]
    shown = (await world.call("jwt", "GET", "auth/apikey/me")).json()
    assert isinstance(shown["key_id"], int)
    assert shown["details"]["user_details"]["email"] == "erin@localhost"
    await world.harness.daemon.keys.revoke(identity)
    for token in ("jwt", "again"):
        answer = await world.call(token, "GET", "sessions")
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == 'Bearer error="invalid_token"'
    assert "www-authenticate" not in (await world.call("erin", "POST", "auth/token", {})).headers


@scenario
async def test_a_key_ends_at_its_hour(world: World) -> None:
    """Its open calls do, too."""
    keys = world.harness.daemon.keys
    text, _ = await keys.create("finn", USE, UNLIMITED, time.time() + 1.5, "")
    world.keys["finn"] = text
    _, done = await world.open_run("finn")
    world.harness.worker.hold = asyncio.Event()
    step = {"model_id": done["model_id"], "seq_id": 1, "adam_params": {}}
    promised = await world.post("finn", "optim_step", step)
    began = time.monotonic()
    answer = await world.call("finn", "POST", "retrieve_future", promised)
    assert answer.status_code == 401
    assert time.monotonic() - began < 10, "the clock looks every second"
    assert (await world.call("finn", "GET", "sessions")).status_code == 401
    world.harness.worker.hold.set()


@scenario
async def test_open_polls_of_a_revoked_key_end_at_once_and_others_do_not(world: World) -> None:
    """Both kinds of long poll; under a load of them."""
    await furnish(world)
    identity = await world.key("gina", "alice", Scope.USE)
    world.harness.worker.hold = asyncio.Event()
    step = {"model_id": world.ids["run"], "seq_id": 4, "adam_params": {}}
    promised = await world.post("gina", "optim_step", step)
    target = {"type": "sampling_session", "sampling_session_id": world.ids["sampler"], "cloned_sampler_id": 0}
    news = {"target": target, "prev_cursor": 0}

    async def poll(who: str) -> list[httpx.Response]:
        waiting = [world.call(who, "POST", "retrieve_future", promised) for _ in range(50)]
        waiting += [world.call(who, "POST", "retrieve_futures", news) for _ in range(5)]
        return await asyncio.gather(*waiting)

    gina, alice = asyncio.create_task(poll("gina")), asyncio.create_task(poll("alice"))
    await asyncio.sleep(1)
    began = time.monotonic()
    await world.harness.daemon.keys.revoke(identity)
    assert {answer.status_code for answer in await gina} == {401}
    assert time.monotonic() - began < 5
    assert not alice.done()
    world.harness.worker.hold.set()
    answers = [answer.status_code for answer in await alice]
    assert answers == [200] * 55
    done = await world.result("alice", promised)
    assert "error" not in done, "what was accepted is done, and is its owner's"


@scenario
async def test_a_signed_url_ends_with_the_key_that_asked_for_it(world: World) -> None:
    await furnish(world)
    identity = await world.key("hal", "alice", Scope.USE)
    run, _, name = world.ids["a"].removeprefix("tinker://").partition("/")
    urls: dict[str, str] = {}
    for who in ("hal", "alice"):
        answer = await world.call(who, "GET", f"training_runs/{run}/checkpoints/{name}/archive")
        urls[who] = "//" + answer.headers["location"].removeprefix("http://localhost:8000/")
        assert (await world.call(None, "GET", urls[who])).status_code == 200
    hals = dict(part.split("=") for part in urls["hal"].partition("?")[2].split("&"))
    assert hals["key"] == identity
    await world.harness.daemon.keys.revoke(identity)
    assert (await world.call(None, "GET", urls["hal"])).status_code == 403
    assert (await world.call(None, "GET", urls["alice"])).status_code == 200
    forged = urls["hal"].replace(f"key={identity}", "key=")
    assert (await world.call(None, "GET", forged)).status_code == 403


def test_the_keys_file_is_followed(tmp_path: Path) -> None:
    """A key that goes from it is good no more, also where a secret's link moves; a broken file changes nothing."""

    async def main() -> None:
        versions = [tmp_path / f"v{n}.toml" for n in range(3)]
        versions[0].write_text(f'[[key]]\nowner = "alice"\nkey = "{STRONG}"\n')
        versions[1].write_text("[[key]]\nowner = 3\n")
        versions[2].write_text(f'[[key]]\nowner = "bob"\nkey = "{STRONG}2"\n')
        link = tmp_path / "keys.toml"
        link.symlink_to(versions[0])
        db = Database(tmp_path / "openrl.sqlite")
        keys = Keys(db, link)
        await keys.load()
        seen: list[str | None] = []
        for version in versions:
            link.unlink()
            link.symlink_to(version)
            await keys.follow_file()
            seen.append(owner_of(keys.ring, STRONG))
        assert seen == ["alice", "alice", None]
        assert owner_of(keys.ring, STRONG + "2") == "bob"
        with pytest.raises(NotFound, match="keys file"):
            await keys.revoke(key(STRONG + "2").id)
        db.close()

    asyncio.run(main())


def owner_of(ring: Keyring, text: str) -> str | None:
    found = ring.open(text)
    return None if found is None else found.owner


# ---- scopes ----


@scenario
async def test_a_key_to_read_says_clearly_that_it_cannot_work(world: World) -> None:
    await furnish(world)
    answer = await world.call("reader", "POST", "create_session", {"sdk_version": "1"})
    assert answer.status_code == 403
    assert "scope use or admin" in answer.json()["detail"]
    assert "has read" in answer.json()["detail"]
    answer = await world.call("alice", "GET", "status")
    assert "scope read or admin" in answer.json()["detail"]


@scenario
async def test_scopes_add_up(world: World) -> None:
    await world.key("both", "ivy", Scope.USE, Scope.READ)
    assert (await world.call("both", "GET", "status")).status_code == 200
    assert (await world.call("both", "POST", "create_session", {"sdk_version": "1"})).status_code == 200
    assert (await world.call("both", "GET", "keys")).status_code == 403
