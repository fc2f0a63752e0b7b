"""Named remotes: the file that keeps them, where keys come from, and that no key is ever shown."""

from __future__ import annotations

import stat
import sys
from pathlib import Path

import pytest

from openrl import remotes
from openrl.errors import SettingsError
from openrl.kube import KubeTarget
from openrl.remotes import Remote
from openrl.settings import resolve
from openrl.tokens import TokenSource

KEY = "tml-secret-secret-secret"


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "config" / "remotes.toml"
    monkeypatch.setenv("OPENRL_REMOTES", str(path))
    return path


def remote(name: str = "gke", url: str = "https://rl.example:8443", source: str = "none") -> Remote:
    return Remote(name, url, TokenSource.parse(source))


def test_what_is_saved_is_loaded(file: Path) -> None:
    assert remotes.load_remotes() == {}
    odd = Remote(
        "a.b-c_1",
        "http://openrl.ml:8000",
        TokenSource.parse('command:pass show "my key" \\n ü'),
        Path("/with space/ca.pem"),
        KubeTarget("openrl", "ml", 8000, "gke_project_zone_name"),
    )
    remotes.save(remote())
    remotes.save(odd)
    assert remotes.load_remotes() == {"gke": remote(), "a.b-c_1": odd}
    assert remotes.default_name() == "gke", "the first is the default"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [path.name for path in file.parent.iterdir()] == ["remotes.toml"], "no drafts are left"


def test_a_name_is_taken_until_it_is_replaced_or_removed() -> None:
    remotes.save(remote())
    with pytest.raises(SettingsError, match="exists"):
        remotes.save(remote(url="https://other"))
    remotes.save(remote(url="https://other"), replace=True)
    assert remotes.find("gke").url == "https://other"
    remotes.remove("gke")
    assert remotes.default_name() is None
    with pytest.raises(SettingsError, match="openrl remote add"):
        remotes.find("gke")


def test_find_knows_names_urls_and_the_default() -> None:
    with pytest.raises(SettingsError, match="there is no default"):
        remotes.find()
    remotes.save(remote(source="env:K"))
    remotes.save(remote("lab", "http://lab:8000"))
    assert remotes.find().name == "gke"
    remotes.set_default("lab")
    assert remotes.find().name == "lab"
    assert remotes.find("https://rl.example:8443/").name == "gke", "its key goes with its URL"
    assert remotes.find("https://rl.example:8443/api/v1").name == "gke"
    unknown = remotes.find("http://elsewhere:1")
    assert (unknown.url, unknown.token) == ("http://elsewhere:1", TokenSource("none"))
    with pytest.raises(SettingsError, match="Known are: gke, lab"):
        remotes.find("cluster")


@pytest.mark.parametrize(
    "url",
    [
        "ftp://host",
        "host:8000",
        "http://",
        "http://host:0",
        "http://h:99999",
        "http://a b",
        "https://h?x=1",
        "http://h#f",
    ],
)
def test_urls_that_are_none(url: str) -> None:
    with pytest.raises(SettingsError):
        remotes.check_url(url)


def test_a_url_with_a_password_is_refused_unseen() -> None:
    for url in (f"https://user:{KEY}@host", f"https://{KEY}@host:0"):
        with pytest.raises(SettingsError) as caught:
            remotes.check_url(url)
        assert KEY not in str(caught.value)


@pytest.mark.parametrize("name", ["", "-x", ".x", "a/b", "a b", "ü", "x" * 65, "../x"])
def test_names_that_are_none(name: str) -> None:
    with pytest.raises(SettingsError, match="no name for a remote"):
        remotes.check_name(name)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("nonsense", "no list of remotes"),
        ("[remotes.x]\nurl = 5\ntoken = 'none'", "url"),
        ("[remotes.x]\nurl = 'http://h'", "token is required"),
        ("[remotes.x]\nurl = 'http://h'\ntoken = 'what'", "legal"),
        ("[remotes.'a b']\nurl = 'http://h'\ntoken = 'none'", "no name"),
        ("[remotes.x]\nurl = 'http://h'\ntoken = 'none'\nkube = {service = 'x', port = 'y'}", "port"),
        ("default = 'y'\n[remotes.x]\nurl = 'http://h'\ntoken = 'none'", "default"),
    ],
)
def test_a_broken_file_is_named(file: Path, content: str, words: str) -> None:
    file.parent.mkdir()
    file.write_text(content)
    with pytest.raises(SettingsError, match=words) as caught:
        remotes.load_remotes()
    assert str(file) in str(caught.value)


def test_a_key_from_each_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLUSTER_KEY", KEY)
    held = tmp_path / "key"
    held.write_text(f"\n {KEY}\n")
    program = tmp_path / "print key.py"
    program.write_text(f"print({KEY!r})")
    for source in ("env:CLUSTER_KEY", f"file:{held}", f"command:{sys.executable} '{program}'"):
        assert TokenSource.parse(source).read() == KEY
        assert str(TokenSource.parse(source)) == source
    assert TokenSource("none").read() == ""


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("env:NOT_SET_ANYWHERE", "NOT_SET_ANYWHERE, which is to hold the key, is not set"),
        ("file:/no/such/file", "cannot be read"),
        ("command:/no/such/program x", "cannot be run"),
        ("command:'unclosed", "cannot be run"),
        ("command:false", "failed with status 1"),
        ("command:true", "gives nothing"),
        ("command:echo two words", "more than one word"),
    ],
)
def test_a_source_that_fails_says_what_to_do(source: str, words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        TokenSource.parse(source).read()


def test_no_error_and_no_listing_holds_a_key(tmp_path: Path) -> None:
    """Not what a program prints, not what it complains of, not what someone wrote into its command line."""
    program = tmp_path / "leak.py"
    program.write_text(
        f"import sys; print('{KEY} and more'); sys.stderr.write('no: {KEY}'); sys.exit(int(sys.argv[1]))"
    )
    for code in (0, 3):
        with pytest.raises(SettingsError) as caught:
            TokenSource.parse(f"command:{sys.executable} {program} {code} {KEY}").read()
        assert KEY not in str(caught.value)
        assert caught.value.__cause__ is None
        assert caught.value.__suppress_context__ or caught.value.__context__ is None
    assert KEY not in TokenSource.parse(f"command:echo {KEY}").shown


@pytest.mark.parametrize("text", ["", KEY, "env:", "file:", "command:", "none:x", "ENV:X", "vault:x"])
def test_sources_that_are_none_are_not_repeated(text: str) -> None:
    """Someone will give the key itself."""
    with pytest.raises(ValueError, match="legal: env:VARIABLE") as caught:
        TokenSource.parse(text)
    assert KEY not in str(caught.value)


def test_the_variable_of_the_file_is_known_to_the_settings(tmp_path: Path) -> None:
    resolve({}, {"OPENRL_REMOTES": "x"}, None)
