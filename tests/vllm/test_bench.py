"""vLLM as a side of `openrl bench`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from openrl.bench.vllm_pipe import VllmSide
from support import tiny
from support.vllm import vllm_python

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


def test_the_benchmark_draws_with_vllm(tmp_path: Path) -> None:
    """All the tokens that were asked for, by the adapter of the benchmark's rank."""
    folder = tiny.build(tmp_path / "model", "llama", head_dim=32)
    side = VllmSide(vllm_python(), folder, rank=4, threads=1)
    try:
        for count in (1, 5):
            assert side.sample([np.arange(3, 20, dtype=np.int32)] * count, 7) == 7 * count
    finally:
        side.close()
