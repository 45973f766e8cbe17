"""Part `scrape`: what one reading of an engine's metrics page costs a dispatcher, in CPU time."""

import asyncio
import multiprocessing
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection

import httpx

from bench.fleet import MODEL, Cores, pin
from bench.report import Budget, Figure, Part
from common.settings import BackendSettings
from dispatcher.backend import Backend
from dispatcher.backends import Poller
from dispatcher.engine import open_transport
from dispatcher.engines.kinds import ADAPTERS, recognise
from dispatcher.pages import Pages
from sim.engine import Engine
from sim.events import EngineRequest
from sim.metrics import render
from sim.settings import EngineSettings, Face

BYTES = 75_000
"""A page of vLLM 0.32 has 51 to 55 KB."""
BUDGET = Budget(2.0, 1.0)
SCRAPE_MS = 20
FACES: tuple[Face, ...] = ("vllm", "sglang", "tgi")


async def measure(cores: Cores, *, quick: bool) -> Part:
    """Whole readings over HTTP, and the part of them that looks at the page."""
    reads, seconds = (20, 1.0) if quick else (500, 15.0)
    whole = page("vllm")
    figures = [
        Figure(name=f"one reading of {len(whole) // 1_000} KB over HTTP", unit="ms",
               value=await scraped(whole, seconds, cores), budget=BUDGET),
    ]  # fmt: skip
    for face in FACES:
        read = partial(ADAPTERS[face].read, page(face), MODEL)
        figures.append(
            Figure(name=f"of it, its lines found and parsed, {face}", unit="ms",
                   value=cpu_ms(read, reads))
        )  # fmt: skip
    other = whole.replace(b"vllm:", b"other:")
    figures.append(
        Figure(name="a page that is no known engine's, looked at", unit="ms",
               value=cpu_ms(lambda: recognise(other), reads))
    )  # fmt: skip
    return Part(
        name="scrape",
        title="CPU time of one reading of an engine's metrics",
        figures=figures,
        notes=["pages of the simulated engine, filled up with series that are not read"],
    )


def page(face: Face) -> bytes:
    """A page of BYTES of an engine that has work; most of it is of no interest, as of real ones."""
    settings = EngineSettings(model=MODEL, engine=face, max_num_seqs=4)
    engine = Engine(settings)
    for _ in range(8):
        engine.submit(0.0, EngineRequest(prompt_tokens=10, output_tokens=50))
    engine.advance(1.0)
    text = render(settings, engine.stats, engine.gauges(), 0.0)
    prefix = text.split(b" ")[2][:5].decode()  # of the first name, after `# HELP`
    more = [
        f'{prefix}request_time_seconds_bucket{{engine="0",le="{n}.0",model_name="{MODEL}"}} 1.0'
        for n in range(1_000)
    ]
    lines = iter(more)
    while len(text) < BYTES:
        text += next(lines).encode() + b"\n"
    return text


def cpu_ms(call: Callable[[], object], times: int) -> float:
    """Mean CPU time of a call."""
    began = time.thread_time()
    for _ in range(times):
        call()
    return 1_000 * (time.thread_time() - began) / times


class Counted(httpx.AsyncBaseTransport):
    """A transport that counts what is asked for."""

    def __init__(self, inner: httpx.AsyncBaseTransport) -> None:
        self._inner = inner
        self.asked: Counter[str] = Counter()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Pass it on."""
        self.asked[request.url.path] += 1
        return await self._inner.handle_async_request(request)

    async def aclose(self) -> None:
        """Close the one inside."""
        await self._inner.aclose()


async def scraped(text: bytes, seconds: float, cores: Cores) -> float:
    """Mean CPU time, in this thread, of a poller's reading of the page from another process."""
    with served(text, cores) as port:
        backend = Backend(BackendSettings(url=f"http://127.0.0.1:{port}"), model=MODEL)
        transport = Counted(open_transport())
        poller = Poller(
            Pages(transport), [backend], busy=lambda _: True, changed=lambda _: None,
            rng=random.Random(1), busy_ms=SCRAPE_MS,
        )  # fmt: skip
        running = asyncio.create_task(poller.run())
        try:
            await asyncio.sleep(0.5)
            before, began = transport.asked["/metrics"], time.thread_time()
            await asyncio.sleep(seconds)
            taken = time.thread_time() - began
            polls = transport.asked["/metrics"] - before
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await transport.aclose()
    if not backend.metrics_up or not polls:
        raise RuntimeError("the page was not read")
    return 1_000 * taken / polls


@contextmanager
def served(text: bytes, cores: Cores) -> Iterator[int]:
    """The page at a port, served by a process of its own."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    server = spawn.Process(target=_serve, args=(text, theirs), daemon=True)
    server.start()
    try:
        if server.pid is not None:
            pin(server.pid, cores.product)
        yield ours.recv()
    finally:
        server.terminate()
        server.join()


def _serve(text: bytes, started: Connection) -> None:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            body = text if self.path == "/metrics" else b'{"data":[]}'
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *words: object) -> None:
            return  # the terminal is for figures

    class Server(ThreadingHTTPServer):
        def handle_error(self, *words: object) -> None:
            return  # the poller has hung up

    server = Server(("127.0.0.1", 0), Handler)
    started.send(server.server_port)
    server.serve_forever()
