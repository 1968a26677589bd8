"""Prefill on rank 0, decode on rank 1: the text of a real model, its KV cache handed over.

    torchrun --nproc-per-node=2 examples/kv_handoff.py --prompt "Why is the sky blue?"

Rank 0 runs the prompt through SmolLM2-135M-Instruct and offers the keys and values of all its
tokens. The ticket and the first new token go to rank 1 as a small message. Rank 1 reads the keys
and values straight out of rank 0's memory, and goes on where rank 0 stopped. After that it does
all of it alone, to compare time and text.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import TYPE_CHECKING, Any

import smollm2

import torch_nixl

if TYPE_CHECKING:
    from torch_nixl.integrations.transformers import PagePool

NUM_PAGES = 256
"""Of 16 tokens each: 94 MB."""


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Prefill on rank 0, decode on rank 1.")
    parser.add_argument("--prompt", action="append", required=True, help="may be given many times")
    parser.add_argument("--max-tokens", type=int, default=64, help="most tokens to generate")
    chosen = parser.parse_args()
    if chosen.max_tokens < 2:
        parser.error("--max-tokens: expected 2 or more: rank 0 makes the first")
    return chosen


def prefill(communicator: torch_nixl.Communicator, model: Any, pool: PagePool, prompt: str) -> None:
    """Rank 0: compute keys and values, and the first new token."""
    from transformers import DynamicCache

    from torch_nixl.integrations.transformers import DynamicCacheServer

    with DynamicCacheServer(communicator, pool) as server:
        cache = DynamicCache()
        first = smollm2.next_token(model, smollm2.encode(prompt), cache)
        offer = server.offer(prompt[:20], cache)
        communicator.send_object((offer.ticket, first), 1)
        offer.wait()
        communicator.recv_object(1)  # when rank 1 is through: until then it needs the cores


def decode(
    communicator: torch_nixl.Communicator, model: Any, pool: PagePool, prompt: str, most: int
) -> None:
    """Rank 1: take the keys and values over and go on; then compare with doing all of it here."""
    from transformers import DynamicCache

    from torch_nixl.integrations.transformers import DynamicCacheClient

    tokens = smollm2.encode(prompt)
    # Not timed: what torch makes once for inputs of these sizes.
    warm = DynamicCache()
    smollm2.next_token(model, [smollm2.next_token(model, tokens, warm)], warm)

    with DynamicCacheClient(communicator, pool) as client:
        ticket, token = communicator.recv_object(0)
        started = time.perf_counter()
        cache = client.pull(ticket)
        pulled = time.perf_counter() - started
        shown = " ".join(prompt.split())
        print(f"\n> {shown if len(shown) <= 100 else shown[:100] + ' ...'}\n", flush=True)
        text, handed = stream(model, token, cache, most)
        handed += pulled
        figures = client.client.statistics()

    started = time.perf_counter()
    alone = DynamicCache()
    token = smollm2.next_token(model, tokens, alone)
    recomputed = time.perf_counter() - started
    expected = list(smollm2.continue_greedily(model, token, alone, most))
    communicator.send_object("through", 0)

    seconds = figures.latencies["move"].p50
    path = ", ".join(figures.paths)
    rows = [
        ("prompt", f"{len(tokens):,} tokens"),
        ("generated", f"{len(text):,} tokens"),
        ("keys and values", f"{figures.nbytes:,} bytes"),
        ("transfer", f"{1000 * seconds:.2f} ms, {figures.nbytes / seconds / 1e9:.2f} GB/s, {path}"),
        ("ticket to cache", f"{1000 * pulled:.1f} ms, first contact and copies included"),
        ("ticket to first token here", f"{1000 * handed:.1f} ms"),
        ("the same, prefill recomputed", f"{1000 * recomputed:.1f} ms"),
        ("text of one process alone", "equal" if text == expected else "DIFFERENT"),
    ]
    print("\n".join(f"{name:<30}{value}" for name, value in rows), flush=True)
    if text != expected:
        raise SystemExit(f"tokens {text} were expected to be {expected}")


def stream(model: Any, first: int, cache: Any, most: int) -> tuple[list[int], float]:
    """Print a text as it comes; return its tokens, and the seconds until this rank's first one."""
    started = time.perf_counter()
    tokens: list[int] = []
    printed, seconds = "", 0.0
    for token in smollm2.continue_greedily(model, first, cache, most):
        tokens.append(token)
        if len(tokens) == 2:  # Rank 0 made the one before.
            seconds = time.perf_counter() - started
        text = smollm2.decode(tokens)
        if not text.endswith("\ufffd"):  # Half a character.
            print(text[len(printed) :], end="", flush=True)
            printed = text
    print("\n", flush=True)
    return tokens, seconds


def main() -> None:
    """Run one rank."""
    chosen = arguments()
    smollm2.require()
    from torch_nixl.integrations.transformers import PagePool

    longest = max(len(smollm2.encode(prompt)) for prompt in chosen.prompt)
    if longest + chosen.max_tokens > 16 * NUM_PAGES:
        raise SystemExit(f"a prompt of {longest} tokens is too long: {16 * NUM_PAGES} fit")
    model = smollm2.load_model()
    pool = PagePool(model.config, NUM_PAGES, model=smollm2.NAME, dtype=model.dtype)
    communicator = torch_nixl.get_communicator()
    for prompt in chosen.prompt:
        if os.environ["RANK"] == "0":
            prefill(communicator, model, pool, prompt)
        else:
            decode(communicator, model, pool, prompt, chosen.max_tokens)
    torch_nixl.shutdown()


if __name__ == "__main__":
    main()
