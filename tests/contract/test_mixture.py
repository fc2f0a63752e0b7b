"""Mixtures of experts: names and stacks of their adapters (A10, A15), the way back through the router, files that leave
and come. What all families share is the suite's (test_suite.py)."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM

from openrl.backends.torch.experts import Router
from openrl.backends.torch.model import CausalLM, open_model
from openrl.backends.torch.sample_backbone import backbone_of
from openrl.checkpoints.archive import archive
from openrl.checkpoints.experts import one_by_one
from openrl.checkpoints.foreign import read_foreign
from openrl.checkpoints.peft import ADAPTER_FILE, CONFIG_FILE, read_adapter, write_adapter
from openrl.errors import BadRequest, ModelError
from openrl.models import linear
from openrl.models.merge import merge
from openrl.selftest.case import State, run_case
from openrl.selftest.subject import Subject
from openrl.selftest.suite import CASES
from openrl.types import Array, FullSpec, LoraSpec
from support import tiny
from support.faulty import Copies, Trainer
from support.reference import Reference, distance
from support.training import RUN, ce, create, forward, forward_backward, trainer
from support.variants import VARIANTS, Subjects

pytestmark = [  # PEFT's own, while it reads adapters
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning"),
]
EXPERTS, HIDDEN, INNER = 5, 32, 24
CPU = torch.device("cpu")
Folders = Callable[..., Path]


@pytest.fixture
def saved(model_folder: Folders, tmp_path: Path) -> Path:
    """The checkpoint of an adapter that does something."""
    held = trainer(model_folder(tiny.MIXTURE))
    create(held, tmp_path)
    into = tmp_path / "saved"
    into.mkdir()
    held.save(RUN, into, optimizer=True, gradients=False)
    return into


# ---- stacks ----


def test_a10_a15_stacks_under_their_names(saved: Path) -> None:
    """A10: gate (w1) and up (w3) share A, down (w2) shares B. A15: keys, three-dimensional. Dense layers among them are
    called as ever; the router has nothing, since it is not trained (4.2)."""
    with safe_open(saved / ADAPTER_FILE, framework="np") as opened:
        shapes = {key: tuple(opened.get_slice(key).get_shape()) for key in opened.keys()}  # noqa: SIM118
    place = "base_model.model.model.layers.{}.mlp"
    for layer in (0, 2):
        stack = f"{place.format(layer)}.experts"
        for name in ("w1", "w3"):
            assert shapes[f"{stack}.{name}.lora_A.weight"] == (1, 4, HIDDEN)
            assert shapes[f"{stack}.{name}.lora_B.weight"] == (EXPERTS, INNER, 4)
        assert shapes[f"{stack}.w2.lora_A.weight"] == (EXPERTS, 4, INNER)
        assert shapes[f"{stack}.w2.lora_B.weight"] == (1, HIDDEN, 4)
        assert sum(key.startswith(place.format(layer)) for key in shapes) == 6
    assert shapes[f"{place.format(1)}.gate_proj.lora_A.weight"] == (4, HIDDEN)
    assert json.loads((saved / CONFIG_FILE).read_text())["target_modules"] == sorted(
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3", "lm_head"]
    )


@pytest.mark.parametrize("shape", [(1, INNER, 4), (EXPERTS + 1, INNER, 4)])
def test_a10_other_stacks_are_refused(
    shape: tuple[int, ...], saved: Path, model_folder: Folders, tmp_path: Path
) -> None:
    """Both factors shared, and another number of experts."""
    read = read_adapter(saved)
    name = "model.layers.0.mlp.experts.w1.lora_B"
    bad = tmp_path / "bad"
    bad.mkdir()
    write_adapter(bad, read.spec, {**read.tensors, name: np.zeros(shape, np.float32)}, "")
    with pytest.raises(BadRequest, match=name):
        trainer(model_folder(tiny.MIXTURE)).load(RUN, bad, optimizer=False)


# ---- the way back ----


@pytest.mark.parametrize("renormalised", [True, False])
def test_gradients_are_those_of_a_token_and_an_expert_at_a_time(renormalised: bool, tmp_path: Path) -> None:
    """Float64 and autograd, routing weights included, whether or not those of the chosen experts sum to 1."""
    folder = tiny.build(tmp_path / "model", tiny.MIXTURE, norm_topk_prob=renormalised)
    held = trainer(folder)
    create(held, tmp_path)
    payload = ce(21, 9)
    output = forward_backward(held, payload)
    wanted = Reference(folder).answer(payload, held.parameters(RUN), 4)
    for found, right in zip(output.logprobs, wanted.logprobs, strict=True):
        np.testing.assert_allclose(found, right, atol=2e-5)
    assert distance(held.gradients(RUN), wanted.gradients) < 2e-5


@pytest.fixture(scope="module")
def subjects(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subjects]:
    opened = Subjects(tmp_path_factory.mktemp("mixture"))
    yield opened
    opened.close()


class OthersB(Trainer):
    """Each expert has the next one's B."""

    def __init__(self, inner: Any, scratch: Path) -> None:
        super().__init__(inner)
        self._copies = Copies(scratch, lambda name, t: np.roll(t, 1, axis=0) if name.endswith("w1.lora_B") else t)

    def load(self, run: Any, source: Path, *, optimizer: bool) -> None:
        self.inner.load(run, self._copies.of(source), optimizer=optimizer)


def no_router_gradient(_router: Router, _d_weights: Tensor, logits: Tensor, _chosen: Tensor) -> Tensor:
    return torch.zeros(len(logits), HIDDEN * 2)


@pytest.mark.parametrize("fault", ["another expert's B", "no gradient through the router"])
def test_a_planted_fault_is_found(
    fault: str, subjects: Subjects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the case that has no trouble without it (test_suite.py)."""
    good = subjects.get(VARIANTS[0], "qwen3_moe")
    bad = good.backend
    if fault == "another expert's B":
        bad = replace(bad, train=OthersB(bad.train, tmp_path))
    else:
        monkeypatch.setattr(Router, "back", no_router_gradient)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    (case,) = (case for case in CASES if case.name == "cross_entropy")
    outcome = run_case(case, Subject("cpu", bad, good.world, good.expected, scratch))
    assert outcome.state is State.FAILED
    assert outcome.worst is not None
    assert outcome.worst.share > 3


# ---- files that leave and come ----


def test_a16_a_merged_mixture_is_the_trained_function(saved: Path, model_folder: Folders, tmp_path: Path) -> None:
    """A16 of each expert, with what they share."""
    base = model_folder(tiny.MIXTURE)
    held = trainer(base)
    held.load(RUN, saved, optimizer=False)
    merged = tmp_path / "merged"
    merged.mkdir()
    merge(base, read_adapter(saved), merged)
    model = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)
    assert np.abs(logprobs(model) - forward(held, ce(24, seed=5)).logprobs[0]).max() < 2e-5
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    assert np.abs(logprobs(plain) - logprobs(model)).max() > 1e-2


def test_a15_an_archive_comes_back_as_it_was(saved: Path, model_folder: Folders, tmp_path: Path) -> None:
    rope = archive(saved)
    tar = tmp_path / "archive.tar"
    tar.write_bytes(b"".join(rope.read(0, rope.size)))
    with tarfile.open(tar) as opened:
        opened.extractall(tmp_path / "unpacked", filter="data")
    again = read_foreign(tmp_path / "unpacked", linear.Layers(model_folder(tiny.MIXTURE)), 256)
    before = read_adapter(saved).tensors
    assert again.tensors.keys() == before.keys()
    assert all(np.array_equal(again.tensors[name], before[name]) for name in before)


def test_peft_reads_experts_one_by_one(tmp_path: Path) -> None:
    """PEFT's own forward of what is exported for it, of a mixture as released ones are: every layer has experts."""
    base = tiny.build(tmp_path / "model", tiny.MIXTURE, mlp_only_layers=[])
    held = trainer(base)
    create(held, tmp_path, spec=LoraSpec(rank=4, seed=7, train_unembed=False))
    held.save(RUN, saved := made(tmp_path / "saved"), optimizer=False, gradients=False)
    write_adapter(out := made(tmp_path / "peft"), read_adapter(saved).spec, one_by_one(read_adapter(saved)), "")
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), out)
    assert np.abs(logprobs(model) - forward(held, ce(24, seed=5)).logprobs[0]).max() < 2e-5
    with pytest.raises(BadRequest, match="share one of the two"):
        read_foreign(out, linear.Layers(base), 256)


def test_peft_would_leave_dense_layers_among_experts_out(saved: Path) -> None:
    with pytest.raises(BadRequest, match="archive or --as merged"):
        one_by_one(read_adapter(saved))


def made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def logprobs(model: Any) -> Array:
    """What a transformers model gives for the targets of `ce(24, seed=5)`."""
    one = ce(24, seed=5).data[0]
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(one.tokens.astype(np.int64))[None]).logits[0].float()
    targets = torch.from_numpy(one.inputs["target_tokens"])
    return torch.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0].numpy()


# ---- what is refused ----


def test_f1_all_parameters_are_not_trained(subjects: Subjects) -> None:
    backend = subjects.get(VARIANTS[0], "qwen3_moe").backend
    assert backend.info.full_tuning is False
    with pytest.raises(BadRequest, match="mixture of experts"):
        backend.train.create(RUN, FullSpec())


def test_transformers_modules_never_sample_a_mixture(model_folder: Folders) -> None:
    """They would leave the experts' adapters out."""
    model: CausalLM = open_model(model_folder(tiny.MIXTURE), CPU, torch.float32)
    layers: Any = model.backbone
    layers.layers[0].input_layernorm = torch.nn.LayerNorm(HIDDEN)
    with pytest.raises(ModelError, match="a norm of type LayerNorm"):
        backbone_of(model)
