"""Fixtures of the connect tests.

``TORCH_NIXL_CONNECT_MODULE=dynamo.nixl_connect`` proves the reference table on dynamo 1.6.1 itself:
run `test_signatures.py` and `test_exceptions.py` with the Python of its environment, ``-W ignore``
and ``-p no:unraisableexception``, since its finalizers raise.
"""

from __future__ import annotations

import importlib
import os
from types import ModuleType

import pytest

from connect.pairs import pair

__all__ = ["pair"]


@pytest.fixture(scope="session")
def connect() -> ModuleType:
    return importlib.import_module(
        os.environ.get("TORCH_NIXL_CONNECT_MODULE", "torch_nixl.connect")
    )
