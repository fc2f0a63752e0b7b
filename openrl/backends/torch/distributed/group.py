"""The ranks of one machine joined by `torch.distributed`: NCCL between GPUs, gloo between processes on a CPU."""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from openrl.errors import BackendFault

# Seconds that a rank waits for the others. Between two collectives lies the work on one layer, or that on the output
# head with the losses of a micro-batch.
TIMEOUT = 300.0
_DIST: Any = dist
# Its name until PyTorch 2.13 is the second one.
_all_gather: Any = getattr(_DIST, "all_gather_single", None) or _DIST.all_gather_into_tensor


class GroupBroken(BackendFault):
    """A rank is gone or does not answer: the ranks that are left cannot go on, and must be started anew."""


class Pending(Protocol):
    """A collective under way."""

    def wait(self) -> object: ...


@dataclass(frozen=True, slots=True)
class Group:
    """One rank's membership. Every call is to be made by all ranks, in the same order."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh

    @classmethod
    def join(
        cls,
        rank: int,
        size: int,
        device: torch.device,
        port: int,
        timeout: float,
        listener: socket.socket | None = None,
    ) -> Group:
        """Meet the other ranks at a port of this machine, where rank 0 is the `listener`. A process can be in one group
        at a time. Raises `GroupBroken`."""
        _stay_on_this_machine()
        if device.type == "cuda":
            torch.cuda.set_device(device)
        try:
            dist.init_process_group(
                "nccl" if device.type == "cuda" else "gloo",
                store=_store(port, size, timeout, listener),
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=timeout),
                device_id=device if device.type == "cuda" else None,
            )
            return cls(rank, size, device, init_device_mesh(device.type, (size,)))
        except RuntimeError as error:
            raise _broken(error) from error

    def shard(self, whole: Tensor) -> DTensor:
        """A flat tensor of rank 0, whose length the number of ranks divides, as equal parts one after another. Of the
        other ranks' tensors only shape and dtype count."""
        try:
            return distribute_tensor(whole, self.mesh, [Shard(0)], src_data_rank=0)
        except RuntimeError as error:
            raise _broken(error) from error

    def gather(self, whole: Tensor, sharded: DTensor) -> Pending:
        """Begin to put the parts together in `whole`."""
        try:
            work: Any = _all_gather(whole, sharded.to_local(), async_op=True)
            return _Guarded(work)
        except RuntimeError as error:
            raise _broken(error) from error

    def add_up(self, tensor: Tensor) -> None:
        """Make `tensor` on each rank the sum of those of all."""
        try:
            dist.all_reduce(tensor)
        except RuntimeError as error:
            raise _broken(error) from error

    def share(self, tensor: Tensor) -> None:
        """Make `tensor` on each rank what it is on rank 0."""
        try:
            dist.broadcast(tensor, 0)
        except RuntimeError as error:
            raise _broken(error) from error

    def leave(self) -> None:
        """Give the membership up, without the others."""
        if dist.is_initialized():
            dist.destroy_process_group()


@dataclass(frozen=True, slots=True)
class _Guarded:
    work: Pending

    def wait(self) -> object:
        try:
            return self.work.wait()
        except RuntimeError as error:
            raise _broken(error) from error


def listen() -> socket.socket:
    """Where rank 0 will meet the others: any free port, for processes of this machine alone."""
    return socket.create_server(("127.0.0.1", 0))


def _store(port: int, size: int, timeout: float, listener: socket.socket | None) -> Any:
    """The table through which ranks find each other; rank 0 serves it on its listener, which is then the store's."""
    given: dict[str, Any] = {} if listener is None else {"master_listen_fd": listener.detach()}
    wait = timedelta(seconds=timeout)
    return _DIST.TCPStore(
        "127.0.0.1", port, size, is_master=listener is not None, timeout=wait, wait_for_workers=False, **given
    )


def _broken(error: RuntimeError) -> GroupBroken:
    first = str(error).strip().partition("\n")[0]
    return GroupBroken(f"the devices of this base model lost touch with each other: {first}")


def _stay_on_this_machine() -> None:
    """Nobody else is to reach the ranks' sockets, which ask for no key."""
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    os.putenv("GLOO_SOCKET_IFNAME", loopback)
    os.putenv("NCCL_SOCKET_IFNAME", loopback)
