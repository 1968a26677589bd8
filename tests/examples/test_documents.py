"""Code in README and docs: every block of Python runs, on two ranks, as its reader would run it."""

from __future__ import annotations

import ast
import importlib
import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from examples.running import ROOT, torchrun

FENCE = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
PAGES = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/**/*.md"))]
BLOCKS = [(page, code) for page in PAGES for code in FENCE.findall((ROOT / page).read_text())]
NAMES = [f"{page}-{index}" for index, (page, _) in enumerate(BLOCKS)]
PROGRAMS = [code for _, code in BLOCKS if 'os.environ["RANK"]' in code]
"""Blocks that are all of a program. That of README has a test of its own."""


@dataclass(frozen=True, slots=True)
class Part:
    """A block that is a part of a program, and the rest of that program.

    Attributes:
        first: The block's first line.
        before: What comes before it. There are `rank`, `communicator`, `connection` and `store`.
        after: What comes after it.
        of_first: The line from which on it is rank 0's. By default it is from its beginning, where
            a part is rank 1's.
        of_second: The line from which on it is rank 1's. By default all is both ranks'.
    """

    first: str
    before: str = ""
    after: str = ""
    of_first: str = ""
    of_second: str = ""


MODEL = "model = torch.nn.Linear(2, 2)\n"

PARTS = (
    Part("if rank == 0:", MODEL, "if rank == 1: assert tree['step'] == 5"),
    Part(
        "torch_nixl.all_reduce_tensor(tensor)  # with",
        "tensor = torch.ones(3)\n",
        "assert tensor.tolist() == [2.0] * 3\n"
        "dist.all_reduce(tensor)\n"
        "assert tensor.tolist() == [4.0] * 3\n"
        "dist.destroy_process_group()\n",
    ),
    Part(
        "# where the prompt is run",
        "layers = [torch.full((2, 16, 16, 3, 8), 1.0 - rank) for _ in range(2)]\n"
        "cache = torch_nixl.KVCache(layers, model='tiny')\n"
        "if rank == 1: ticket = communicator.recv_object(0)\n",
        "if rank == 0:\n"
        "    communicator.send_object(ticket, 1)\n"
        "    communicator.recv_object(1)\n"
        "    server.close()\n"
        "else:\n"
        "    assert bool((layers[1][:, [10, 11]] == 1).all())\n"
        "    communicator.send_object('done', 0)\n"
        "    client.close()\n",
        of_second="# where the answer is written",
    ),
    Part(
        "def prefill(server, compute_layer, layers, pages, num_tokens):",
        "pool = [torch.full((2, 16, 16, 3, 8), 1.0 - rank) for _ in range(2)]\n"
        "cache = torch_nixl.KVCache(pool, model='tiny')\n"
        "def compute_layer(layer): pool[layer] += 1.0\n"
        "def attend(pages): assert all(bool((one[:, pages] == 2.0).all()) for one in pool)\n",
        "if rank == 0:\n"
        "    server = torch_nixl.KVCacheServer(connection, cache)\n"
        "    offer = prefill(server, compute_layer, [0, 1], [3, 1], 32)\n"
        "    communicator.send_object(offer.ticket, 1)\n"
        "    communicator.recv_object(1)\n"
        "    server.close()\n"
        "else:\n"
        "    client = torch_nixl.KVCacheClient(connection, cache)\n"
        "    assert decode(client, communicator.recv_object(0), [7, 5], attend).error is None\n"
        "    communicator.send_object('done', 0)\n"
        "    client.close()\n",
    ),
    Part("from torch_nixl import connect as nixl_connect", "", "nixl_connect.Connector"),
    Part(
        "with ReadableOperation(connection, Descriptor(tensor)) as operation:",
        "from torch_nixl.connect import *\n"
        "from torch_nixl.connect import fetch, publish\n"
        "connector = Connector(f'worker{rank}')\n"
        "connection = connector.connection()\n"
        "tensor = torch.full((5,), 1.0 - rank)\n",
        "if rank == 1:\n"
        "    ReadOperation(connection, metadata, Descriptor(tensor)).wait()\n"
        "    assert tensor.tolist() == [1.0] * 5\n"
        "communicator.send(tensor, 1 - rank)\n"
        "communicator.recv(1 - rank)\n"
        "connector.close()\n",
        of_second="metadata = fetch(",
    ),
    Part(
        "from transformers import DynamicCache",
        "from transformers import LlamaConfig, LlamaForCausalLM\ntorch.set_grad_enabled(False)\n",
        "config = LlamaConfig(vocab_size=32, hidden_size=32, intermediate_size=32,\n"
        "    num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=64)\n"
        "model = LlamaForCausalLM(config)\n"
        "def send(ticket): communicator.send_object(ticket, 1)\n"
        "if rank == 0:\n"
        "    prefill(connection, model, torch.arange(20)[None], send)\n"
        "    communicator.recv_object(1)\n"
        "else:\n"
        "    cache = decode(connection, model, communicator.recv_object(0))\n"
        "    assert cache.get_seq_length() == 20\n"
        "    communicator.send_object('done', 0)\n"
        "torch.set_grad_enabled(True)\n",
    ),
    Part(
        "import torch_nixl",
        "import os, tempfile\nos.chdir(tempfile.mkdtemp())\n",
        "assert os.path.getsize('trace.json')\n",
    ),
    Part("import torch_nixl.metrics"),
    Part(
        'torch_nixl.send_tree({"step": 5',
        MODEL,
        of_second="torch_nixl.recv_tree(",
    ),
    Part(
        "channel = torch_nixl.channel(peer",
        "peer, model_weights = 1 - rank, [torch.full((100,), 1.0 - rank)]\n",
        "assert model_weights[0].tolist() == [1.0] * 100\nchannel.close()\n",
        of_first="channel.send()",
        of_second="channel.recv()",
    ),
    Part("import torch, torch.distributed as dist"),
    Part(
        "loss.backward()",
        "comm, buffer = communicator, torch.zeros(3)\n"
        "weight = torch.ones(3, requires_grad=True)\n"
        "loss, grad = (weight * 2).sum(), torch.ones(3)\n"
        # Rank 1 answers rank 0, and then does the same with itself.
        "if rank == 1: comm.send(comm.recv(0), 0)\n",
        "assert buffer.tolist() == [2.0] * 3\n",
    ),
    Part(
        "from torch_nixl.testing import FakeDevice",
        after="if rank == 1:\n"
        "    for source in (0, 1):  # It has sent to itself, too.\n"
        "        got = communicator.recv(source, device='cpu')\n"
        "        assert got.unique().tolist() == [7.0]\n"
        "work.wait()\n"
        "work.synchronize()\n",
    ),
)

AHEAD = """
import os, torch, torch_nixl, torch.distributed as dist
rank = int(os.environ["RANK"])
store, _, _ = next(dist.rendezvous("env://"))
communicator = torch_nixl.get_communicator()
connection = communicator.connection
"""

RUN = """
import json, os, pathlib, sys
rank = int(os.environ["RANK"])
for name, parts in json.loads(pathlib.Path(sys.argv[1]).read_text()):
    print("running", name, file=sys.stderr, flush=True)
    names = {"__name__": "__main__"}
    for number, code in parts:
        if number in (rank, None):
            exec(compile(code, name, "exec"), names)
    import torch_nixl
    torch_nixl.shutdown()
print("all have run", flush=True)
"""


@pytest.mark.parametrize(("page", "code"), BLOCKS, ids=NAMES)
def test_a_block_is_python_and_imports_what_there_is(page: str, code: str) -> None:
    tree = compile(
        code, page, "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True
    )
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch_nixl"):
            module = importlib.import_module(node.module or "")
            for alias in node.names:
                assert hasattr(module, alias.name), f"{page}: {node.module}.{alias.name}"


def complete(page: str, code: str) -> list[tuple[int | None, str]]:
    """What runs of a block, with the rest of its program; each part of one rank, or of both."""
    if code in PROGRAMS:
        return [(None, code)]
    found = [part for part in PARTS if code.startswith(part.first)]
    # The longest: one may be the beginning of another.
    part = max(found, key=lambda one: len(one.first), default=None)
    assert part is not None, f"{page}: nothing says how to run this:\n{code}"
    ahead: list[tuple[int | None, str]] = [(None, AHEAD + part.before)]
    behind = (None, part.after)
    if not part.of_second:
        return [*ahead, (None, code), behind]
    first, second = code.index(part.of_first), code.index(part.of_second)
    parts = [(None, code[:first]), (0, code[first:second]), (1, code[second:])]
    return [*ahead, *parts, behind]


def test_blocks_run_one_after_another_on_two_ranks(tmp_path: Path) -> None:
    blocks = [
        (f"{page}: {code.splitlines()[0]}", complete(page, code))
        for page, code in BLOCKS
        if not code.startswith("# move.py")  # test_readme.py
    ]
    assert len(blocks) >= 15
    program = tmp_path / "run.py"
    program.write_text(RUN)
    (tmp_path / "blocks.json").write_text(json.dumps(blocks))
    printed = torchrun(program, str(tmp_path / "blocks.json"), timeout=110)
    assert printed.count("all have run") == 2
    assert "tensor([[0., 1., 2.]" in printed, "the quick start's output"
