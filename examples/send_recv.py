"""Send tensors from rank 0 to rank 1 and back.

    torchrun --nproc-per-node=2 examples/send_recv.py

The receiver needs to know neither shape nor dtype. No process group is needed either: torchrun's
environment says which ranks there are.
"""

from __future__ import annotations

import os

import torch

import torch_nixl


def main() -> None:
    """Run one rank."""
    if int(os.environ["RANK"]) == 0:
        torch_nixl.send_tensor(torch.arange(6).reshape(2, 3), dst=1)
        work = torch_nixl.irecv_tensor(src=1, tag=7)
        torch_nixl.send_tensor(torch.randn(4096, 4096, dtype=torch.float64), dst=1)
        mean = work.result()
        print(f"rank 0: rank {work.source_rank()} says the mean is {mean}")
    else:
        print(f"rank 1: received {torch_nixl.recv_tensor(src=0).tolist()}")
        large = torch_nixl.recv_tensor()
        torch_nixl.send_tensor(large.mean().round(), dst=0, tag=7)
        print(f"rank 1: received {list(large.shape)} of {large.dtype}, {large.nbytes:,} bytes")
    torch_nixl.shutdown()


if __name__ == "__main__":
    main()
