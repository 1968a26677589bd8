"""Rank 0 of a world of two, that ends with sends unfinished: ``leaving.py STORE ENDING``.

It ends once the other has its first message, by returning or by an exception; or at once.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from torch.distributed import FileStore

import torch_nixl


def main(path: str, ending: str) -> None:
    torch_nixl.init(store=FileStore(path, 2), rank=0, world_size=2, timeout=60.0)
    torch_nixl.isend_tensor(torch.eye(4), 1)
    torch_nixl.isend_tensor(torch.ones(1 << 24), 1, tag=1)
    while ending != "at once" and not Path(path).with_name("go").exists():
        time.sleep(0.01)
    if ending == "exception":
        raise RuntimeError("as planned")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
