"""A whole model to train, in MLX: a module of its own, whose weights are put in from float32 masters (F3, F4).

Where the engine computes in float32 the module has the masters themselves, in bf16 a copy that follows each step.
Adapters and the base sampler go on with the base model's weights.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

import mlx.core as mx

from openrl.backends.mps.full_state import FullState, Named
from openrl.backends.mps.model import MlxModel, load_module, open_module
from openrl.backends.mps.whole import places_of, stored_weights
from openrl.errors import BadRequest

_EMBEDDINGS = "model.embed_tokens.weight"


class FullModel:
    """One run's model. `state` has the masters, `scorer` is what computes."""

    def __init__(self, base: MlxModel, folder: Path) -> None:
        """Begins with the weights in `folder`, in which `base` has its own and which `whole.shapes_of` has checked."""
        module = load_module(folder, base.config)
        self.dtype = base.dtype
        self._places = places_of(module)
        self.state = FullState(self._read(stored_weights(folder)), self.put)
        self.scorer = open_module(module, base.config, base.dtype, frozenset(), wide=False)
        self.embeddings = _EMBEDDINGS
        self.head = next(name for name, (owner, _) in self._places.items() if owner is self.scorer.head)
        self.layers = [
            [name for name in self._places if name.startswith(f"model.layers.{number}.")]
            for number in range(len(self.scorer.backbone.layers))
        ]
        self.norm = [name for name in self._places if name.startswith("model.norm.")]

    def put(self, name: str) -> None:
        """A master has changed: let what is computed with follow it."""
        owner, leaf = self._places[name]
        working = self.working(name)
        mx.eval(working)
        setattr(owner, leaf, working)
        if owner is self.scorer.head and self.scorer.head_wide is not None:
            self.scorer.head_wide = working  # in float32 it is the weight itself

    def working(self, name: str) -> mx.array:
        """A weight as it is computed with."""
        master = self.state.theta[name]
        return master if self.dtype == mx.float32 else master.astype(self.dtype)

    def held(self, names: list[str]) -> Named:
        """The module's own weights of these names."""
        return {name: self._places[name][0][self._places[name][1]] for name in names}

    @contextmanager
    def given(self, weights: Mapping[str, mx.array]) -> Generator[None]:
        """Within the block the module computes with these weights in place of its own."""
        before = self.held(list(weights))
        try:
            self._set(weights)
            yield
        finally:
            self._set(before)

    def _set(self, weights: Mapping[str, mx.array]) -> None:
        for name, weight in weights.items():
            owner, leaf = self._places[name]
            setattr(owner, leaf, weight)

    def _read(self, stored: Named) -> Named:
        """The masters, one at a time; each takes the place of what mlx-lm has loaded, if that is the same."""
        masters: Named = {}
        for name, (owner, leaf) in self._places.items():
            masters[name] = stored.pop(name).astype(mx.float32)
            if not bool(mx.array_equal(masters[name], owner[leaf].astype(mx.float32))):
                raise BadRequest(
                    f"the mps backend cannot train all parameters of this model: mlx-lm changes {name} as it loads it.",
                    "Train LoRA: a rank of 1 or more.",
                )
            working = masters[name].astype(self.dtype) if self.dtype != mx.float32 else masters[name]
            mx.eval(working)
            setattr(owner, leaf, working)
        return masters
