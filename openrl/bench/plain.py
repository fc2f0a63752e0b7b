"""The other side of the benchmark: transformers + PEFT as most people would write it.

Float32, LoRA of rank 16 on every linear layer and the head (what our server adapts too), one sequence a forward,
one AdamW step for the batch; sampling by `model.generate` on all prompts as one batch, adapter in place.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import peft
import torch
import transformers

from openrl.bench.workload import Tokens

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]


class PlainLoop:
    """A model with an adapter and an optimizer, used the plain way. Holds the weights until it is dropped."""

    def __init__(self, folder: Path, rank: int, threads: int) -> None:
        torch.set_num_threads(threads)
        transformers.utils.logging.disable_progress_bar()
        base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        config = peft.LoraConfig(r=rank, lora_alpha=32, target_modules=LINEARS)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PEFT warns that head and embeddings are tied; the base is frozen here
            self._model: Any = peft.get_peft_model(base, config)
        trained = [p for p in self._model.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(trained, lr=1e-4, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.0)

    def train_step(self, batch: tuple[Tokens, ...]) -> None:
        """Cross-entropy over every position of every sequence, then one optimizer step."""
        self._model.train()
        for sequence in batch:
            tokens = torch.from_numpy(sequence).long()
            logits = self._model(tokens[None, :-1], use_cache=False).logits[0]
            torch.nn.functional.cross_entropy(logits, tokens[1:], reduction="sum").backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def sample(self, prompts: tuple[Tokens, ...], new_tokens: int) -> int:
        """Draw `new_tokens` for each prompt, with no end-of-sequence stop; returns how many tokens came."""
        self._model.eval()
        inputs = torch.stack([torch.from_numpy(prompt).long() for prompt in prompts])
        with torch.inference_mode():
            drawn = self._model.generate(
                input_ids=inputs,
                attention_mask=torch.ones_like(inputs),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                min_new_tokens=new_tokens,
                max_new_tokens=new_tokens,
                pad_token_id=0,
            )
        return int((drawn.shape[1] - inputs.shape[1]) * len(prompts))
