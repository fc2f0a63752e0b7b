"""A question and its answer as tokens, in the words of the model's own chat template."""

from __future__ import annotations

from typing import Any

from tinker import types

from openrl_recipes.shared.client import shifted
from openrl_recipes.shared.options import OptionError

_SYSTEM = {"role": "system", "content": "Answer the question."}


class Chat:
    """Renders conversations of one question. Raises `OptionError` for a model without a chat template."""

    def __init__(self, tokenizer: Any) -> None:
        if not tokenizer.chat_template:
            raise OptionError("--model: its tokenizer has no chat template; DPO starts from a model that can chat")
        self._tokenizer = tokenizer
        prompt, whole = self._text("Who?"), self._text("Who?", "Nobody")
        self.end = whole.removeprefix(prompt).removeprefix("Nobody").rstrip()  # what ends an answer: <|im_end|>, say

    def prompt(self, question: str) -> list[int]:
        """All up to where the answer begins."""
        return self._encode(self._text(question))

    def datum(self, question: str, answer: str) -> types.Datum:
        """Question and answer, with weights of 1 on the answer and what ends it."""
        completion = self._encode(answer + self.end)
        return shifted(self.prompt(question), completion, weights=[1.0] * len(completion))

    def decode(self, tokens: list[int]) -> str:
        """An answer's text without what ends it."""
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True)).removesuffix(self.end).strip()

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _text(self, question: str, answer: str | None = None) -> str:
        messages = [_SYSTEM, {"role": "user", "content": question}]
        messages += [] if answer is None else [{"role": "assistant", "content": answer}]
        return str(self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=answer is None))
