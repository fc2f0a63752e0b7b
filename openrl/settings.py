"""Settings: one frozen, nested dataclass; the only module that reads the environment (to be completed)."""
from __future__ import annotations
from dataclasses import dataclass
from pathlib import Path
from openrl.types import ModelSpec


@dataclass(frozen=True, slots=True)
class ServerSettings:
    host: str
    port: int
    auth: str  # "key": every call needs the API key; "off": loopback only
    max_body_bytes: int
    long_poll_seconds: float  # at most 30


@dataclass(frozen=True, slots=True)
class EngineSettings:
    backend: str  # auto | cpu | cuda | mps | remote
    dtype: str  # auto | float32 | bfloat16
    threads: int
    max_batch_tokens: int
    max_sample_rows: int
    max_kv_tokens: int


@dataclass(frozen=True, slots=True)
class DaemonSettings:
    session_timeout: float  # seconds of silence after which a session expires
    result_ttl: float  # seconds a finished result stays readable
    gap_timeout: float  # seconds a missing seq_id may keep later ones waiting (O7)
    snapshot_seconds: float  # how much training time a crash may have to replay
    max_inflight_samples: int  # above this, asample answers 429
    shutdown_grace: float


@dataclass(frozen=True, slots=True)
class Settings:
    data_dir: Path
    models: tuple[ModelSpec, ...]
    server: ServerSettings
    engine: EngineSettings
    daemon: DaemonSettings
