"""Settings: one frozen, nested dataclass; the only module that reads the environment.

Each setting is one row of `SETTINGS`. A value comes from a flag, else from its `OPENRL_*` variable, else from the TOML
file, else it is the default; `Resolved` keeps which it was. An unknown key or an illegal value stops the start.
"""

from __future__ import annotations

import ipaddress
import os
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import platformdirs

from openrl.errors import SettingsError
from openrl.models import aliases, catalog
from openrl.setting_table import BY_KEY, ENV_PREFIX, SETTINGS, Setting
from openrl.types import ModelSpec

CONFIG_VARIABLE = "OPENRL_CONFIG"
REMOTES_VARIABLE = "OPENRL_REMOTES"


@dataclass(frozen=True, slots=True)
class ServerSettings:
    host: str
    port: int
    auth: str  # "key": every call needs the API key; "off": loopback only
    max_body_bytes: int
    long_poll_seconds: float  # at most 30
    keys_file: Path | None = None
    shared_key: str = "refuse"  # "allow": serve others with nothing but the machine's own key
    tls_cert: Path | None = None
    tls_key: Path | None = None
    allowed_hosts: tuple[str, ...] | None = None
    max_connections: int = 4000
    max_head_bytes: int = 32768
    head_seconds: float = 30.0
    body_seconds: float = 150.0
    send_seconds: float = 60.0


@dataclass(frozen=True, slots=True)
class EngineSettings:
    backend: str  # auto | cpu | cuda | mps | remote
    dtype: str  # auto | float32 | bfloat16
    threads: int  # 0: as many as physical cores
    max_batch_tokens: int
    max_sample_rows: int
    max_kv_tokens: int
    prefix_cache_tokens: int = 16384
    model_memory_bytes: int = 0  # for all base models together; 0: what the machine or the device has
    model_turn_seconds: float = 60.0  # for which a base model with work keeps its memory while another waits
    model_idle_seconds: float = 0.0  # without work, after which it is put to sleep anyway; 0: never
    sampler: str = "auto"  # auto | engine | vllm
    vllm_python: Path | None = None  # of an environment that has vLLM; None: this one
    vllm_memory_fraction: float | None = None  # of its GPU's memory; None: 0.45, or 0.9 of a GPU of its own
    vllm_gpu: int | None = None  # None: training's
    vllm_hang_seconds: float = 120.0  # without a sign of life, after which vLLM is started again
    devices: int = 1  # GPUs, or processes on a CPU, that train one base model together
    quantize: str = "none"  # none | nf4: how the base model's linear layers are held


@dataclass(frozen=True, slots=True)
class DaemonSettings:
    session_timeout: float  # seconds of silence after which a session expires
    result_ttl: float  # seconds a finished result stays readable
    gap_timeout: float  # seconds a missing seq_id may keep later ones waiting (O7)
    snapshot_seconds: float  # how much training time a crash may have to replay
    max_inflight_samples: int  # above this, asample answers 429
    shutdown_grace: float  # seconds from the signal to the end of the process
    max_upload_bytes: int = 32 << 30  # of a checkpoint that is pushed here
    upload_ttl: float = 86400.0  # seconds without a new byte after which an upload is dropped


@dataclass(frozen=True, slots=True)
class HubSettings:
    datasets_dir: Path | None = None  # ORG/NAME folders that the hub look-alike gives out


@dataclass(frozen=True, slots=True)
class RemoteSettings:
    """What `--backend remote` and routes pass on, and how long and how much is kept for a remote that is away."""

    name: str | None = None
    url: str | None = None
    token: str | None = None
    routes: Mapping[str, str] = field(default_factory=dict[str, str])  # pattern on base models -> remote
    patience: float = 280.0  # seconds; the SDK's own is 300
    memory_bytes: int = 64 << 20
    disk_bytes: int = 1 << 30


@dataclass(frozen=True, slots=True)
class BillingSettings:
    """Prices that the billing reports put on metered use, in USD."""

    price_prefill: float = 0.0  # a million prompt tokens of samples
    price_sample: float = 0.0  # a million drawn tokens
    price_train: float = 0.0  # a million tokens of forward and forward_backward
    price_storage: float = 0.0  # a gigabyte of checkpoints for 720 hours


@dataclass(frozen=True, slots=True)
class SharingSettings:
    """Who gets how much when sessions compete for a device."""

    weights: Mapping[str, float] = field(default_factory=dict[str, float])  # by pattern: "owner:*", "tag:x"
    max_samples: int = 0  # of one session under way; 0: any number


@dataclass(frozen=True, slots=True)
class LogSettings:
    folder: Path = field(default_factory=lambda: platformdirs.user_log_path("openrl"))
    level: str = "info"  # of the log files; the terminal gets warnings


@dataclass(frozen=True, slots=True)
class Settings:
    data_dir: Path
    models: tuple[ModelSpec, ...]
    server: ServerSettings
    engine: EngineSettings
    daemon: DaemonSettings
    billing: BillingSettings = field(default_factory=BillingSettings)
    log: LogSettings = field(default_factory=LogSettings)
    hub: HubSettings = field(default_factory=HubSettings)
    remote: RemoteSettings = field(default_factory=RemoteSettings)
    sharing: SharingSettings = field(default_factory=SharingSettings)
    allow_models: tuple[str, ...] = ()  # patterns of base models that clients may name beside `models`


@dataclass(frozen=True, slots=True)
class Value:
    """A setting's value, and where it came from: "flag --port", "env OPENRL_PORT", "file PATH" or "default"."""

    setting: Setting
    value: Any
    origin: str


@dataclass(frozen=True, slots=True)
class Resolved:
    """The settings, with the origin of each value. `api_key` None means the one kept in the data folder."""

    settings: Settings
    values: tuple[Value, ...]
    api_key: str | None


def load(flags: Mapping[str, object], config: Path | None = None) -> Resolved:
    """Settings from flags (by setting key), this process's environment and the TOML file.

    The file is `config`, else $OPENRL_CONFIG, else openrl.toml in the user's configuration folder if it exists.
    """
    return resolve(flags, os.environ, config or config_file(os.environ))


def config_file(env: Mapping[str, str]) -> Path | None:
    """The TOML file to read: $OPENRL_CONFIG, which must exist, or the default one if it does."""
    if env.get(CONFIG_VARIABLE):
        return Path(env[CONFIG_VARIABLE]).expanduser()
    default = platformdirs.user_config_path("openrl") / "openrl.toml"
    return default if default.is_file() else None


def remotes_file() -> Path:
    """Where the named remotes are kept: $OPENRL_REMOTES, else remotes.toml in the user's configuration folder."""
    given = os.environ.get(REMOTES_VARIABLE)
    return Path(given).expanduser() if given else platformdirs.user_config_path("openrl") / "remotes.toml"


def variable(name: str) -> str | None:
    """A variable of the environment that the user has named, such as the one that holds a remote's key."""
    return os.environ.get(name)


def resolve(flags: Mapping[str, object], env: Mapping[str, str], file: Path | None) -> Resolved:
    """Settings from flags by setting key (None: not given), variables, and a TOML file.

    Raises SettingsError for an unknown key, an illegal value, or values that do not go together, and ModelError for a
    model that cannot be one.
    """
    _check_known(flags, env)
    table = _read_file(file) if file else {}
    values = tuple(_value(setting, flags, env, table, file) for setting in SETTINGS)
    by_key = {value.setting.key: value.value for value in values}
    settings = Settings(
        data_dir=by_key["data_dir"],
        models=catalog.resolve_all(_listed(values), by_key["aliases"], aliases.read(by_key["data_dir"])),
        server=ServerSettings(**_group(by_key, "server", without="api_key")),
        engine=EngineSettings(**_group(by_key, "engine")),
        daemon=DaemonSettings(**_group(by_key, "daemon")),
        billing=BillingSettings(**_group(by_key, "billing")),
        log=LogSettings(**_group(by_key, "log")),
        hub=HubSettings(**_group(by_key, "hub")),
        remote=RemoteSettings(**_group(by_key, "remote")),
        sharing=SharingSettings(**_group(by_key, "sharing")),
        allow_models=by_key["allow_models"] or (),
    )
    _check_together(settings)
    return Resolved(settings, values, by_key["server.api_key"])


def _listed(values: tuple[Value, ...]) -> tuple[str, ...]:
    """The models to serve from the start: the default one only where nothing is said of models at all."""
    by_key = {value.setting.key: value for value in values}
    models = by_key["models"]
    return () if models.origin == "default" and by_key["allow_models"].value else models.value


def is_loopback(host: str) -> bool:
    """Whether only programs of this machine reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _check_known(flags: Mapping[str, object], env: Mapping[str, str]) -> None:
    unknown = [key for key in flags if key not in BY_KEY]
    if unknown:
        raise SettingsError(f"unknown setting {unknown[0]!r} from a flag.", f"Known are: {', '.join(BY_KEY)}.")
    variables = {setting.env for setting in SETTINGS} | {CONFIG_VARIABLE, REMOTES_VARIABLE}
    unknown = sorted(name for name in env if name.startswith(ENV_PREFIX) and name not in variables)
    if unknown:
        raise SettingsError(
            f"unknown variable {unknown[0]} in the environment (value {env[unknown[0]]!r}).",
            f"Known are: {', '.join(sorted(variables))}.",
        )


def _read_file(file: Path) -> dict[str, object]:
    """The file's values by setting key. Raises SettingsError if it is not TOML or has a key we do not know."""
    try:
        content = tomllib.loads(file.read_text())
    except OSError as error:
        raise SettingsError(f"the settings file {file} cannot be read: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"the settings file {file} is not valid TOML: {error}.") from error
    values = dict(_flatten(content))
    unknown = [key for key in values if key not in BY_KEY]
    if unknown:
        raise SettingsError(f"unknown key {unknown[0]!r} in {file}.", f"Known are: {', '.join(BY_KEY)}.")
    return values


def _flatten(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    """`table.key` and value for each value; the table of a setting that is one (aliases) stays whole."""
    for name, value in table.items():
        key = prefix + name
        if isinstance(value, dict) and key not in BY_KEY:
            yield from _flatten(value, f"{key}.")
        else:
            yield key, value


def _value(
    setting: Setting,
    flags: Mapping[str, object],
    env: Mapping[str, str],
    table: Mapping[str, object],
    file: Path | None,
) -> Value:
    """A setting's value from the first source that has one."""
    if flags.get(setting.key) is not None:
        return _parsed(setting, flags[setting.key], f"flag {setting.flag}".rstrip())
    if setting.env in env:
        return _parsed(setting, env[setting.env], f"env {setting.env}")
    if setting.key in table:
        return _parsed(setting, table[setting.key], f"file {file}")
    return Value(setting, setting.default, "default")


def _parsed(setting: Setting, raw: object, origin: str) -> Value:
    try:
        return Value(setting, setting.kind.parse(raw), origin)
    except ValueError:
        given = "the given value" if setting.secret else repr(raw)
        raise SettingsError(f"{setting.key} ({origin}): {given} is not legal; expected {setting.kind.legal}.") from None


def _group(values: Mapping[str, Any], name: str, without: str = "") -> dict[str, Any]:
    """The values of one TOML table, by the last part of their keys."""
    prefix = f"{name}."
    group = {key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)}
    group.pop(without, None)
    return group


def _check_together(settings: Settings) -> None:
    server, remote = settings.server, settings.remote
    if remote.name is not None and remote.url is not None:
        raise SettingsError("remote.name and remote.url both say which server is meant.", "Give one of them.")
    if remote.routes and settings.engine.backend == "remote":
        raise SettingsError(
            "remote.routes sends some base models to a remote, but engine.backend 'remote' sends everything there.",
            "Leave --route or --backend remote away.",
        )
    if settings.engine.sampler == "vllm" and settings.engine.backend in ("mps", "remote"):
        raise SettingsError(
            f"engine.sampler 'vllm' does not go with engine.backend {settings.engine.backend!r}.",
            "vLLM samples beside the PyTorch engine: take --backend cuda or cpu, or leave --sampler away.",
        )
    _check_quantize(settings.engine)
    _check_devices(settings.engine)
    if settings.allow_models and settings.engine.backend == "remote":
        raise SettingsError(
            "allow_models says which base models this machine may load, but engine.backend 'remote' loads none here.",
            "Leave --allow-models or --backend remote away.",
        )
    if server.auth == "off" and not is_loopback(server.host):
        raise SettingsError(
            f"server.host {server.host!r} is reached from other machines, but server.auth is 'off'.",
            "Leave --no-auth away, or listen on 127.0.0.1.",
        )
    if (server.tls_cert is None) != (server.tls_key is None):
        raise SettingsError(
            "server.tls_cert and server.tls_key go together.", "Give both, or none to serve plain http."
        )


def _check_quantize(engine: EngineSettings) -> None:
    if engine.quantize == "none":
        return
    asked = f"engine.quantize {engine.quantize!r}"
    if engine.backend == "mps":
        raise SettingsError(
            f"{asked} is for the PyTorch engine (--backend cuda or cpu); engine.backend is 'mps'.",
            "MLX trains over bases that are quantised already: serve one of those, such as mlx-community/NAME-4bit.",
        )
    if engine.backend == "remote":
        raise SettingsError(f"{asked} does nothing with engine.backend 'remote': the remote says how it holds models.")
    if engine.sampler == "vllm" or engine.vllm_python is not None:
        raise SettingsError(
            f"{asked} does not go with vLLM as the sampler, which would not compute with the same weights.",
            "Sample with our own engine: leave --sampler vllm and --vllm-python away; or leave --quantize away.",
        )


def _check_devices(engine: EngineSettings) -> None:
    if engine.devices == 1:
        return
    if engine.backend in ("mps", "remote"):
        raise SettingsError(
            f"engine.devices {engine.devices} does not go with engine.backend {engine.backend!r}.",
            "The PyTorch engine (--backend cuda or cpu) trains on several devices; or leave --devices away.",
        )
    if engine.quantize != "none":
        raise SettingsError(
            f"engine.devices {engine.devices} does not go with engine.quantize {engine.quantize!r}: weights in four"
            " bits are not spread over devices.",
            "Leave --quantize or --devices away.",
        )
