"""Runs under the interpreter that has vLLM, apart from openrl: a line of JSON in, a line of JSON out.

usage: python vllm_side.py MODEL ADAPTER RANK THREADS
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import Any


def main() -> None:
    """Load, say `{"ready": true}`, then answer each `{"prompts", "new_tokens"}` with the number of tokens drawn."""
    folder, adapter, rank, threads = sys.argv[1:]
    sys.path.pop(0)  # this file's folder, whose modules are none of vLLM's
    # What vLLM and OpenMP read when they load.
    defaults = {"VLLM_CPU_KVCACHE_SPACE": "2", "OMP_NUM_THREADS": threads, "VLLM_LOGGING_LEVEL": "ERROR"}
    for name, value in defaults.items():
        os.environ.setdefault(name, value)  # noqa: TID251 -- a program of its own
    vllm: Any = importlib.import_module("vllm")
    lora: Any = importlib.import_module("vllm.lora.request")
    engine = vllm.LLM(
        model=folder,
        dtype="bfloat16",
        enforce_eager=True,
        enable_lora=True,
        max_lora_rank=int(rank),
        max_model_len=2048,
        enable_prefix_caching=False,
        disable_log_stats=True,
    )
    request = lora.LoRARequest("bench", 1, adapter)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        work = json.loads(line)
        params = vllm.SamplingParams(
            temperature=1.0, max_tokens=work["new_tokens"], min_tokens=work["new_tokens"], ignore_eos=True, logprobs=0
        )
        prompts = [{"prompt_token_ids": prompt} for prompt in work["prompts"]]
        outputs = engine.generate(prompts, params, lora_request=request, use_tqdm=False)
        print(json.dumps({"tokens": sum(len(o.outputs[0].token_ids) for o in outputs)}), flush=True)


if __name__ == "__main__":
    main()
