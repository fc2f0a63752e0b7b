"""How much memory a training step takes, from a model's sizes alone: how many tokens a micro-batch may hold, and of how
many layers more than the input can be kept for the way back.

Pure arithmetic over numbers of `config.json`, without torch: `openrl doctor` prints it too. Bytes are those of
`train_layers`, `train_attention` and `head`, which say what they keep.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

# Of free memory that a pass may take: on a CPU others live there too, and on a GPU the KV cache does.
_CPU_SHARE, _GPU_SHARE = 0.5, 0.8
# On a CPU products are fastest with some hundred rows: beyond, operands leave its cache. So the tokens of a micro-batch
# are no more than these, and take no more than this many bytes, or than the weights take where these are large.
_CPU_TOKENS = 768
_CPU_BYTES = 300 << 20
# Below so many tokens products become slow and fixed costs count: rather compute layers again than cut smaller.
_FEWEST_TOKENS = 512
HEAD_CELLS = 3 << 23  # logits that the output head holds at once: 96 MiB of float32
SCORE_CELLS = 1 << 22  # scores that attention holds at once


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the memory of a step depends on; `bytes_per_value` is that of the compute dtype.

    `inner` is the MLP's width, or an expert's; `active` of `experts` see a token. A dense model is one expert.
    """

    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    norms: int  # per layer: 2, or 4 where the outputs of attention and MLP have their own
    softcap: bool
    bytes_per_value: int
    experts: int = 1
    active: int = 1

    @classmethod
    def of(cls, config: Mapping[str, Any], bytes_per_value: int) -> Self:
        """From the text model's part of a `config.json`."""
        heads = int(config["num_attention_heads"])
        hidden = int(config["hidden_size"])
        inner, experts, active = _mlp(config)
        return cls(
            layers=int(config["num_hidden_layers"]),
            hidden=hidden,
            inner=inner,
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            vocab=int(config["vocab_size"]),
            norms=4 if str(config.get("model_type", "")).startswith(("gemma2", "gemma3")) else 2,
            softcap=config.get("final_logit_softcapping") is not None,
            bytes_per_value=bytes_per_value,
            experts=experts,
            active=active,
        )

    @property
    def qkv(self) -> int:
        """Values of a token's queries, keys and values."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def kept(self) -> int:
        """Bytes that a layer keeps of a token: residual streams, projections, attention's output, gate and up."""
        values = self.norms * self.hidden + self.qkv + self.heads * self.head_dim + 2 * self.active * self.inner
        return values * self.bytes_per_value + self.routing

    @property
    def routing(self) -> int:
        """Bytes of a token that say where it goes: a logit of each expert; of the chosen ones who they are, their
        weights, their rows, and whose these are."""
        return 4 * self.experts + 5 * 8 * self.active if self.experts > 1 else 0

    @property
    def input(self) -> int:
        """Bytes of a token that a layer keeps when it is to be computed again."""
        return self.hidden * self.bytes_per_value + (8 * self.active if self.experts > 1 else 0)

    @property
    def passing(self) -> int:
        """Bytes of a token that some layer, or the last norm, needs while it is computed, there or back."""
        width = self.heads * self.head_dim
        values = 7 * self.hidden + 2 * self.active * self.inner + 2 * self.qkv + 5 * width
        floats = self.hidden + 2 * self.kv_heads * self.head_dim
        if self.experts > 1:  # rows of experts, their results and these once more in the order of tokens
            values += 4 * self.active * self.hidden
            floats += 2 * self.hidden
        return values * self.bytes_per_value + 4 * floats

    @property
    def buffers(self) -> int:
        """Bytes that a step takes whatever its tokens: logits, their gradient and slope, scores and their gradients."""
        head = HEAD_CELLS * (4 + self.bytes_per_value * (2 if self.softcap else 1))
        return head + 3 * SCORE_CELLS * self.bytes_per_value

    def adapter(self, rank: int) -> int:
        """Values of an adapter of all layers and the head."""
        attention = 2 * self.hidden + self.qkv + 2 * self.heads * self.head_dim
        mlp = 3 * (self.hidden + self.experts * self.inner)
        return rank * (self.layers * (attention + self.hidden + mlp) + self.hidden + self.vocab)

    def of_adapters(self, values: int) -> int:
        """Bytes for adapters of so many values in all: gradients of a micro-batch and of a request, and a copy in the
        compute dtype."""
        return values * (2 * 4 + self.bytes_per_value)


def _mlp(config: Mapping[str, Any]) -> tuple[int, int, int]:
    """Width, experts, and how many of them see a token. Dense layers among a mixture's count as its own, which are
    wider."""
    experts = int(config.get("num_experts") or 0)
    if not experts:
        return int(config["intermediate_size"]), 1, 1
    return int(config["moe_intermediate_size"]), experts, int(config["num_experts_per_tok"])


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What a pass may hold: `budget` bytes for the tokens of a micro-batch, beside `fixed` ones.

    More than `most` tokens gain nothing.
    """

    sizes: Sizes
    budget: int
    fixed: int
    most: int

    @property
    def token(self) -> int:
        """Bytes of a token while nothing is computed again."""
        return self.sizes.layers * self.sizes.kept + self.sizes.passing

    @property
    def fitting(self) -> int:
        """Tokens for which that fits."""
        return self.budget // self.token

    def limit(self, max_tokens: int) -> int:
        """Tokens that a micro-batch of several datums should hold at most."""
        return max(1, min(max_tokens, self.most, max(self.fitting, _FEWEST_TOKENS)))

    def recomputed(self, tokens: int) -> int:
        """How many layers a micro-batch has to compute again to fit; all of them where even that may not be enough."""
        if tokens * self.token <= self.budget:
            return 0
        # What is computed again of one layer at a time lies beside what others keep.
        excess = tokens * (self.token + self.sizes.kept) - self.budget
        saved = tokens * (self.sizes.kept - self.sizes.input)
        return min(self.sizes.layers, -(-excess // saved))

    def needed(self, tokens: int) -> int:
        """Bytes that a micro-batch takes under this plan."""
        again = self.recomputed(tokens)
        layers = self.sizes.layers - again + (1 if again else 0)
        return self.fixed + tokens * (layers * self.sizes.kept + again * self.sizes.input + self.sizes.passing)


def plan(sizes: Sizes, available: int, weights: int, adapters: int, *, gpu: bool = False) -> MemoryPlan:
    """For a model of `weights` bytes and adapters of `adapters` values where `available` bytes are free."""
    fixed = sizes.buffers + sizes.of_adapters(adapters)
    budget = max(0, int(available * (_GPU_SHARE if gpu else _CPU_SHARE)) - fixed)
    if gpu:
        return MemoryPlan(sizes, budget, fixed, most=budget)
    return MemoryPlan(sizes, min(budget, max(_CPU_BYTES, weights)), fixed, _CPU_TOKENS)
