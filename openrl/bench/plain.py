"""The other sides of the benchmark: transformers + PEFT as people write it.

LoRA of the given rank on every linear layer and the head (what our server adapts too), one AdamW step for the batch;
sampling by `model.generate` on all prompts as one batch, adapter in place. Once in float32 with one sequence a
forward, once the best plain recipe: bf16 and padded batches.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peft
import torch
import transformers

from openrl.bench.workload import Example, Tokens

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]
_IGNORED = -100


class PlainLoop:
    """A model with an adapter and an optimizer. Holds the weights until it is dropped.

    `batch`: sequences in a forward, padded to the longest of them, in the order of the data.
    """

    def __init__(self, folder: Path, rank: int, threads: int, dtype: torch.dtype, batch: int) -> None:
        torch.set_num_threads(threads)
        transformers.utils.logging.disable_progress_bar()
        base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        config = peft.LoraConfig(r=rank, lora_alpha=32, target_modules=LINEARS)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PEFT warns that head and embeddings are tied; the base is frozen here
            self._model: Any = peft.get_peft_model(base, config)
        trained = [p for p in self._model.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(trained, lr=1e-4, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.0)
        self._batch = batch

    def train_step(self, batch: Sequence[Example]) -> None:
        """Cross-entropy over the positions that count, then one optimizer step."""
        self._model.train()
        for start in range(0, len(batch), self._batch):
            inputs, mask, targets = _padded(batch[start : start + self._batch])
            logits = self._model(inputs, attention_mask=mask, use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1).float(), targets.flatten(), ignore_index=_IGNORED, reduction="sum"
            )
            loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def sample(self, prompts: Sequence[Tokens], new_tokens: int) -> int:
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


def _padded(batch: Sequence[Example]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs, attention mask and targets, int64 [rows, longest], filled up on the right."""
    width = max(example.length for example in batch)
    inputs, mask = (torch.zeros(len(batch), width, dtype=torch.int64) for _ in range(2))
    targets = torch.full_like(inputs, _IGNORED)
    for row, example in enumerate(batch):
        tokens, n = torch.from_numpy(example.tokens).long(), example.length
        inputs[row, :n], mask[row, :n] = tokens[:-1], 1
        targets[row, example.masked : n] = tokens[1 + example.masked :]
    return inputs, mask, targets
