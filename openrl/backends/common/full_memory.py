"""How much memory training all parameters takes, in numbers and in words."""

from __future__ import annotations

from dataclasses import dataclass

from openrl.errors import OutOfMemory

_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes that a run takes: a value of each of these for every parameter, and the rest for a small micro-batch."""

    parameters: int
    masters: int
    gradient: int
    moments: int
    working: int
    rest: int

    @classmethod
    def of(cls, parameters: int, bytes_per_value: int, rest: int) -> Need:
        """Of a model with so many parameters that is computed in a dtype of so many bytes (F3)."""
        return cls(
            parameters=parameters,
            masters=4 * parameters,
            gradient=4 * parameters,
            moments=8 * parameters,
            working=bytes_per_value * parameters if bytes_per_value < 4 else 0,
            rest=rest,
        )

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
