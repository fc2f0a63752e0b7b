"""`openrl serve`: the daemon in the foreground, with what a person needs to see of it."""

from __future__ import annotations

import errno
import logging
from typing import Annotated

import typer
from rich.text import Text

from openrl import apikey
from openrl.app_events import Listening, ModelFailed, ModelPostponed, ModelProgress, ModelReady, ServeEvent, Stopping
from openrl.errors import OpenRLError, SettingsError
from openrl.models import catalog
from openrl.models.catalog import Kind
from openrl.settings import Settings, is_loopback, load
from openrl.telemetry import logs
from openrl.version import VERSION
from openrl_cli import console, options
from openrl_cli.progress import ModelBars


def _option(*names: str, text: str) -> typer.models.OptionInfo:
    return typer.Option(*names, help=text, show_default=False)


Models = Annotated[
    list[str] | None,
    _option(
        "--model",
        text="Embedded model, folder, .gguf file or hub id; may be repeated. Default: smollm2-135m-instruct.",
    ),
]
AllowModels = Annotated[
    list[str] | None,
    _option(
        "--allow-models",
        text="PATTERN (Qwen/*, local/*, *): load base models that clients name, on their first use; may be repeated.",
    ),
]
Aliases = Annotated[
    list[str] | None,
    _option("--alias", text="NAME=MODEL: serve MODEL under NAME too, so that scripts with a fixed name run."),
]
Backend = Annotated[str | None, _option("--backend", text="auto, cpu, cuda, mps or remote. Default: auto.")]
Remote = Annotated[
    str | None, _option("--remote", text="With --backend remote: the server to pass calls on to (openrl remote list).")
]
Url = Annotated[str | None, _option("--url", text="The same by its URL; its key may be in OPENRL_REMOTE_TOKEN.")]
Routes = Annotated[
    list[str] | None,
    _option(
        "--route", text="PATTERN=NAME: send base models that match to a remote, serve the others here; may be repeated."
    ),
]
Host = Annotated[str | None, _option("--host", text="Address to listen on. Default: 127.0.0.1.")]
Port = Annotated[str | None, _option("--port", text="Port to listen on. Default: 8000.")]
Dtype = Annotated[
    str | None, _option("--dtype", text="auto, float32 or bfloat16: type of the base weights. Default: auto.")
]
Quantize = Annotated[
    str | None, _option("--quantize", text="none or nf4: hold the base's linear layers in four bits. Default: none.")
]
Threads = Annotated[
    str | None, _option("--threads", text="CPU threads of a worker; 0 means physical cores. Default: 0.")
]
Devices = Annotated[str | None, _option("--devices", text="GPUs that train one base model together. Default: 1.")]
Sampler = Annotated[
    str | None,
    _option("--sampler", text="auto, engine or vllm: what draws samples (docs/vllm.md). Default: auto."),
]
VllmPython = Annotated[str | None, _option("--vllm-python", text="A Python that has vLLM, if it is not this one.")]
VllmMemory = Annotated[
    str | None, _option("--vllm-memory-fraction", text="Share of its GPU's memory that vLLM takes. Default: 0.45.")
]
VllmGpu = Annotated[str | None, _option("--vllm-gpu", text="Number of the GPU that vLLM has, if not training's.")]
NoAuth = Annotated[bool, _option("--no-auth", text="Take calls without the API key (on loopback only).")]
KeysFile = Annotated[str | None, _option("--keys-file", text="TOML file with further API keys (docs/security.md).")]
SharedKey = Annotated[
    bool,
    _option("--allow-shared-key", text="Listen beyond this machine though all callers share the machine's own key."),
]
TlsCert = Annotated[str | None, _option("--tls-cert", text="Certificate (PEM) to serve https with.")]
TlsKey = Annotated[str | None, _option("--tls-key", text="The certificate's private key (PEM).")]


def serve(
    model: Models = None,
    allow_models: AllowModels = None,
    alias: Aliases = None,
    backend: Backend = None,
    remote: Remote = None,
    url: Url = None,
    route: Routes = None,
    host: Host = None,
    port: Port = None,
    data_dir: options.DataDir = None,
    dtype: Dtype = None,
    quantize: Quantize = None,
    devices: Devices = None,
    threads: Threads = None,
    sampler: Sampler = None,
    vllm_python: VllmPython = None,
    vllm_memory_fraction: VllmMemory = None,
    vllm_gpu: VllmGpu = None,
    no_auth: NoAuth = False,
    keys_file: KeysFile = None,
    allow_shared_key: SharedKey = False,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    config: options.Config = None,
) -> None:
    """Serve models to the tinker SDK until Ctrl-C (twice: at once).

    Answers before the models are loaded, and prints what to export for a script. All settings: openrl config.
    """
    flags: dict[str, object] = {
        "models": model or None,
        "allow_models": allow_models or None,
        "aliases": alias or None,
        "engine.backend": backend,
        "remote.name": remote,
        "remote.url": url,
        "remote.routes": route or None,
        "server.host": host,
        "server.port": port,
        "data_dir": data_dir,
        "engine.dtype": dtype,
        "engine.quantize": quantize,
        "engine.devices": devices,
        "engine.threads": threads,
        "engine.sampler": sampler,
        "engine.vllm_python": vllm_python,
        "engine.vllm_memory_fraction": vllm_memory_fraction,
        "engine.vllm_gpu": vllm_gpu,
        "server.auth": "off" if no_auth else None,
        "server.keys_file": keys_file,
        "server.shared_key": "allow" if allow_shared_key else None,
        "server.tls_cert": tls_cert,
        "server.tls_key": tls_key,
    }
    resolved = load(flags, config)
    from openrl.exposure import check_exposure  # brings the database; `openrl --help` does without

    check_exposure(resolved)
    settings = resolved.settings
    key = resolved.api_key or apikey.api_key(settings.data_dir)
    logs.setup(settings.log.folder, settings.log.level, terminal=_TerminalLog())
    raise typer.Exit(_run(settings, key))


def _run(settings: Settings, key: str) -> int:
    """Serve to the end; returns the exit code. Raises SettingsError if the address cannot be had."""
    from openrl import app  # brings the web server; other commands do without

    with ModelBars() as bars:
        try:
            return app.serve(settings, key, Display(settings, key, bars))
        except OSError as error:
            raise _address_error(error, settings) from error


def _address_error(error: OSError, settings: Settings) -> OpenRLError:
    server = settings.server
    where = f"port {server.port} on {server.host}"
    match error.errno:
        case errno.EADDRINUSE:
            hint = f"Stop what listens there (`openrl status` tells if it is openrl) or take --port {server.port + 1}."
            return SettingsError(f"{where} is in use.", hint)
        case errno.EACCES:
            return SettingsError(f"{where} may not be opened by this user.", "Take a --port from 1024 on.")
        case errno.EADDRNOTAVAIL:
            return SettingsError(f"{server.host} is no address of this machine.", "Take --host 127.0.0.1 or 0.0.0.0.")
        case _:
            return SettingsError(f"{where} cannot be opened: {error.strerror or error}.")


class Display:
    """Shows the server's events: exports on stdout, the rest on stderr."""

    def __init__(self, settings: Settings, key: str, bars: ModelBars) -> None:
        self._settings = settings
        self._key = key
        self._bars = bars

    def __call__(self, event: ServeEvent) -> None:
        match event:
            case Listening(url):
                self._listening(url)
            case ModelProgress(name, stage, done, total):
                self._bars.update(name, stage, done, total)
            case ModelReady(name):
                self._bars.finish(name)
                console.err.print(Text.assemble(("ready: ", "bold green"), _ready_line(event)), soft_wrap=True)
            case ModelFailed(name, message):
                self._bars.finish(name)
                console.err.print(Text.assemble(("not served: ", "bold red"), f"{name}: {message}"), soft_wrap=True)
            case ModelPostponed(name):
                console.err.print(
                    f"{name} is loaded on its first use: it does not fit beside the others", soft_wrap=True
                )
            case Stopping():
                self._bars.close()
                console.err.print("stopping: running work ends first; Ctrl-C again ends at once")

    def _listening(self, url: str) -> None:
        console.err.print(
            Text(f"openrl {VERSION} listens on {url} and serves {served(self._settings)}"), soft_wrap=True
        )
        console.err.print("In the terminal of your script:\n")
        for line in export_lines(self._settings, self._key, url):
            console.out.print(Text(line), soft_wrap=True)
        console.err.print()


def served(settings: Settings) -> str:
    """What a server with these settings serves, for a person."""
    if settings.engine.backend == "remote":
        from openrl.backends.remote.service import find_remote

        remote = find_remote(settings.remote)
        return f"what {remote.name} serves" + ("" if remote.name == remote.url else f" ({remote.url})")
    parts = [name for spec in settings.models for name in (spec.name, *spec.aliases)]
    if settings.allow_models:
        parts.append(f"what clients name of {', '.join(settings.allow_models)}")
    names = ", ".join(parts)
    routes = ", ".join(f"{pattern} from {name}" for pattern, name in settings.remote.routes.items())
    return f"{names}; {routes}" if routes else names


def export_lines(settings: Settings, key: str, url: str) -> list[str]:
    """The lines to run in a client's shell. The last one is for names whose tokenizer lies in the local cache only."""
    lines = [f"export TINKER_BASE_URL={url}", f"export TINKER_API_KEY={key}"]
    if settings.engine.backend == "remote":
        lines.append(f"# for tokenizers of models that no hub has:  export HF_ENDPOINT={url}/hf")
        return lines
    if settings.allow_models or any(
        spec.aliases or catalog.kind(spec.source) is not Kind.HUB for spec in settings.models
    ):
        lines.append("export HF_HUB_OFFLINE=1  # tokenizers are in the local cache: load them without asking the hub")
    if not is_loopback(settings.server.host):
        lines.append(f"# on another machine, instead of HF_HUB_OFFLINE:  export HF_ENDPOINT={url}/hf")
    return lines


def _ready_line(event: ModelReady) -> str:
    report = event.report
    memory = f"{report.memory_bytes / (1 << 30):.1f} GiB"
    held = report.dtype if report.quantize == "none" else f"{report.quantize} for {report.dtype}"
    place = f"{report.device} ({held}, {report.threads} threads, {memory})"
    sampler = f", sampling with {report.sampler}" if report.sampler else ""
    return f"{event.name} on {place}{sampler} after {event.seconds:.1f} s"


class _TerminalLog(logging.Handler):
    """Log lines through rich's console, which keeps a progress bar below them whole."""

    def emit(self, record: logging.LogRecord) -> None:
        console.err.print(Text(f"{record.levelname.lower()}: {record.getMessage()}"), soft_wrap=True)
        if record.exc_info:
            console.err.print(Text(logs.Scrubbing().formatException(record.exc_info)), soft_wrap=True)
