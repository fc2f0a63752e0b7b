"""What recipes say when the server is not there, or has another model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import tinker

from openrl_recipes.shared.client import service_with
from openrl_recipes.shared.options import OptionError


def test_without_a_key_the_message_says_how_to_start_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    with pytest.raises(OptionError, match="openrl serve --model some/model"), service_with("some/model"):
        pass


def test_a_model_that_the_server_lacks_is_named_with_those_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tinker, "ServiceClient", Service)
    monkeypatch.setattr(tinker, "RestClient", Service)
    with service_with("org/a") as service:
        assert isinstance(service, Service)
    with (
        pytest.raises(OptionError, match=r"--model some/model: the server has org/a, org/b\."),
        service_with("some/model"),
    ):
        pass


class Service:
    """A server with two models."""

    def get_server_capabilities(self) -> Any:
        models = [SimpleNamespace(model_name=name) for name in ("org/a", "org/b")]
        return SimpleNamespace(result=lambda: SimpleNamespace(supported_models=models))

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *_: object) -> None:
        return
