"""Settings: order of sources, messages, models with aliases, the API key, and the page made from the table."""

from __future__ import annotations

import dataclasses
import re
import stat
from pathlib import Path

import pytest

from openrl import apikey, setting_table, settings
from openrl.errors import ModelError, SettingsError
from openrl.models import aliases

SMOLLM = "HuggingFaceTB/SmolLM2-135M-Instruct"


def resolve(
    tmp_path: Path, flags: dict[str, object] | None = None, env: dict[str, str] | None = None, toml: str = ""
) -> settings.Resolved:
    file = tmp_path / "openrl.toml"
    file.write_text(toml)
    return settings.resolve({"data_dir": str(tmp_path / "data"), **(flags or {})}, env or {}, file)


def test_defaults(tmp_path: Path) -> None:
    found = resolve(tmp_path).settings
    assert (found.server.host, found.server.port, found.server.auth) == ("127.0.0.1", 8000, "key")
    assert found.server.max_body_bytes == 64 << 20
    assert found.server.long_poll_seconds == 25
    assert (found.engine.max_batch_tokens, found.engine.max_sample_rows, found.engine.max_kv_tokens) == (
        4096,
        64,
        65536,
    )
    assert dataclasses.astuple(found.daemon) == (600, 86400, 1800, 60, 4096, 30, 32 << 30, 86400)
    (model,) = found.models
    assert (model.name, model.source) == (SMOLLM, "smollm2-135m-instruct")


def test_flag_beats_variable_beats_file_beats_default(tmp_path: Path) -> None:
    toml = "[server]\nport = 1001\nhost = '::1'\nlong_poll_seconds = 3\n"
    env = {"OPENRL_PORT": "1002", "OPENRL_HOST": "127.0.0.2"}
    found = resolve(tmp_path, {"server.port": "1003"}, env, toml)
    assert (found.settings.server.port, found.settings.server.host) == (1003, "127.0.0.2")
    assert found.settings.server.long_poll_seconds == 3.0
    origins = {value.setting.key: value.origin for value in found.values}
    assert origins["server.port"] == "flag --port"
    assert origins["server.host"] == "env OPENRL_HOST"
    assert origins["server.long_poll_seconds"] == f"file {tmp_path / 'openrl.toml'}"
    assert origins["engine.dtype"] == "default"


@pytest.mark.parametrize(
    ("flags", "env", "toml", "words"),
    [
        ({}, {"OPENRL_PROT": "1"}, "", ["OPENRL_PROT", "'1'", "OPENRL_PORT"]),
        ({"server.prot": 1}, {}, "", ["server.prot", "flag", "server.port"]),
        ({}, {}, "[server]\nprot = 1\n", ["server.prot", "openrl.toml", "server.port"]),
        ({}, {}, "port = 1\n", ["'port'", "openrl.toml", "server.port"]),
        ({"server.port": "http"}, {}, "", ["server.port", "flag --port", "'http'", "0 to 65535"]),
        ({}, {"OPENRL_PORT": "70000"}, "", ["server.port", "env OPENRL_PORT", "'70000'", "0 to 65535"]),
        ({}, {}, "[server]\nport = true\n", ["server.port", "file", "True", "whole number"]),
        ({}, {}, "[server]\nport = 8000.5\n", ["server.port", "8000.5", "whole number"]),
        ({}, {"OPENRL_LONG_POLL_SECONDS": "31"}, "", ["server.long_poll_seconds", "'31'", "at most 30"]),
        ({}, {"OPENRL_RESULT_TTL": "nan"}, "", ["daemon.result_ttl", "'nan'", "at least 1"]),
        ({"engine.dtype": "float16"}, {}, "", ["engine.dtype", "'float16'", "auto, float32, bfloat16"]),
        ({}, {"OPENRL_BACKEND": ""}, "", ["engine.backend", "''", "cpu, cuda"]),
        ({}, {"OPENRL_MODELS": " , "}, "", ["models", "embedded model", "hub id"]),
        ({"aliases": ["name"]}, {}, "", ["aliases", "--alias", "NAME=MODEL"]),
        ({}, {}, "server = 1\n", ["'server'", "openrl.toml"]),
        ({}, {}, "not toml", ["openrl.toml", "not valid TOML"]),
    ],
)
def test_what_is_wrong_is_named(
    tmp_path: Path, flags: dict[str, object], env: dict[str, str], toml: str, words: list[str]
) -> None:
    with pytest.raises(SettingsError) as caught:
        resolve(tmp_path, flags, env, toml)
    for word in words:
        assert word in str(caught.value)


def test_a_file_that_was_asked_for_must_exist(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"none\.toml"):
        settings.resolve({}, {}, tmp_path / "none.toml")
    assert settings.config_file({"OPENRL_CONFIG": str(tmp_path / "x.toml")}) == tmp_path / "x.toml"


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.5", "::", "example.org"])
def test_without_key_only_loopback(tmp_path: Path, host: str) -> None:
    with pytest.raises(SettingsError, match="no-auth"):
        resolve(tmp_path, {"server.host": host, "server.auth": "off"})
    assert resolve(tmp_path, {"server.host": host}).settings.server.host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_loopback_may_do_without_key(tmp_path: Path, host: str) -> None:
    assert resolve(tmp_path, {"server.host": host, "server.auth": "off"}).settings.server.auth == "off"


def test_models_from_each_source(tmp_path: Path) -> None:
    flags = resolve(tmp_path, {"models": ["gemma-3-270m", "Qwen/Qwen3-0.6B"]})
    assert [model.name for model in flags.settings.models] == ["google/gemma-3-270m", "Qwen/Qwen3-0.6B"]
    env = resolve(tmp_path, env={"OPENRL_MODELS": "gemma-3-270m, smollm2-135m-instruct"})
    assert [model.source for model in env.settings.models] == ["gemma-3-270m", "smollm2-135m-instruct"]
    toml = resolve(tmp_path, toml="models = ['gemma-3-270m']\n[aliases]\n'a/b' = 'gemma-3-270m'\n")
    assert toml.settings.models[0].aliases == ("gemma-3-270m", "a/b")


def test_aliases_from_flags_and_saved_ones(tmp_path: Path) -> None:
    aliases.add(tmp_path / "data", "saved/name", "smollm2-135m-instruct")
    aliases.add(tmp_path / "data", "of/another", "gemma-3-270m")
    found = resolve(tmp_path, {"aliases": ["Qwen/Qwen3-4B=" + SMOLLM, "plain=smollm2-135m-instruct"]})
    assert set(found.settings.models[0].aliases) == {"smollm2-135m-instruct", "saved/name", "Qwen/Qwen3-4B", "plain"}


def test_weights_of_sessions(tmp_path: Path) -> None:
    """In the order in which they are given; numbers or text in TOML."""
    toml = resolve(tmp_path, toml="[sharing.weights]\n'tag:a-*' = 2\n'project:x' = '0.5'\n")
    assert list(toml.settings.sharing.weights.items()) == [("tag:a-*", 2.0), ("project:x", 0.5)]
    env = resolve(tmp_path, env={"OPENRL_SHARING_WEIGHTS": "a=2, *=.5"})
    assert env.settings.sharing.weights == {"a": 2.0, "*": 0.5}
    for wrong in ("a", "a=0", "a=-1", "a=x", "a=inf", "a=nan"):
        with pytest.raises(SettingsError, match="weights above 0"):
            resolve(tmp_path, env={"OPENRL_SHARING_WEIGHTS": wrong})


def test_an_alias_of_a_model_that_is_not_served_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="--model gemma-3-270m"):
        resolve(tmp_path, {"aliases": ["a/b=gemma-3-270m"]})


def test_an_unknown_model_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="smollm2-135m-instruct or gemma-3-270m"):
        resolve(tmp_path, {"models": ["./nowhere"]})


def test_every_field_has_a_setting_and_every_setting_a_field(tmp_path: Path) -> None:
    found = resolve(tmp_path).settings
    keys = {"data_dir", "models", "allow_models", "aliases", "server.api_key"}
    for group in ("server", "engine", "daemon", "log", "hub", "billing", "remote", "sharing"):
        keys |= {f"{group}.{field.name}" for field in dataclasses.fields(getattr(found, group))}
    assert keys == set(settings.BY_KEY)
    assert len({setting.env for setting in settings.SETTINGS}) == len(settings.SETTINGS)


def test_models_by_pattern_come_beside_those_that_are_listed_or_alone(tmp_path: Path) -> None:
    """The default model is for those who say nothing of models at all."""
    alone = resolve(tmp_path, env={"OPENRL_ALLOW_MODELS": "Qwen/*, local/*"}).settings
    assert (alone.models, alone.allow_models) == ((), ("Qwen/*", "local/*"))
    beside = resolve(tmp_path, {"models": ["gemma-3-270m"], "allow_models": ["*"]}).settings
    assert [model.name for model in beside.models] == ["google/gemma-3-270m"]
    assert resolve(tmp_path).settings.allow_models == ()


def test_models_by_pattern_are_loaded_here_and_not_at_a_remote(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="allow_models"):
        resolve(tmp_path, {"allow_models": ["*"], "engine.backend": "remote"})


def test_defaults_are_legal() -> None:
    for setting in settings.SETTINGS:
        if setting.default is not None:
            assert setting.kind.parse(setting.default) == setting.default, setting.key


def test_the_page_is_up_to_date() -> None:
    """Write it anew with: openrl config --markdown > docs/configuration.md"""
    page = Path(__file__).parents[2] / "docs" / "configuration.md"
    assert page.read_text() == setting_table.reference()


# ---- the API key ----


def test_the_key_is_made_once_for_its_owner_only(tmp_path: Path) -> None:
    key = apikey.api_key(tmp_path / "data")
    assert re.fullmatch(r"tml-[A-Za-z0-9_-]{43}", key)
    assert stat.S_IMODE((tmp_path / "data" / "api_key").stat().st_mode) == 0o600
    assert apikey.api_key(tmp_path / "data") == key
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["api_key"]


def test_a_broken_key_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "api_key").write_text("secret")
    with pytest.raises(SettingsError, match="Remove the file") as caught:
        apikey.api_key(tmp_path)
    assert "secret" not in str(caught.value)


def test_the_key_may_come_from_the_environment(tmp_path: Path) -> None:
    assert resolve(tmp_path, env={"OPENRL_API_KEY": "tml-12345678"}).api_key == "tml-12345678"
    with pytest.raises(SettingsError, match="tml-") as caught:
        resolve(tmp_path, env={"OPENRL_API_KEY": "hush"})
    assert "hush" not in str(caught.value)
