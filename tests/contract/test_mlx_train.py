"""What is MLX's own in training: both ways back, logits in pieces, lack of memory, quantised bases, what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from openrl.backends.base import BackendSpec
from openrl.errors import BadRequest, ModelError, OutOfMemory
from openrl.types import Array, FullSpec, TrainOutput
from support import tiny
from support.reference import Reference, distance
from support.training import (
    RUN,
    SPEC,
    Held,
    ce,
    create,
    forward,
    forward_backward,
    item,
    needs_mlx,
    open_trainer,
    run_pass,
    same,
)

mx = pytest.importorskip("mlx.core", reason="MLX is not installed")
pytestmark = needs_mlx

Folders = Callable[..., Path]


@pytest.fixture
def held(model_folder: Folders, tmp_path: Path) -> Held:
    opened = open_trainer("mps", model_folder("llama"))
    create(opened, tmp_path)
    return opened


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_layer_by_layer_gives_the_same(
    family: str, dtype: str, model_folder: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradient checkpointing: each layer computed again before it is differentiated, to the last bit the same."""
    from openrl.backends.mps.memory import MemoryPlan

    found: list[dict[str, Array]] = []
    for keep in (True, False):
        monkeypatch.setattr(MemoryPlan, "keeps", lambda *_, keep=keep: keep)
        opened = open_trainer("mps", model_folder(family), dtype)
        create(opened, tmp_path)
        forward_backward(opened, ce(20, 33, 9))
        found.append(opened.gradients(RUN))
    assert same(found[0], found[1])


def test_a_pass_is_cut_to_what_is_free(model_folder: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    """`max_batch_tokens`, padding included, is an upper bound; below it memory decides, down to one row."""
    from openrl.backends.mps import passes

    opened = open_trainer("mps", model_folder("llama"), max_batch_tokens=400)
    opened.create(RUN, SPEC)
    turns = [len(list(opened.train_pass((item(ce(*[100] * 8)),))))]
    monkeypatch.setattr(passes, "free_memory", lambda: 0)
    turns.append(len(list(opened.train_pass((item(ce(*[100] * 8)),)))))
    assert turns == [2, 8]


def test_logits_in_pieces(model_folder: Folders, references: Callable[..., Reference], tmp_path: Path) -> None:
    """The head gives the same whether a datum's logits fit its budget, share it, or need several rounds."""
    from openrl.backends.mps.head import Head

    opened: Any = open_trainer("mps", model_folder("gemma3"))
    create(opened, tmp_path)
    payload = ce(3, 9, 2, 25)
    truth = references("gemma3").answer(payload, opened.parameters(RUN), SPEC.rank)
    for rows in (1, 4, 25, 1000):
        opened.load(RUN, tmp_path / f"{RUN}-0", optimizer=False)
        opened._passes._head = Head(opened._model, rows * tiny.VOCAB)
        output = forward_backward(opened, payload)
        assert distance(opened.gradients(RUN), truth.gradients) < 3e-5
        for lp, expected in zip(output.logprobs, truth.logprobs, strict=True):
            np.testing.assert_allclose(lp, expected, atol=5e-5)


@pytest.mark.parametrize("fits", [2, 0])
def test_out_of_memory(held: Held, fits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory ran out: the same work in halves, sparingly; where one datum is too much its request fails (G6)."""
    from openrl.backends.mps import passes

    forward_backward(held, ce(20, 20, 20, 20, 20))
    expected = held.gradients(RUN)
    held.load(RUN, tmp_path / f"{RUN}-0", optimizer=False)
    inner, seen = passes.differentiate, list[tuple[int, bool]]()

    def cramped(model: Any, head: Any, batch: Any, judge: Any, *, backward: bool, keep: bool) -> Any:
        seen.append((len(batch.adapters), keep))
        if len(batch.adapters) > fits:
            raise RuntimeError("[metal::malloc] Attempting to allocate more than the maximum allowed buffer size.")
        return inner(model, head, batch, judge, backward=backward, keep=keep)

    monkeypatch.setattr(passes, "differentiate", cramped)
    (outcome,) = run_pass(held, item(ce(20, 20, 20, 20, 20))).values()
    if fits:
        assert isinstance(outcome, TrainOutput)
        assert distance(held.gradients(RUN), expected) < 1e-5
        assert seen == [(5, True), (3, False), (2, False), (1, False), (2, False)]
    else:
        assert isinstance(outcome, OutOfMemory)
        assert not any(g.any() for g in held.gradients(RUN).values())


def test_other_faults_are_not_swallowed(held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug is raised to the worker loop, not retried as if memory had run out."""
    from openrl.backends.mps import passes

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("index out of range")

    monkeypatch.setattr(passes, "differentiate", broken)
    with pytest.raises(RuntimeError, match="index out of range"):
        run_pass(held, item(ce(10)))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_quantised_base(family: str, bits: int, tmp_path: Path) -> None:
    """QLoRA: on an MLX-quantised folder, what the reference gives on the weights that the folder stands for."""
    plain = tiny.build(tmp_path / "plain", family, hidden_size=64, intermediate_size=64, head_dim=16)
    packed, unpacked = quantise(plain, tmp_path, bits)
    opened = open_trainer("mps", packed)
    create(opened, tmp_path)
    payload = ce(20, 33)
    output = forward_backward(opened, payload)
    truth = Reference(unpacked).answer(payload, opened.parameters(RUN), SPEC.rank)
    for lp, expected in zip(output.logprobs, truth.logprobs, strict=True):
        np.testing.assert_allclose(lp, expected, atol=1e-4)
    assert distance(opened.gradients(RUN), truth.gradients) < 1e-4


def quantise(plain: Path, into: Path, bits: int) -> tuple[Path, Path]:
    """The folder quantised as mlx-lm does, and a folder with the weights that this gives, in float32."""
    from mlx.utils import tree_flatten
    from mlx_lm.utils import dequantize_model, load_model, quantize_model, save_config

    config = json.loads((plain / "config.json").read_text())
    module, _ = load_model(plain)
    module, changed = quantize_model(module, config, group_size=32, bits=bits)
    packed, unpacked = into / "packed", into / "unpacked"
    for folder in (packed, unpacked):
        shutil.copytree(plain, folder)
    mx.save_safetensors(str(packed / "model.safetensors"), dict(tree_flatten(module.parameters())))
    save_config(changed, packed / "config.json")
    weights = dict(tree_flatten(dequantize_model(module).parameters()))
    mx.save_safetensors(str(unpacked / "model.safetensors"), weights, metadata={"format": "pt"})
    return packed, unpacked


@pytest.mark.parametrize(("family", "window"), [("mistral", 16), ("gemma2", 16)])
def test_windows_that_mlx_lm_does_not_know_bound_the_context(
    family: str, window: int, model_folder: Folders, references: Callable[..., Reference], tmp_path: Path
) -> None:
    """No silent difference: contexts end where mlx-lm would begin to compute another model. Soft-capping is right."""
    opened: Any = open_trainer("mps", model_folder(family))
    assert opened._model.max_context == window
    create(opened, tmp_path)
    payload = ce(16, 9)
    output = forward_backward(opened, payload)
    truth = references(family).answer(payload, opened.parameters(RUN), SPEC.rank)
    np.testing.assert_allclose(output.logprobs[0], truth.logprobs[0], atol=5e-5)
    assert distance(opened.gradients(RUN), truth.gradients) < 3e-5


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 500000.0, "rope_type": "default"},
        {
            "rope_theta": 1e5,
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ],
)
def test_rotary_settings_reach_mlx_lm(rope: dict[str, Any], tmp_path: Path) -> None:
    """Transformers 5 writes them where mlx-lm's llama does not look."""
    folder = tiny.build(tmp_path / "model", rope_parameters=rope)
    opened = open_trainer("mps", folder)
    create(opened, tmp_path)
    payload = ce(60)
    truth = Reference(folder).answer(payload, opened.parameters(RUN), SPEC.rank)
    np.testing.assert_allclose(forward(opened, payload).logprobs[0], truth.logprobs[0], atol=5e-5)


@pytest.mark.parametrize("change", [{"model_type": "gpt2"}, {"model_type": "qwen3_moe"}, {"model_type": "none_such"}])
def test_unusual_families_are_refused(change: dict[str, Any], model_folder: Folders, tmp_path: Path) -> None:
    """Refused rather than guessed, naming the family."""
    folder = shutil.copytree(model_folder("llama"), tmp_path / "model")
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ModelError, match=change["model_type"]):
        open_trainer("mps", folder)


def test_info_and_report(model_folder: Folders) -> None:
    """What the daemon checks requests against, and what `openrl status` shows."""
    from openrl.backends.mps import open_backend

    spec = BackendSpec(model_folder("llama"), "auto", "float32", 1, 256, 4, 512, name="tiny/model")
    backend = open_backend(spec)
    info, report = backend.info, backend.report
    assert (info.vocab_size, info.max_context, info.family, info.max_lora_rank) == (tiny.VOCAB, 256, "llama", 16)
    assert info.parameters == 97 * 32 + 3 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48 + 2 * 32) + 32
    assert report.dtype == "float32"
    assert report.device
    with pytest.raises(ModelError, match="int8"):
        open_backend(replace(spec, dtype="int8"))


def test_all_parameters_are_trained_only_as_they_are_stored(
    model_folder: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F1, F5: a quantised base cannot be trained whole, nor one of which mlx-lm keeps other weights than its folder
    has; both say so (`ModelInfo.full_tuning`), and LoRA runs go on."""
    from mlx_lm.models import llama

    from openrl.backends.mps import open_backend

    plain = tiny.build(tmp_path / "plain", hidden_size=64, intermediate_size=64, head_dim=16)
    more = shutil.copytree(model_folder("llama"), tmp_path / "more")
    weights = dict(mx.load(str(more / "model.safetensors")))
    mx.save_safetensors(str(more / "model.safetensors"), {**weights, "model.more.weight": mx.zeros(3)})
    monkeypatch.setattr(llama.Model, "sanitize", lambda _, weights: {n: weights[n] for n in weights if "more" not in n})
    for folder, why in ((quantise(plain, tmp_path, 4)[0], "quantised"), (more, r"keep model\.more\.weight")):
        backend: Any = open_backend(BackendSpec(folder, "auto", "float32", 1, 256, 4, 512))
        assert backend.info.full_tuning is False
        backend.train.create(RUN, SPEC)
        with pytest.raises(BadRequest, match=why):
            backend.train.create(RUN, FullSpec())
        assert backend.train.parameters(RUN)


def test_all_parameters_are_trained_only_if_mlx_lm_computes_with_what_is_stored(
    model_folder: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F5: where a family's code changes weights as it loads them, a checkpoint of what is trained would mean another
    model to transformers."""
    from mlx_lm.models import llama

    from openrl.backends.mps import open_backend

    sanitize: Any = llama.Model.sanitize

    def shifted(self: Any, weights: dict[str, Any]) -> dict[str, Any]:
        return {name: w + 1 if name == "model.norm.weight" else w for name, w in sanitize(self, weights).items()}

    monkeypatch.setattr(llama.Model, "sanitize", shifted)
    backend = open_backend(BackendSpec(model_folder("llama"), "auto", "float32", 1, 256, 4, 512))
    with pytest.raises(BadRequest, match=r"mlx-lm changes model\.norm\.weight"):
        backend.train.create(RUN, FullSpec())


def test_torch_is_not_needed() -> None:
    """The backend runs where PyTorch is not installed."""
    import subprocess
    import sys

    code = "import sys; sys.modules['torch'] = None; import openrl.backends.mps"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
