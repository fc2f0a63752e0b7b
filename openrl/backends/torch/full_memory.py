"""How much memory training all parameters takes: what stays for a run's life, and what a micro-batch adds.

Activations are those of transformers' own layers under autograd, which keeps several times what our own layers do;
`tests/contract/test_full_memory.py` counts them.
"""

from __future__ import annotations

from dataclasses import dataclass

from openrl.backends.torch.memory_plan import Sizes
from openrl.errors import OutOfMemory

_GIB = 1 << 30
_TOKENS = 512  # of the micro-batch that must fit


class FullSizes(Sizes):
    """Sizes of a model whose layers are transformers'. Streams between products are float32 in any dtype."""

    __slots__ = ()

    @property
    def kept(self) -> int:
        """Bytes that autograd keeps of a token in a layer."""
        width = self.heads * self.head_dim
        floats = 4 * self.norms * self.hidden + 3 * (width + self.kv_heads * self.head_dim)
        narrow = 6 * self.hidden + 3 * self.qkv + 3 * width + 6 * self.inner
        return 4 * floats + self.bytes_per_value * narrow

    @property
    def input(self) -> int:
        """Bytes of a token that a layer keeps when it is to be computed again."""
        return 4 * self.hidden

    @property
    def passing(self) -> int:
        """Bytes of a token outside of what layers keep: embeddings, last norm, gradients on their way."""
        return 4 * (10 * self.hidden + 2 * self.inner + self.qkv)


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes that a run takes: a value of each of these for every parameter, and the rest for a small micro-batch."""

    parameters: int
    masters: int
    gradient: int
    moments: int
    working: int
    rest: int

    @property
    def total(self) -> int:
        return self.masters + self.gradient + self.moments + self.working + self.rest

    def check(self, name: str, free: int) -> None:
        """Raises `OutOfMemory` with the numbers where a run cannot fit into `free` bytes."""
        if self.total <= free:
            return
        parts = {
            "float32 weights": self.masters,
            "gradient": self.gradient,
            "Adam's moments": self.moments,
            "bf16 copy": self.working,
            "activations": self.rest,
        }
        listed = ", ".join(f"{part} {size / _GIB:.2f}" for part, size in parts.items() if size)
        raise OutOfMemory(
            f"training all {self.parameters / 1e6:,.1f} million parameters of {name or 'this model'} takes about "
            f"{self.total / _GIB:.2f} GiB ({listed}); {free / _GIB:.2f} GiB are free.",
            "Train LoRA (a rank of 1 or more), take a smaller base model, or free memory.",
        )


def need(sizes: FullSizes, parameters: int) -> Need:
    """What a run of a model with so many parameters takes at least."""
    narrow = sizes.bytes_per_value < 4
    largest = 4 * sizes.vocab * sizes.hidden  # a gradient on its way, or the head's float32 copy
    batch = _TOKENS * (sizes.layers * sizes.input + sizes.kept + sizes.passing)
    return Need(
        parameters=parameters,
        masters=4 * parameters,
        gradient=4 * parameters,
        moments=8 * parameters,
        working=sizes.bytes_per_value * parameters if narrow else 0,
        rest=sizes.buffers + largest + batch,
    )
