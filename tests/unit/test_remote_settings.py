"""Settings of the remote backend and of routes, and what `openrl serve` says about them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from openrl.backends.registry import check_backend
from openrl.errors import SettingsError
from openrl.settings import RemoteSettings, Settings, resolve
from openrl_cli.serve import export_lines, served
from openrl_cli.status_tables import shown
from support.http import KEY


def load(tmp_path: Path, toml: str = "", env: dict[str, str] | None = None, **flags: Any) -> Settings:
    file = tmp_path / "openrl.toml"
    file.write_text(toml)
    given = {"data_dir": str(tmp_path / "data")} | {key.replace("__", "."): value for key, value in flags.items()}
    return resolve(given, env or {}, file).settings


def test_defaults(tmp_path: Path) -> None:
    assert load(tmp_path).remote == RemoteSettings()


def test_routes_from_flags_variable_and_file(tmp_path: Path) -> None:
    """In their order: the first pattern that matches counts."""
    wanted = {"Qwen/Qwen3-0.6B": "home", "Qwen/*": "gke"}
    pairs = [f"{pattern}={name}" for pattern, name in wanted.items()]
    toml = "[remote.routes]\n" + "\n".join(f"{pattern!r} = {name!r}" for pattern, name in wanted.items())
    for settings in (
        load(tmp_path, remote__routes=pairs),
        load(tmp_path, env={"OPENRL_REMOTE_ROUTES": ", ".join(pairs)}),
        load(tmp_path, toml),
    ):
        assert list(settings.remote.routes.items()) == list(wanted.items())


def test_the_key_is_in_a_variable(tmp_path: Path) -> None:
    settings = load(tmp_path, env={"OPENRL_REMOTE_URL": "https://far.example/x", "OPENRL_REMOTE_TOKEN": "tml-secret"})
    assert (settings.remote.url, settings.remote.token) == ("https://far.example/x", "tml-secret")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"remote__url": "far.example"}, "remote.url .*http"),
        ({"remote__name": "../x"}, "remote.name"),
        ({"remote__patience": "300"}, "remote.patience"),
        ({"remote__name": "gke", "remote__url": "https://far.example"}, "both say which server"),
        ({"engine__backend": "remote", "remote__routes": ["Qwen/*=gke"]}, "sends everything there"),
        ({"remote__routes": ["Qwen/*"]}, "remote.routes"),
    ],
)
def test_what_is_wrong_stops_the_start(tmp_path: Path, flags: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        load(tmp_path, **flags)


def test_an_illegal_key_is_not_shown(tmp_path: Path) -> None:
    with pytest.raises(SettingsError) as caught:
        load(tmp_path, env={"OPENRL_REMOTE_TOKEN": "tml-secret with a space"})
    assert "secret" not in str(caught.value)


def test_the_backend_needs_no_engine() -> None:
    check_backend("remote")


def test_what_serve_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENRL_REMOTES", str(tmp_path / "remotes.toml"))
    (tmp_path / "remotes.toml").write_text('[remotes.gke]\nurl = "https://g.example"\ntoken = "none"\n')
    by_name = load(tmp_path, engine__backend="remote", remote__name="gke")
    by_url = load(tmp_path, engine__backend="remote", remote__url="https://far.example")
    mixed = load(tmp_path, remote__routes=["Qwen/*=gke"])
    assert served(by_name) == "what gke serves (https://g.example)"
    assert served(by_url) == "what https://far.example serves"
    assert served(mixed).endswith("; Qwen/* from gke")
    assert export_lines(by_name, KEY, "http://x") == [
        "export TINKER_BASE_URL=http://x",
        f"export TINKER_API_KEY={KEY}",
        "# for tokenizers of models that no hub has:  export HF_ENDPOINT=http://x/hf",
    ]


def test_what_status_shows_of_a_connection() -> None:
    link = {
        "name": "gke",
        "url": "https://g.example",
        "state": "retrying",
        "since": 0.0,
        "last_error": "no sign of life",
    }
    link |= {"kept_requests": 1, "kept_bytes": 4_200_000, "replayed": 7}
    picture = {"version": "1", "uptime_s": 1.0, "models": [], "runs": [], "queue": {"train": 0, "sample": 0}}
    for shown_as in ({"remote": link}, {"remotes": [link]}):
        lines = [str(part) for part in shown(picture | shown_as).renderables]
        (line,) = [line for line in lines if line.startswith("remote gke (https://g.example): retrying for ")]
        assert line.endswith("days: no sign of life; 1 request (4 MB) kept, 7 sent again")
