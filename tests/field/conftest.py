"""Fixtures of the field reports: two Connectors in this process, and two ranks."""

from __future__ import annotations

from connect.pairs import pair

from field.two import two

__all__ = ["pair", "two"]
