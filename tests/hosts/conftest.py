"""Hosts for each test, and a reason to skip where there can be none."""

from __future__ import annotations

import functools

import pytest

from hosts import network


@functools.cache
def _why_not() -> str:
    return network.why_not()


@pytest.fixture(autouse=True)
def _hosts() -> None:
    why = _why_not()
    if why:
        pytest.skip(why)
