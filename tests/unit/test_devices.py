"""`--devices N`: where it is refused, and that it reaches the worker."""

from __future__ import annotations

from pathlib import Path

import pytest

from openrl.app import worker_spec
from openrl.errors import BadRequest, SettingsError
from openrl.settings import resolve
from openrl.types import ModelInfo
from openrl.validation import check_full


def test_it_reaches_the_worker(tmp_path: Path) -> None:
    settings = resolve({"data_dir": str(tmp_path), "engine.backend": "cuda"}, {"OPENRL_DEVICES": "4"}, None).settings
    assert worker_spec(settings, settings.models[0]).devices == 4
    assert resolve({"data_dir": str(tmp_path)}, {}, None).settings.engine.devices == 1


@pytest.mark.parametrize("devices", ["0", "-1", "two", "65"])
def test_legal_values_are_named(devices: str) -> None:
    with pytest.raises(SettingsError, match=r"engine\.devices"):
        resolve({"engine.devices": devices}, {}, None)


@pytest.mark.parametrize(
    ("beside", "reason"),
    [
        ({"engine.backend": "mps"}, "'mps'"),
        ({"engine.backend": "remote"}, "'remote'"),
        ({"engine.quantize": "nf4"}, "four bits"),
    ],
)
def test_what_it_does_not_go_with_stops_the_start(beside: dict[str, object], reason: str) -> None:
    with pytest.raises(SettingsError, match=f"engine.devices 2.*{reason}"):
        resolve({"engine.devices": "2", **beside}, {}, None)


def test_all_parameters_are_refused_with_what_they_need() -> None:
    info = ModelInfo(100, 100, 16, 1000, "llama", full_tuning=False)
    with pytest.raises(BadRequest, match="one device"):
        check_full(info, train_attn=True, train_mlp=True, train_unembed=True)
