"""Memory: the limits that MLX is given, what is free, and how much of it a training step takes.

On Apple Silicon the GPU and everything else share one memory. MLX keeps buffers for reuse and, unless told otherwise,
lets macOS page out weights; so what it may keep wired and cached is set from the machine's size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import mlx.core as mx
import psutil

from openrl.backends.common.lora import LoraShape
from openrl.checkpoints.peft import HEAD_NAME
from openrl.models.info import available_memory

_WORDS = ("out of memory", "insufficient memory", "unable to allocate", "maximum allowed buffer size", "bad_alloc")
_CACHE_SHARE = 16  # buffers kept for reuse take at most this part of the memory
_STEP_SHARE = 0.5  # a training step may take this part of what is free
# What a layer holds beyond the values that `MemoryPlan.layer` counts, copies of strided views above all; and how many
# copies of attention's scores. Both measured on tiny models, in float32 and bf16.
_OVERHEAD = 1.5
_SCORES = 3
_STEP_COPIES = 5  # measured, too
HEAD_CELLS = 3 << 23  # logits that the output head holds at once: 96 MiB of float32
_HEAD_COPIES = 4


def has_gpu() -> bool:
    """Whether MLX computes on a GPU."""
    return mx.default_device().type == mx.DeviceType.gpu


def device_name() -> str:
    """For `openrl status`: the GPU's name, or that there is none."""
    return str(mx.device_info().get("device_name", "gpu")) if has_gpu() else "cpu (mlx)"


def machine_memory() -> int:
    """Bytes that this process could use at best: on a GPU what macOS recommends, else what the machine has."""
    total = psutil.virtual_memory().total
    return int(mx.device_info().get("max_recommended_working_set_size", total)) if has_gpu() else total


def set_limits() -> None:
    """Wire as much memory as the GPU may use well, and bound the cache of buffers."""
    memory = machine_memory()
    mx.set_cache_limit(memory // _CACHE_SHARE)
    if has_gpu():
        mx.set_wired_limit(memory)
    else:
        # Without a GPU, MLX would compile functions with the machine's C++ compiler, which may be missing.
        mx.disable_compile()


def free_memory() -> int:
    """Bytes that may still be taken."""
    free = available_memory() + mx.get_cache_memory()
    return min(free, machine_memory() - mx.get_active_memory()) if has_gpu() else free


def is_out_of_memory(error: RuntimeError | MemoryError) -> bool:
    """Whether MLX raised this because an allocation failed; only the message tells."""
    return isinstance(error, MemoryError) or any(word in str(error).lower() for word in _WORDS)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What a training step takes, from a model's sizes alone; `bytes_per_value` is that of the compute dtype."""

    layers: int
    hidden: int
    inner: int
    heads: int
    width: int  # of queries
    qkv: int  # of queries, keys and values together
    vocab: int
    bytes_per_value: int

    @classmethod
    def of(cls, shapes: Mapping[str, LoraShape], heads: int, bytes_per_value: int) -> MemoryPlan:
        """From the sizes of a model's adaptable layers, which are all of its large ones."""
        first = {name.rpartition(".")[2]: shape for name, shape in shapes.items() if name.startswith("model.layers.0.")}
        q, k, head = first["q_proj"], first["k_proj"], shapes[HEAD_NAME]
        return cls(
            layers=sum(name.endswith(".q_proj") for name in shapes),
            hidden=head.inputs,
            inner=first["gate_proj"].outputs,
            heads=heads,
            width=q.outputs,
            qkv=q.outputs + 2 * k.outputs,
            vocab=head.outputs,
            bytes_per_value=bytes_per_value,
        )

    def gradients(self) -> int:
        """Bytes that gradients of base weights take on their way to their sums: the largest, that of the vocabulary,
        before and after an addition, and those of a layer."""
        layer = self.hidden * (self.qkv + self.width + 3 * self.inner)
        return 2 * 4 * self.vocab * self.hidden + (4 + self.bytes_per_value) * layer

    def step(self) -> int:
        """Bytes that an optimizer step of base weights takes beside them: what is computed of the largest tensor."""
        return _STEP_COPIES * 4 * self.hidden * max(self.vocab, self.inner)

    def layer(self, rows: int, length: int) -> int:
        """Bytes of all that one layer computes, there and back, for rows padded to one length. Attention's scores are
        among them: MLX differentiates it by way of all scores at once."""
        token = 8 * self.hidden + 4 * self.qkv + 2 * self.width + 6 * self.inner
        scores = _SCORES * self.heads * length
        return int(rows * length * (_OVERHEAD * token + scores) * self.bytes_per_value)

    def needed(self, rows: int, length: int, *, keep: bool) -> int:
        """Bytes of a micro-batch, kept whole or layer by layer, with the head's logits."""
        head = _HEAD_COPIES * 4 * min(HEAD_CELLS, rows * length * self.vocab)
        inputs = self.layers * rows * length * self.hidden * self.bytes_per_value
        return head + (self.layers * self.layer(rows, length) if keep else inputs + 5 * self.layer(rows, length) // 4)

    def keeps(self, rows: int, length: int, free: int) -> bool:
        """Whether the forward pass of a micro-batch can be kept whole."""
        return self.needed(rows, length, keep=True) <= free * _STEP_SHARE

    def tokens(self, longest: int, free: int, most: int) -> int:
        """Tokens, padding included, that micro-batches should have whose longest row is so long: `most`, or what fits
        layer by layer, but one row at least."""
        rows = max(1, most // longest)
        while rows > 1 and self.needed(rows, longest, keep=False) > free * _STEP_SHARE:
            rows //= 2
        return max(longest, min(most, rows * longest))
