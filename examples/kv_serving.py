"""Prefill and decode as HTTP servers: the ticket travels in the request, through a proxy.

    python examples/kv_serving.py --prompt "Why is the sky blue?" --prompt "Name three colours."

starts all three servers, sends the prompts at once, and ends. Or each by itself:

    python examples/kv_serving.py prefill --port 8100
    python examples/kv_serving.py decode --port 8200
    python examples/kv_serving.py proxy --port 8000 \
        --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200
    curl -d '{"prompt": "Why is the sky blue?", "max_tokens": 32}' http://127.0.0.1:8000/generate

The proxy asks the prefill server first, and puts what it answers, `kv_transfer_params`, into the
request to the decode server, as vLLM's proxy does. Keys and values don't pass through it: the
decode server reads them from the prefill server's memory.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from http.client import HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain
from typing import Any, ClassVar

import smollm2

HOST = "127.0.0.1"
NUM_PAGES = 256
"""Of 16 tokens each: 94 MB."""

MAX_BODY = 1 << 20
SECONDS = 60.0
"""Until a request is given up, on each stage."""


class Refused(Exception):
    """A request that is answered with an HTTP status and a sentence."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


class Worker:
    """A model, pages for its keys and values, and a connection."""

    def __init__(self, name: str) -> None:
        from torch_nixl.engine.connection import Connection
        from torch_nixl.integrations.transformers import PagePool

        self.model = smollm2.load_model()
        self.pool = PagePool(
            self.model.config, NUM_PAGES, model=smollm2.NAME, dtype=self.model.dtype
        )
        self.connection = Connection.open(name)
        # One token of one request at a time; a real server would batch them.
        self._turn = threading.Lock()

    def prefill(self, prompt: str) -> tuple[int, Any]:
        """Return the first new token, and the cache of those before it."""
        from transformers import DynamicCache

        tokens = smollm2.encode(prompt)
        most = self.pool.num_pages * self.pool.page_size
        if len(tokens) > most:
            raise Refused(400, f"the prompt has {len(tokens)} tokens, more than {most}")
        cache = DynamicCache()
        with self._turn:
            return smollm2.next_token(self.model, tokens, cache), cache

    def generate(self, token: int, cache: Any, max_tokens: int) -> Iterator[str]:
        """Yield the text piece by piece."""
        tokens: list[int] = []
        printed = ""
        following = smollm2.continue_greedily(self.model, token, cache, max_tokens)
        while True:
            with self._turn:
                token = next(following, -1)
            if token == -1:
                return
            tokens.append(token)
            text = smollm2.decode(tokens)
            if not text.endswith("\ufffd"):  # Half a character.
                yield text[len(printed) :]
                printed = text


class Handler(BaseHTTPRequestHandler):
    """Reads a JSON object, answers with the pieces of text that `answer` yields."""

    protocol_version = "HTTP/1.1"
    timeout = SECONDS

    path_served: ClassVar[str]

    def answer(self, body: dict[str, Any]) -> Iterator[str]:
        """Yield the answer. What it raises before the first piece becomes the status."""
        raise NotImplementedError

    def statistics(self) -> dict[str, Any]:
        """What GET answers."""
        return {}

    def do_GET(self) -> None:
        self._send(200, json.dumps(self.statistics()))

    def do_POST(self) -> None:
        from torch_nixl.errors import MetadataError, TorchNixlError, TransferTimeout

        try:
            pieces = self.answer(self._body())
            first = next(pieces, "")
        except Refused as error:
            self._send(error.status, json.dumps({"error": str(error)}))
        except MetadataError as error:
            self._send(400, json.dumps({"error": str(error)}))
        except TransferTimeout as error:
            self._send(503, json.dumps({"error": str(error)}))
        except (TorchNixlError, OSError, HTTPException) as error:
            self._send(502, json.dumps({"error": f"{type(error).__name__}: {error}"}))
        else:
            self._send(200, first, pieces)

    def _body(self) -> dict[str, Any]:
        if self.path != self.path_served:
            raise Refused(404, f"expected POST {self.path_served}")
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > MAX_BODY:
            raise Refused(413, f"expected Content-Length of at most {MAX_BODY}")
        try:
            body = json.loads(self.rfile.read(int(length)))
        except ValueError:
            body = None
        if not isinstance(body, dict) or not isinstance(body.get("prompt"), str):
            raise Refused(400, 'expected JSON: {"prompt": "...", "max_tokens": 32}')
        if (
            type(body.setdefault("max_tokens", 32)) is not int
            or not 1 <= body["max_tokens"] <= 1024
        ):
            raise Refused(400, "max_tokens: expected 1 to 1024")
        return body

    def _send(self, status: int, text: str, more: Iterator[str] | None = None) -> None:
        try:
            self.send_response(status)
            self.send_header("Content-Type", "text/plain; charset=utf-8")
            self.send_header("Transfer-Encoding", "chunked")
            self.send_header("Connection", "close")
            self.end_headers()
            for piece in chain([text], more or ()):
                if piece:
                    data = piece.encode()
                    self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))
            self.wfile.write(b"0\r\n\r\n")
        except (OSError, HTTPException):
            # Whoever asked has gone, or the server that we asked has: without the last chunk the
            # answer is seen to be cut short.
            self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name that http.server gives it
        """Keep quiet."""


def prefill_handler(stack: ExitStack) -> type[Handler]:
    """Serve POST /prefill."""
    from torch_nixl.integrations.transformers import DynamicCacheServer

    worker = Worker("prefill")
    stack.callback(worker.connection.close)
    caches = stack.enter_context(
        DynamicCacheServer(worker.connection, worker.pool, timeout=SECONDS)
    )

    class Prefill(Handler):
        path_served = "/prefill"

        def answer(self, body: dict[str, Any]) -> Iterator[str]:
            token, cache = worker.prefill(body["prompt"])
            offer = caches.offer(body["prompt"][:40], cache, timeout=SECONDS)
            yield json.dumps({"ticket": offer.ticket, "first_token": token})

        def statistics(self) -> dict[str, Any]:
            figures = caches.server.statistics()
            return {"free_pages": caches.reclaim(), "outcomes": dict(figures.outcomes)}

    return Prefill


def decode_handler(stack: ExitStack) -> type[Handler]:
    """Serve POST /decode; without `kv_transfer_params` it does the prefill, too."""
    from torch_nixl.integrations.transformers import DynamicCacheClient

    worker = Worker("decode")
    stack.callback(worker.connection.close)
    caches = stack.enter_context(
        DynamicCacheClient(worker.connection, worker.pool, timeout=SECONDS)
    )

    class Decode(Handler):
        path_served = "/decode"

        def answer(self, body: dict[str, Any]) -> Iterator[str]:
            params = body.get("kv_transfer_params")
            if params is None:
                token, cache = worker.prefill(body["prompt"])
            else:
                try:
                    ticket, token = str(params["ticket"]), int(params["first_token"])
                except (KeyError, TypeError, ValueError):
                    raise Refused(400, "kv_transfer_params: not a prefill server's") from None
                if not 0 <= token < worker.model.config.vocab_size:
                    raise Refused(400, f"first_token: there is no token {token}")
                cache = caches.pull(ticket)
            yield from worker.generate(token, cache, body["max_tokens"])

        def statistics(self) -> dict[str, Any]:
            figures = caches.client.statistics()
            return {
                "free_pages": caches.reclaim(),
                "outcomes": dict(figures.outcomes),
                "nbytes": figures.nbytes,
                "paths": dict(figures.paths),
            }

    return Decode


def proxy_handler(prefill: str, decode: str) -> type[Handler]:
    """Serve POST /generate by asking one of each."""

    class Proxy(Handler):
        path_served = "/generate"

        def answer(self, body: dict[str, Any]) -> Iterator[str]:
            with post(f"{prefill}/prefill", {"prompt": body["prompt"]}) as answer:
                params = json.load(answer)
            with post(f"{decode}/decode", {**body, "kv_transfer_params": params}) as answer:
                while piece := answer.read1():
                    yield piece.decode(errors="replace")

    return Proxy


def post(url: str, body: dict[str, Any]) -> Any:
    """Send JSON; return the response, to be read and closed.

    Raises:
        Refused: The server can't be reached, or answered with an error.
    """
    try:
        return urllib.request.urlopen(
            urllib.request.Request(url, json.dumps(body).encode()), timeout=2 * SECONDS
        )
    except urllib.error.HTTPError as error:
        with error:
            raise Refused(error.code, json.load(error)["error"]) from None
    except OSError as error:
        raise Refused(502, f"{url}: {error}") from None


def generate(url: str, prompt: str, max_tokens: int) -> str:
    """Have a text generated."""
    with post(url, {"prompt": prompt, "max_tokens": max_tokens}) as answer:
        text: str = answer.read().decode()
        return text


def serve(chosen: argparse.Namespace) -> None:
    """Run one server, until standard input ends if it was started by `run_all`."""
    with ExitStack() as stack:
        if chosen.role == "prefill":
            handler = prefill_handler(stack)
        elif chosen.role == "decode":
            handler = decode_handler(stack)
        else:
            handler = proxy_handler(chosen.prefill, chosen.decode)
        server = ThreadingHTTPServer((HOST, chosen.port), handler)
        stack.callback(server.server_close)
        print(f"{chosen.role} listens on http://{HOST}:{server.server_port}", flush=True)
        if not chosen.until_eof:
            server.serve_forever()
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        sys.stdin.read()
        server.shutdown()
        serving.join()


def start(stack: ExitStack, role: str, *options: str) -> subprocess.Popen[str]:
    """Start a server that ends with this process."""
    command = [sys.executable, __file__, role, "--until-eof", *options]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    # Leaving a Popen closes its pipes, and waits.
    return stack.enter_context(child)


def url_of(child: subprocess.Popen[str]) -> str:
    """Where a server listens, once it does."""
    assert child.stdout is not None
    line = child.stdout.readline()
    if not line:
        raise SystemExit("a server has not started: see above")
    return line.split()[-1]


def run_all(prompts: list[str], max_tokens: int) -> None:
    """Start all servers, send the prompts at once, and compare with the decode server alone."""
    with ExitStack() as stack:
        workers = [start(stack, role) for role in ("prefill", "decode")]
        prefill, decode = (url_of(child) for child in workers)
        proxy = url_of(start(stack, "proxy", "--prefill", prefill, "--decode", decode))
        started = time.perf_counter()
        with ThreadPoolExecutor(len(prompts)) as pool:
            texts = list(pool.map(lambda p: generate(f"{proxy}/generate", p, max_tokens), prompts))
        seconds = time.perf_counter() - started
        for prompt, text in zip(prompts, texts, strict=True):
            print(f"> {prompt[:100]}\n{text}\n")
        print(f"{len(prompts)} requests at once in {seconds:.1f} s")
        for url in (prefill, decode):
            with urllib.request.urlopen(url, timeout=SECONDS) as answer:
                print(f"{url}: {answer.read().decode()}")
        alone = [generate(f"{decode}/decode", prompt, max_tokens) for prompt in prompts]
        print("texts of the decode server alone:", "equal" if alone == texts else "DIFFERENT")
    if alone != texts:
        raise SystemExit(1)


def main() -> None:
    """Read the command line and run one server, or all."""
    parser = argparse.ArgumentParser(description="Prefill and decode as HTTP servers.")
    parser.add_argument(
        "role", nargs="?", choices=("all", "prefill", "decode", "proxy"), default="all"
    )
    parser.add_argument("--prompt", action="append", help="may be given many times")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--prefill", help="URL of the prefill server")
    parser.add_argument("--decode", help="URL of the decode server")
    parser.add_argument("--until-eof", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    smollm2.require()
    if chosen.role == "all":
        run_all(chosen.prompt or ["Why is the sky blue?", "Name three colours."], chosen.max_tokens)
    elif chosen.role == "proxy" and not (chosen.prefill and chosen.decode):
        parser.error("proxy: --prefill and --decode are needed")
    else:
        serve(chosen)


if __name__ == "__main__":
    main()
