"""The table of all settings: each is one row, from which flags, variables, the file's keys and the page are made."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from openrl.models import catalog
from openrl.setting_kinds import Choice, File, Folder, Integer, Names, Number, Pairs, Text, ValueKind, Weights

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
        """Its variable: OPENRL_ and the last part of the key (settings of log, remote and sharing keep the table's)."""
        name = self.key if self.key.startswith(("log.", "remote.", "sharing.")) else self.key.rpartition(".")[2]
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
        "The base models to serve. By default this one, and none if `allow_models` is given.",
        "--model",
    ),
    Setting(
        "allow_models",
        Names("one or more patterns of names (`*`, `?`), such as `Qwen/*`"),
        None,
        "Further base models that clients may name: hub ids, embedded models and those in the model store"
        " (docs/models.md). They are fetched and loaded when they are first used.",
        "--allow-models",
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
        "server.keys_file",
        File("a TOML file with [[key]] entries (docs/security.md)"),
        None,
        "Further API keys, kept by someone else such as a mounted secret; followed when the file changes.",
        "--keys-file",
    ),
    Setting(
        "server.shared_key",
        Choice(("refuse", "allow")),
        "refuse",
        "Whether to listen beyond this machine when nobody has a key but the machine's own, which opens everything.",
        "--allow-shared-key",
    ),
    Setting("server.tls_cert", File("a PEM file"), None, "Certificate (chain) to serve https with.", "--tls-cert"),
    Setting("server.tls_key", File("a PEM file"), None, "Private key of the certificate.", "--tls-key"),
    Setting(
        "server.allowed_hosts",
        Names("one or more host names"),
        None,
        "Names that clients may call the server by (`Host`). By default: on a loopback address those of this machine,"
        " else any; addresses are always fine.",
    ),
    Setting(
        "server.max_connections",
        Integer(16, 1 << 20),
        4000,
        "Connections held at a time; further ones are closed (503).",
    ),
    Setting("server.max_head_bytes", Integer(4096, 1 << 20), 32768, "Largest request line and headers taken."),
    Setting("server.head_seconds", Number(0.1, 3600), 30.0, "Seconds that a client may take to send its headers."),
    Setting("server.body_seconds", Number(0.1, 86400), 150.0, "Seconds that a client may take to send a body."),
    Setting(
        "server.send_seconds",
        Number(0.1, 3600),
        60.0,
        "Seconds that a client may leave an answer lying before its connection is closed.",
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
    Setting(
        "engine.quantize",
        Choice(("none", "nf4")),
        "none",
        "How the base model's linear layers are held: `nf4` takes four bits a weight, in the PyTorch engine, for LoRA"
        " (docs/backends.md).",
        "--quantize",
    ),
    Setting(
        "engine.threads",
        Integer(0, 1024),
        0,
        "CPU threads that base models use, shared by those that work at the same time; 0 means physical cores.",
        "--threads",
    ),
    Setting(
        "engine.devices",
        Integer(1, 64),
        1,
        "GPUs that train one base model together, its layers spread over them; with the backend cpu as many processes"
        " (docs/backends.md).",
        "--devices",
    ),
    Setting(
        "engine.model_memory_bytes",
        Integer(0, _ANY),
        0,
        "Memory for all base models together, in bytes; 0 means what the device, or else the machine, has.",
    ),
    Setting(
        "engine.model_turn_seconds",
        Number(0, math.inf),
        60.0,
        "Seconds for which a base model that has work keeps its memory while another one needs it; never less than it"
        " took to load.",
    ),
    Setting(
        "engine.model_idle_seconds",
        Number(0, math.inf),
        0.0,
        "Seconds without work after which a base model is put to sleep though nobody needs its memory; 0 for never.",
    ),
    Setting(
        "engine.sampler",
        Choice(("auto", "engine", "vllm")),
        "auto",
        "What draws samples: our own engine or vLLM (docs/vllm.md). `auto` is vLLM if `vllm_python` is given, or if the"
        " backend is cuda and vLLM is installed.",
        "--sampler",
    ),
    Setting(
        "engine.vllm_python",
        File("the Python of an environment that has vLLM"),
        None,
        "The Python that runs vLLM; by default the server's own.",
        "--vllm-python",
    ),
    Setting(
        "engine.vllm_memory_fraction",
        Number(0.05, 0.95),
        None,
        "Share of its GPU's memory for vLLM; training has the rest. By default 0.45, or 0.9 of a GPU of its own.",
        "--vllm-memory-fraction",
    ),
    Setting(
        "engine.vllm_gpu",
        Integer(0, 255),
        None,
        "Number of the GPU that vLLM samples on, of those that the server sees; by default the one that trains.",
        "--vllm-gpu",
    ),
    Setting(
        "engine.vllm_hang_seconds",
        Number(1, 86400),
        120.0,
        "Seconds without a sign of life after which vLLM is ended and started again.",
    ),
    Setting(
        "engine.max_batch_tokens",
        Integer(16, _ANY),
        4096,
        "Tokens, padding included, that one training micro-batch may hold.",
    ),
    Setting("engine.max_sample_rows", Integer(1, 65536), 64, "Sequences that are decoded together."),
    Setting("engine.max_kv_tokens", Integer(16, _ANY), 65536, "Tokens that the KV cache may hold over all sequences."),
    Setting(
        "engine.prefix_cache_tokens",
        Integer(0, _ANY),
        16384,
        "Tokens of earlier samples whose keys and values are kept for prompts that begin with them, beside"
        " `max_kv_tokens` and at the same price in memory each; 0 keeps none.",
    ),
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
    Setting(
        "daemon.max_upload_bytes",
        Integer(1 << 20, _ANY),
        32 << 30,
        "Largest checkpoint that `openrl push` may bring; larger ones get 413.",
    ),
    Setting(
        "daemon.upload_ttl",
        Number(60, math.inf),
        86400.0,
        "Seconds without a new byte after which an unfinished upload is dropped.",
    ),
    Setting(
        "daemon.shutdown_grace",
        Number(0, 3600),
        30.0,
        "Seconds from SIGTERM or Ctrl-C to the end of the process: running work ends, runs are written to the disk."
        " What does not fit is replayed at the next start.",
    ),
    Setting(
        "sharing.weights",
        Weights(),
        {},
        "Shares of the device: a session has the weight of the first pattern (`*`, `?`) that matches `owner:` with its"
        " key's owner, `project:` with its project or `tag:` with one of its tags (the client's words); else 1.",
    ),
    Setting(
        "sharing.max_samples",
        Integer(0, _ANY),
        0,
        "Samples that one session may have under way, above which it gets 429; 0 for any number.",
    ),
    Setting(
        "remote.name",
        Text(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", "a remote's name (openrl remote list)"),
        None,
        "The server that `--backend remote` passes calls on to; by default the one of `openrl remote use`.",
        "--remote",
    ),
    Setting(
        "remote.url",
        Text(r"https?://[^\s/]\S*", "http[s]://HOST[:PORT][/PATH]"),
        None,
        "The same by its URL, for one that has no name here.",
        "--url",
    ),
    Setting(
        "remote.token",
        Text(r"[\x21-\x7e]+", "an API key"),
        None,
        "The key that the remote wants, where `openrl remote` knows none.",
        secret=True,
    ),
    Setting(
        "remote.routes",
        Pairs("PATTERN=NAME pairs: base models by pattern (`*`, `?`), and the remote that serves them"),
        {},
        "Base models that go to a remote while this machine serves the others; the first pattern that matches counts.",
        "--route",
    ),
    Setting(
        "remote.patience",
        Number(1, 290),
        280.0,
        "Seconds for which a request is sent again while the remote does not answer; the SDK waits for five minutes.",
    ),
    Setting(
        "remote.memory_bytes",
        Integer(1 << 20, _ANY),
        64 << 20,
        "Memory for requests that are kept for a remote; further ones are kept in files.",
    ),
    Setting(
        "remote.disk_bytes",
        Integer(0, _ANY),
        1 << 30,
        "Room for these files; when they fill it, new requests are refused for the moment (429, 503).",
    ),
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
