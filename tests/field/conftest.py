"""Fixtures of the field reports: two Connectors in this process."""

from __future__ import annotations

from connect.pairs import pair

__all__ = ["pair"]
