"""Other weights in the place of the model's, without a restart: vLLM's `reload_weights`, and a trial of it.

vLLM writes into the tensors that are there, so captured graphs stay valid. It is tried before it is relied on: the
model's own weights, rewritten so that every number inside is another one and each token has the number after its own,
must give each token the logprob that it had.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

from .engine import Engine
from .link import attempt
from .probe import Probe, near

_WRITERS = ("o_proj.weight", "down_proj.weight")  # whose outputs are the hidden states; others read these
_TABLES = ("embed_tokens.weight", "lm_head.weight")  # with a row for each token


class Weights:
    """Puts the weights of other folders, with tensors of the same names and shapes, into the model of `folder`."""

    def __init__(self, engine: Engine, probe: Probe, folder: str) -> None:
        self._engine = engine
        self._probe = probe
        self._folder = folder
        self._known: list[float] | None = None  # what the model's own weights say to the probe's prompt
        self._tried = False

    def take(self, folder: str | None) -> bool:
        """Take a folder's weights; None: the model's own. False if this vLLM gets other weights wrong, or takes none at
        all. After that, or if this raises, it is unknown what the model holds."""
        if self._known is None:
            self._known = self._probe.table(0)
        if not self._tried:
            right, _ = attempt(self._try, self._known)
            if not right:
                return False
            self._tried = True
        self._read(folder or self._folder)
        if folder is None and not _same(self._probe.table(0), self._known):
            raise RuntimeError("the model's own weights give other logprobs than before")
        return True

    def restore(self) -> None:
        """Take the model's own weights after a failure. Raises if they do not come back as they were."""
        self._tried = True  # whatever became of it: nothing else is taken here
        self.take(None)

    def _try(self, known: list[float]) -> bool:
        self._engine.replace_weights(lambda worker: _reload(worker, weights_iterator=_rewritten(worker)))
        return _same(self._probe.table(1), known)

    def _read(self, folder: str) -> None:
        self._engine.replace_weights(lambda worker: _reload(worker, weights_path=folder))


def _same(table: list[float], other: list[float]) -> bool:
    return all(map(near, table, other))


def _reload(worker: Any, **source: Any) -> None:
    worker.reload_weights(**source)
    # On a CPU matrices are packed into copies. A head that is tied to the embedding keeps its old one.
    for module in worker.get_model().modules():
        if "cpu_linear" in vars(module) and module.weight.numel():
            module.quant_method.process_weights_after_loading(module)


def _rewritten(worker: Any) -> Iterator[tuple[str, Any]]:
    """The model's own weights with the sign of some hidden states turned in each matrix that reads or writes them, and
    the rows of the tables moved on by one token: the same function of other numbers."""
    loader = importlib.import_module("vllm.model_executor.model_loader").get_model_loader(worker.load_config)
    for name, tensor in loader.get_all_weights(worker.model_config, worker.get_model()):
        if tensor.ndim < 2:
            yield name, tensor
        elif name.endswith(_WRITERS):
            yield name, tensor * _signs(tensor, tensor.shape[-2])[:, None]
        elif name.endswith(_TABLES):
            yield name, tensor.roll(1, 0) * _signs(tensor, tensor.shape[-1])
        else:
            yield name, tensor * _signs(tensor, tensor.shape[-1])


def _signs(like: Any, size: int) -> Any:
    signs = like.new_ones(size)
    signs[::3] = -1
    return signs
