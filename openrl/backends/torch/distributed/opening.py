"""Opening one base model on several ranks: rank 0 reads the folder and shares, the others only ever see their parts."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from openrl.backends.base import BackendSpec
from openrl.backends.torch.device import Compute
from openrl.backends.torch.distributed.commands import Layout, Opening
from openrl.backends.torch.distributed.followers import Followers
from openrl.backends.torch.distributed.group import TIMEOUT, Group, listen
from openrl.backends.torch.distributed.layers import Stack, stacks_of
from openrl.backends.torch.distributed.member import Member
from openrl.backends.torch.distributed.memory import Footprint, is_spread
from openrl.backends.torch.distributed.team import Team
from openrl.backends.torch.distributed.trainer import SpreadTrainer
from openrl.backends.torch.distributed.windows import Windows
from openrl.backends.torch.full_model import parameter_shapes
from openrl.backends.torch.memory import free_memory
from openrl.backends.torch.model import CausalLM, attention_of, open_model, open_up
from openrl.backends.torch.train import Trainer
from openrl.errors import ModelError

_HEAD = "head"  # the name of an output head that is not the embedding, too


@dataclass(frozen=True, slots=True)
class Opened:
    """Rank 0's model and trainer. `whole`: it keeps a copy of the decoder layers to sample with."""

    model: CausalLM
    trainer: SpreadTrainer
    whole: bool

    @property
    def resident(self) -> int:
        """Bytes of the machine's memory that all ranks' processes have."""
        others = [psutil.Process(pid) for pid in self.trainer.team.followers.pids]
        return sum(process.memory_info().rss for process in (psutil.Process(), *others))

    @property
    def place(self) -> str:
        """The devices, in words."""
        device, ranks = self.model.device, self.trainer.team.size
        where = f"cuda:0-{ranks - 1}" if device.type == "cuda" else f"cpu, {ranks} processes"
        return where if self.whole else f"{where}; sampling gathers layers"


def open_team(spec: BackendSpec, compute: Compute, *, whole: bool | None = None, timeout: float = TIMEOUT) -> Opened:
    """Start the other ranks and share the model with them. Raises `ModelError` for a model that cannot be spread, or
    does not fit. By default rank 0 keeps a whole copy where it samples and has the memory."""
    config = AutoConfig.from_pretrained(spec.folder)
    if spec.quantize != "none":
        raise ModelError(
            f"weights in four bits (engine.quantize {spec.quantize!r}) are not spread over devices.",
            "Serve with --devices 1, or without --quantize.",
        )
    fits = _may_keep_whole(config, spec.devices, compute)
    whole = fits and spec.sampler != "vllm" if whole is None else whole
    listener = listen()
    openings = _openings(spec, compute, listener.getsockname()[1], timeout)
    followers = Followers(openings[1:], spec.lost, timeout)
    with ExitStack() as undo, listener:
        undo.callback(followers.close)
        model = open_model(spec.folder, compute.device if whole else torch.device("cpu"), compute.dtype)
        member = _first_member(model, openings[0], followers, listener, whole=whole)
        undo.pop_all()
    trainer = SpreadTrainer(Team(member, followers, spec.lost))
    if not whole:
        model.fetch = trainer.fetch
    return Opened(model, trainer, whole)


def open_follower(opening: Opening, rank_0: Connection) -> Member:
    """A rank above 0, whose model has no weights but those that rank 0 shares."""
    torch.set_num_threads(opening.threads)
    device, dtype = torch.device(opening.device), getattr(torch, opening.dtype)
    config = AutoConfig.from_pretrained(opening.folder)
    with torch.device("meta"):
        empty: Any = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention_of(config))
    model = open_up(empty, opening.folder, torch.device("meta"), dtype)
    rank_0.send(None)  # ready to join
    group = Group.join(opening.rank, opening.ranks, device, opening.port, opening.timeout)
    return _member(model, group, opening, rank_0.recv(), keep=False)


def _openings(spec: BackendSpec, compute: Compute, port: int, timeout: float) -> list[Opening]:
    def device(rank: int) -> str:
        return f"cuda:{rank}" if compute.device.type == "cuda" else "cpu"

    return [
        Opening(
            folder=spec.folder,
            device=device(rank),
            dtype=str(compute.dtype).removeprefix("torch."),
            threads=max(1, compute.threads // spec.devices),
            rank=rank,
            ranks=spec.devices,
            port=port,
            timeout=timeout,
            max_batch_tokens=spec.max_batch_tokens,
            name=spec.name,
        )
        for rank in range(spec.devices)
    ]


def _may_keep_whole(config: Any, ranks: int, compute: Compute) -> bool:
    """Whether rank 0 has the memory for a whole copy; raises `NoRoom` where not even the parts fit."""
    on_gpu = compute.device.type == "cuda"
    shapes = {name: tuple(shape) for name, shape in parameter_shapes(config).items()}
    footprint = Footprint.of(shapes, compute.dtype.itemsize, wide_head=not on_gpu)
    return footprint.keeps_whole(ranks, free_memory(compute.device), shared=not on_gpu)


def _first_member(
    model: CausalLM, opening: Opening, followers: Followers, listener: socket.socket, *, whole: bool
) -> Member:
    torch.set_num_threads(opening.threads)
    device = torch.device(opening.device)
    followers.await_ready()
    group = Group.join(0, opening.ranks, device, opening.port, opening.timeout, listener)
    layout = _layout(model)
    followers.tell([layout] * (opening.ranks - 1))
    return _member(model, group, opening, layout, keep=whole)


def _member(model: CausalLM, group: Group, opening: Opening, layout: Layout, *, keep: bool) -> Member:
    """Share all that is not spread, spread the rest, and make the trainer over it."""
    for name, (shape, kind) in layout.tensors.items():
        dtype = getattr(torch, kind)
        empty = group.rank > 0
        tensor = torch.empty(shape, dtype=dtype, device=group.device) if empty else _get(model, name).to(group.device)
        group.share(tensor)
        _put(model, name, tensor)
    if layout.tied is not None:
        model.head = _get(model, layout.tied)
    model.head_wide = model.head if group.device.type == "cuda" else model.head.float()
    model.device = group.device
    _check_filled(model)
    windows = Windows(group, model.dtype)
    layers = [stacks_of(layer) for layer in _layers(model)]
    windows.reserve([[stack.matrices for stack in stacks] for stacks in layers])
    for index, stacks in enumerate(layers):
        _spread(stacks, index, windows, own=keep or group.rank > 0)
    trainer = Trainer(model, opening.max_batch_tokens, opening.name)
    return Member(group, windows, model, trainer, opening.max_batch_tokens)


def _spread(stacks: Sequence[Stack], index: int, windows: Windows, *, own: bool) -> None:
    """Put a layer's matrices into the windows' hands. What is its `own` stays with it, too: rank 0's copy to sample
    with, and the empty ones of others."""
    views = windows.adopt([stack.matrices for stack in stacks])
    for stack, view in zip(stacks, views, strict=True):
        stack.hold(view, lambda: windows.visit(index), own=own)


def _layers(model: CausalLM) -> Any:
    return model.backbone.get_submodule("layers")


def _layout(model: CausalLM) -> Layout:
    """All tensors of rank 0's model but the matrices that are spread."""
    every = dict((*model.backbone.named_parameters(), *model.backbone.named_buffers()))
    rest = {name: tensor for name, tensor in every.items() if not is_spread(name)}
    tied = next((name for name, tensor in rest.items() if tensor.data_ptr() == model.head.data_ptr()), None)
    if tied is None:
        rest[_HEAD] = model.head
    kinds = {name: (tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in rest.items()}
    return Layout(kinds, tied)


def _get(model: CausalLM, name: str) -> Tensor:
    if name == _HEAD:
        return model.head
    path, _, leaf = name.rpartition(".")
    tensor: Tensor = getattr(model.backbone.get_submodule(path), leaf)
    return tensor.detach().contiguous()


def _put(model: CausalLM, name: str, tensor: Tensor) -> None:
    if name == _HEAD:
        model.head = tensor
        return
    path, _, leaf = name.rpartition(".")
    module = model.backbone.get_submodule(path)
    held = leaf in dict(module.named_buffers(recurse=False))
    setattr(module, leaf, tensor if held else nn.Parameter(tensor, requires_grad=False))


def _check_filled(model: CausalLM) -> None:
    """A tensor that is neither parameter nor buffer would have been missed."""
    for path, module in model.backbone.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and value.is_meta:
                raise ModelError(f"{path}.{name} of this model is not shared with the other devices.")
