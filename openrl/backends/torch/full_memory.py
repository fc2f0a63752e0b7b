"""How much memory training all parameters takes: what stays for a run's life, and what a micro-batch adds.

Activations are those of transformers' own layers under autograd, which keeps several times what our own layers do;
`tests/contract/test_full_memory.py` counts them.
"""

from __future__ import annotations

from openrl.backends.common.full_memory import Need
from openrl.backends.torch.memory_plan import Sizes

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


def need(sizes: FullSizes, parameters: int) -> Need:
    """What a run of a model with so many parameters takes at least."""
    largest = 4 * sizes.vocab * sizes.hidden  # a gradient on its way, or the head's float32 copy
    batch = _TOKENS * (sizes.layers * sizes.input + sizes.kept + sizes.passing)
    return Need.of(parameters, sizes.bytes_per_value, sizes.buffers + largest + batch)
