"""What the ranks take of their devices' memory for the base model: plain arithmetic, before anything is loaded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from openrl.errors import NoRoom

_GIB = 1 << 30
_MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_STACKS = ("gate_up_proj", "down_proj")
_SHARE = 0.5  # of rank 0's memory that a copy of the base for sampling may take: KV cache and training need the rest


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of a base model: `layers` of all decoder layers' matrices, `layer` of the largest, `rest` of all else (with
    the head's float32 copy, where a device needs one)."""

    layers: int
    layer: int
    rest: int

    @classmethod
    def of(cls, shapes: Mapping[str, Sequence[int]], itemsize: int, *, wide_head: bool) -> Footprint:
        """From the shapes of all parameters by name."""
        sizes = {name: prod(shape) for name, shape in shapes.items()}
        layers = Counter[str]()
        for name in filter(is_spread, sizes):
            layers[_layer(name)] += sizes[name]
        spread = layers.total()
        head = next((size for name, size in sizes.items() if name == "lm_head.weight"), None)
        head = max(size for name, size in sizes.items() if "embed_tokens" in name) if head is None else head
        wide = 4 * head if wide_head and itemsize < 4 else 0
        rest = (sum(sizes.values()) - spread) * itemsize + wide
        return cls(spread * itemsize, max(layers.values()) * itemsize, rest)

    def of_rank(self, ranks: int, *, whole: bool = False) -> int:
        """Bytes on one rank: its part of the layers, two windows, the rest, and perhaps a whole copy to sample with."""
        return self.layers // ranks + 2 * self.layer + self.rest + (self.layers if whole else 0)

    def keeps_whole(self, ranks: int, free: int, *, shared: bool) -> bool:
        """Whether rank 0 may keep a copy for sampling where `free` bytes are free, of a memory that is `shared` by all
        ranks or its own. Raises `NoRoom` with the numbers where not even the parts fit."""
        others = (ranks - 1) * self.of_rank(ranks) if shared else 0
        needed = self.of_rank(ranks) + others
        if needed > free:
            where = f"in {ranks} processes together" if shared else "on each of them"
            raise NoRoom(
                f"on {ranks} devices the base model takes about {needed / _GIB:.1f} GiB {where} (decoder layers "
                f"{self.layers / _GIB:.1f} GiB in {ranks} parts, the rest {self.rest / _GIB:.1f} GiB on each), "
                f"but only {free / _GIB:.1f} GiB are free.",
                "Take more devices or a smaller model.",
            )
        return self.of_rank(ranks, whole=True) + others <= _SHARE * free


def is_spread(name: str) -> bool:
    """Whether a parameter is a matrix of a decoder layer, or a stack of experts', which is spread over the ranks."""
    *path, leaf = name.removesuffix(".base.weight").removesuffix(".weight").split(".")
    return "layers" in path and leaf in (_STACKS if path[-1] == "experts" else _MATRICES)


def _layer(name: str) -> str:
    """The number of a parameter's layer."""
    return name.partition("layers.")[2].partition(".")[0]
