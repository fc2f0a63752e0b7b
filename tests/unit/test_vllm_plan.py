"""What vLLM is opened with: memory, limits, the GPU; and when it is wanted at all."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from openrl.backends.base import Backend, BackendSpec, VllmSpec
from openrl.backends.vllm.attach import attach, training_half, wanted
from openrl.backends.vllm.child.opening import arguments
from openrl.backends.vllm.plan import plan, python_of, training_share
from openrl.errors import ModelError, SettingsError
from openrl.settings import resolve
from openrl.types import DeviceReport, ModelInfo

CONFIG = {
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "eos_token_id": 2,
}
INFO = ModelInfo(49152, 8192, 256, 135_000_000, "llama")
CPU = DeviceReport("torch", "cpu", "bfloat16", 4, 0)
GPU = DeviceReport("torch", "cuda:0", "bfloat16", 4, 0)


@pytest.fixture
def spec(tmp_path: Path) -> BackendSpec:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return BackendSpec(tmp_path, "auto", "auto", 4, 4096, 64, 65536, vllm=VllmSpec(tmp_path / "scratch"))


def opening(spec: BackendSpec, report: DeviceReport, **vllm: Any) -> Any:
    assert spec.vllm is not None
    return plan(spec, replace(spec.vllm, **vllm), INFO, report)


def test_on_a_cpu_the_cache_holds_max_kv_tokens(spec: BackendSpec) -> None:
    """30 layers, keys and values, 3 heads of 64, 2 bytes: 23,040 bytes a token, and half a block for each sequence."""
    opened = opening(spec, CPU)
    assert opened.env["VLLM_CPU_KVCACHE_SPACE"] == "2"
    assert (opened.env["OMP_NUM_THREADS"], opened.gpu, opened.eager) == ("4", None, True)
    assert "2 GiB" in opened.where
    assert opening(replace(spec, max_kv_tokens=256), CPU).context == 256


def test_on_a_cpu_a_place_for_adapters_stays_empty(spec: BackendSpec) -> None:
    """vLLM's build for CPUs computes sequences without an adapter with what lies in the last place."""
    places = [arguments(asdict(opening(spec, device)))["max_loras"] for device in (CPU, GPU)]
    assert places == [opening(spec, CPU).adapters + 1, opening(spec, GPU).adapters]


def test_one_gpu_is_split_and_two_are_not(spec: BackendSpec) -> None:
    shared, own = opening(spec, GPU), opening(spec, GPU, gpu=1)
    assert (shared.fraction, shared.gpu) == (0.45, 0)
    assert (own.fraction, own.gpu) == (0.9, 1)
    assert opening(spec, GPU, memory_fraction=0.3).fraction == 0.3
    vllm = spec.vllm
    assert vllm is not None
    assert training_share(vllm, "cuda:0") == pytest.approx(0.55)
    assert training_share(replace(vllm, gpu=1), "cuda:0") == 1.0
    several = replace(GPU, device="cuda:0-3; sampling gathers layers")
    assert (opening(spec, several).gpu, opening(spec, several, gpu=4).fraction) == (0, 0.9)
    assert "45%" in shared.where


def test_ends_come_from_the_generation_config_first(spec: BackendSpec) -> None:
    assert opening(spec, CPU).eos == (2,)
    (spec.folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    assert opening(spec, CPU).eos == (7, 8)


def test_room_for_adapters_comes_in_steps(spec: BackendSpec) -> None:
    opened = opening(spec, CPU)
    assert opened.rank == 32
    assert [opened.with_rank(rank).rank for rank in (3, 32, 33, 256)] == [8, 32, 64, 256]


def test_who_samples(spec: BackendSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto`: vLLM where an interpreter for it was named, or beside a GPU where it is installed."""
    vllm = spec.vllm
    assert vllm is not None
    named = replace(spec, vllm=replace(vllm, python=Path(sys.executable)))
    for sampler, given, found, wants in (
        ("engine", named, True, (False, False)),
        ("vllm", spec, False, (True, True)),
        ("auto", spec, True, (False, True)),
        ("auto", spec, False, (False, False)),
        ("auto", named, False, (True, True)),
    ):
        monkeypatch.setattr("importlib.util.find_spec", lambda name, found=found: object() if found else None)
        asked = replace(given, sampler=sampler)
        assert (wanted(asked, "cpu"), wanted(asked, "cuda:0")) == wants, (sampler, found)


def test_mixtures_are_our_engine_s(spec: BackendSpec, caplog: pytest.LogCaptureFixture) -> None:
    """vLLM reads experts' adapters in another form (A10). Where it was not asked for by name, that costs nothing."""
    info = replace(INFO, family="qwen3_moe")
    nothing: Any = object()
    backend = Backend(info, CPU, train=nothing, sample=nothing)
    assert spec.vllm is not None
    named = replace(spec, sampler="auto", vllm=replace(spec.vllm, python=Path(sys.executable)))
    assert attach(backend, named) is backend
    assert "our own engine samples" in caplog.text
    with pytest.raises(ModelError, match="does not sample 'qwen3_moe'"):
        attach(backend, replace(spec, sampler="vllm"))


def test_a_python_without_vllm_is_told_what_to_do(spec: BackendSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert spec.vllm is not None
    with pytest.raises(ModelError, match="has none") as caught:
        python_of(spec.vllm)
    assert "--vllm-python" in caught.value.hint


@pytest.mark.parametrize("backend", ["mps", "remote"])
def test_vllm_samples_beside_the_pytorch_engine_only(backend: str) -> None:
    with pytest.raises(SettingsError, match=f"does not go with engine.backend '{backend}'"):
        resolve({"engine.sampler": "vllm", "engine.backend": backend}, {}, None)


def test_settings_by_variable(tmp_path: Path) -> None:
    env = {"OPENRL_SAMPLER": "vllm", "OPENRL_VLLM_PYTHON": "/opt/python", "OPENRL_VLLM_MEMORY_FRACTION": "0.3"}
    engine = resolve({"data_dir": str(tmp_path), "engine.vllm_gpu": "1"}, env, None).settings.engine
    assert (engine.sampler, engine.vllm_python, engine.vllm_gpu) == ("vllm", Path("/opt/python"), 1)
    assert (engine.vllm_memory_fraction, engine.vllm_hang_seconds) == (0.3, 120.0)


def test_the_training_half_knows_who_samples(spec: BackendSpec) -> None:
    """On several devices it then keeps no copy of the base for that."""
    assert training_half(spec, "cpu").sampler == "engine"
    given = replace(spec, sampler="auto", vllm=VllmSpec(spec.folder / "scratch", Path("/opt/python")))
    assert training_half(given, "cpu").sampler == "vllm"
    assert training_half(replace(spec, sampler="engine"), "cuda").device == "cuda"
