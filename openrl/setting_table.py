"""The table of all settings: each is one row, from which flags, variables, the file's keys and the page are made."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from openrl.models import catalog
from openrl.setting_kinds import Choice, Folder, Integer, Names, Number, Pairs, Text, ValueKind

ENV_PREFIX = "OPENRL_"
_ANY = 1 << 40


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting. `key` is its TOML key (`table.key`); `default` is used as it is, without a check."""

    key: str
    kind: ValueKind
    default: object
    help: str
    flag: str = ""  # of `openrl serve`
    secret: bool = False

    @property
    def env(self) -> str:
        """Its variable: OPENRL_ and the last part of the key (log settings keep the table's name)."""
        name = self.key if self.key.startswith("log.") else self.key.rpartition(".")[2]
        return ENV_PREFIX + name.replace(".", "_").upper()


SETTINGS: tuple[Setting, ...] = (
    Setting(
        "data_dir",
        Folder(),
        platformdirs.user_data_path("openrl"),
        "Where models, checkpoints, the database and the API key live.",
        "--data-dir",
    ),
    Setting(
        "models",
        Names(f"one or more of: {catalog.legal_sources()}"),
        (catalog.DEFAULT.name,),
        "The base models to serve.",
        "--model",
    ),
    Setting(
        "aliases",
        Pairs("NAME=MODEL pairs, where MODEL is one of the served models"),
        {},
        "Further names under which models are served.",
        "--alias",
    ),
    Setting("server.host", Text(r"\S+", "an address or host name"), "127.0.0.1", "Address to listen on.", "--host"),
    Setting("server.port", Integer(0, 65535), 8000, "Port to listen on; 0 takes any free one.", "--port"),
    Setting(
        "server.auth",
        Choice(("key", "off")),
        "key",
        "Whether calls need the API key; `off` is allowed on loopback addresses only.",
        "--no-auth",
    ),
    Setting(
        "server.api_key",
        Text(r"tml-[A-Za-z0-9_-]{8,}", "`tml-` and at least 8 letters, digits, '_' or '-' (the SDK wants the prefix)"),
        None,
        "The key that clients must send; by default one is made and kept in the data folder.",
        secret=True,
    ),
    Setting(
        "server.max_body_bytes", Integer(1 << 16, 1 << 32), 64 << 20, "Largest request body taken; larger ones get 413."
    ),
    Setting(
        "server.long_poll_seconds",
        Number(0.1, 30),
        25.0,
        "How long a request for a result waits before the client is told to ask again.",
    ),
    Setting(
        "engine.backend",
        Choice(("auto", "cpu", "cuda", "mps", "remote")),
        "auto",
        "What computes; `auto` takes the best that this machine has.",
        "--backend",
    ),
    Setting(
        "engine.dtype",
        Choice(("auto", "float32", "bfloat16")),
        "auto",
        "Type that the base model's weights are held and multiplied in.",
        "--dtype",
    ),
    Setting("engine.threads", Integer(0, 1024), 0, "CPU threads of a worker; 0 means physical cores.", "--threads"),
    Setting(
        "engine.max_batch_tokens",
        Integer(16, _ANY),
        4096,
        "Tokens, padding included, that one training micro-batch may hold.",
    ),
    Setting("engine.max_sample_rows", Integer(1, 65536), 64, "Sequences that are decoded together."),
    Setting("engine.max_kv_tokens", Integer(16, _ANY), 65536, "Tokens that the KV cache may hold over all sequences."),
    Setting(
        "daemon.session_timeout",
        Number(1, math.inf),
        600.0,
        "Seconds without heartbeat after which a session expires.",
    ),
    Setting("daemon.result_ttl", Number(1, math.inf), 86400.0, "Seconds that a finished result can be read."),
    Setting(
        "daemon.gap_timeout",
        Number(0.1, math.inf),
        1800.0,
        "Seconds that a request which never arrived may keep later ones of its run waiting.",
    ),
    Setting(
        "daemon.snapshot_seconds",
        Number(0, math.inf),
        60.0,
        "Seconds of training that may have to be repeated after a crash.",
    ),
    Setting(
        "daemon.max_inflight_samples", Integer(1, _ANY), 4096, "Waiting samples above which new ones are refused (429)."
    ),
    Setting("daemon.shutdown_grace", Number(0, 3600), 30.0, "Seconds that running work gets to end at a shutdown."),
    Setting(
        "hub.datasets_dir",
        Folder(),
        None,
        "Folder of small data sets (`ORG/NAME/...`) that clients with `HF_ENDPOINT=<server>/hf` can load.",
    ),
    Setting(
        "billing.price_prefill",
        Number(0, 1e6),
        0.0,
        "Price in USD of a million prompt tokens of samples, for `tinker billing`.",
    ),
    Setting(
        "billing.price_sample",
        Number(0, 1e6),
        0.0,
        "Price in USD of a million drawn tokens.",
    ),
    Setting(
        "billing.price_train",
        Number(0, 1e6),
        0.0,
        "Price in USD of a million tokens of forward and forward_backward.",
    ),
    Setting(
        "billing.price_storage",
        Number(0, 1e6),
        0.0,
        "Price in USD of a gigabyte of checkpoints for a month of 720 hours.",
    ),
    Setting(
        "log.folder", Folder(), platformdirs.user_log_path("openrl"), "Where the log files (JSON lines) are written."
    ),
    Setting(
        "log.level", Choice(("debug", "info", "warning", "error")), "info", "Least severity that the log files take."
    ),
)
BY_KEY = {setting.key: setting for setting in SETTINGS}


def reference() -> str:
    """The text of docs/configuration.md."""
    lines = [
        "# Configuration",
        "",
        "<!-- Made by `openrl config --markdown`; a test compares. -->",
        "",
        "A value comes from the flag of `openrl serve`, else from the environment variable, else from the TOML file",
        "(`--config`, else `$OPENRL_CONFIG`, else `openrl.toml` in the user's configuration folder), else it is the",
        "default. `openrl config` prints each value and where it came from. An unknown `OPENRL_*` variable, an unknown",
        "key or an illegal value stops the start with a message that names it.",
        "",
        "| TOML key | flag | variable | default | legal values | meaning |",
        "|---|---|---|---|---|---|",
        *map(_row, SETTINGS),
        "",
        "In a variable, models and aliases are separated by commas. An example of the file:",
        "",
        "```toml",
        'models = ["smollm2-135m-instruct"]',
        "",
        "[aliases]",
        '"Qwen/Qwen3-0.6B" = "smollm2-135m-instruct"',
        "",
        "[server]",
        "port = 8010",
        "",
        "[engine]",
        'dtype = "bfloat16"',
        "```",
    ]
    return "\n".join(lines) + "\n"


def _row(setting: Setting) -> str:
    cells = [
        f"`{setting.key}`",
        f"`{setting.flag}`" if setting.flag else "",
        f"`{setting.env}`",
        _shown_default(setting),
        setting.kind.legal,
        setting.help,
    ]
    return f"| {' | '.join(cells)} |"


def _shown_default(setting: Setting) -> str:
    """The default for the page; folders depend on the platform, so they are described."""
    if isinstance(setting.default, Path):
        return "the platform's log folder" if setting.key.startswith("log.") else "the platform's data folder"
    if not setting.default:
        return "0" if setting.default == 0 else "none"
    if isinstance(setting.kind, Names):
        return ", ".join(f"`{name}`" for name in setting.kind.parse(setting.default))
    return f"`{setting.default:g}`" if isinstance(setting.default, float) else f"`{setting.default}`"
