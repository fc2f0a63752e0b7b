"""The compatibility table covers what the installed SDK offers; `make compat` runs it."""

from __future__ import annotations

from compat import surface, table


def test_every_public_name_and_command_has_a_probe() -> None:
    assert table.gaps() == []


def test_the_surface_is_found_by_introspection() -> None:
    """3.3 to 3.8: of SDK 0.38.0; a newer one may have more."""
    assert len(surface.names()) >= 108
    assert len(surface.commands()) >= 19
    assert "RestClient.search_sessions" in surface.names()
    assert "tinker checkpoint push-hf" in surface.commands()
