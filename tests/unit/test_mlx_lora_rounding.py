"""In bf16 a young adapter's small sums must not be lost beside the base's large ones (S14)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from openrl.types import LoraSpec

mx: Any = pytest.importorskip("mlx.core", reason="needs mlx")
nn: Any = pytest.importorskip("mlx.nn", reason="needs mlx")
lora: Any = pytest.importorskip("openrl.backends.mps.lora")


@pytest.mark.parametrize("quantised", [False, True])
def test_what_an_adapter_adds_survives_in_bf16(quantised: bool) -> None:
    """An adapter whose sums are a thousandth of the base's: on average over outputs, what arrives is what it adds. Rows
    of another adapter, and of none, beside it."""
    rng = np.random.default_rng(0)
    base = nn.Linear(256, 256, bias=True)
    base = base.to_quantized(64, 4) if quantised else base
    base.set_dtype(mx.bfloat16)
    routing = lora.Routing()
    layer = lora.LoraLinear(base, "layer", routing)

    def adapter(size: float) -> Any:
        a = mx.array(rng.uniform(-1, 1, (8, 256)).astype(np.float32)) / 16
        b = mx.array((size * rng.normal(size=(256, 8))).astype(np.float32))
        return lora.Adapter(LoraSpec(rank=8, seed=0), {"layer": a}, {"layer": b})

    young, other = adapter(1e-4), adapter(1.0)
    x = mx.array(rng.normal(size=(3, 64, 256)).astype(np.float32)).astype(mx.bfloat16)
    with routing.use([young, None, other]):
        found = layer(x)
    assert found.dtype == mx.bfloat16
    plain = base(x.astype(mx.float32)).astype(mx.bfloat16)
    added = np.array((found - plain).astype(mx.float32), np.float64)
    exact = [
        np.array(x[row].astype(mx.float32) @ a.a["layer"].T @ a.b["layer"].T * a.scale, np.float64)
        for row, a in ((0, young), (2, other))
    ]
    assert (added[0] * exact[0]).sum() / (exact[0] ** 2).sum() == pytest.approx(1, abs=0.15)
    np.testing.assert_allclose(added[1], 0, atol=0.01)  # an ulp of the base's sums, at most
    assert (added[2] * exact[1]).sum() / (exact[1] ** 2).sum() == pytest.approx(1, abs=0.01)
