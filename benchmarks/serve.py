"""Load on a server of the bundled translator: requests a second and delays by the number of clients, and overload.

    python benchmarks/serve.py FILE [--clients 1,8,64] [--seconds 20] [--engines regard,serial,ctranslate2] [--overload 120]

FILE has one text a line; a request is one of them, from English to German, through the LibreTranslate API. Three engines
decode the same model with the same settings behind the same HTTP layer and the same treatment of texts, in turns:

- regard: continuous batching in one process a core (regard/serve/scheduler.py).
- serial: one request after the other, as LibreTranslate does in each of its workers.
- ctranslate2: CTranslate2 in int8 with one worker a core, each request a batch of its own.

`--overload S` sends ten times the requests a second that regard answered to 64 clients, for S seconds, and reports the
answers, refusals, health checks and memory. With `--device cuda` requests go to the scheduler itself, without HTTP, and
the result is compared with decoding all texts at once, the best of three times (`--clients 256`, `--lines` a request).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from regard.data.parallel_corpus import read_lines
from regard.terminal import format_table

MODEL = "en-de-fr-zh"
PORT = 8765
START_SECONDS = 60
WARM_UP = 20.0  # seconds of full load before overload: until then workers keep more and more memory for their batches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--clients", default="1,8,64")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement")
    parser.add_argument("--repeats", type=int, default=1, help="rounds in which the engines take turns")
    parser.add_argument("--engines", default="regard,serial,ctranslate2")
    parser.add_argument("--overload", type=float, default=0.0, help="seconds at ten times the capacity")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--lines", type=int, default=1, help="of a request, on a GPU")
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", help=argparse.SUPPRESS)  # this process is a server with this engine
    parser.add_argument("--watch", type=int, help=argparse.SUPPRESS)  # this process watches the server with this number
    given = parser.parse_args()
    if given.serve:
        return run_server(given.serve, given.model)
    if given.watch:
        return print(json.dumps(asyncio.run(watch(given.watch, given.overload))))
    texts = [text for text in read_lines(given.file) if text.strip()]
    clients = [int(n) for n in given.clients.split(",")]
    if given.device != "cpu":
        return measure_scheduler(texts, clients, given)
    found: dict[str, Any] = {"load": [], "overload": None}
    rates: dict[str, float] = {}
    for _ in range(given.repeats):
        for engine in given.engines.split(","):
            with serving(engine, given.model):
                for n in clients:
                    asyncio.run(load(texts, n, min(3.0, given.seconds)))  # warm-up
                    row = {"engine": engine, "clients": n, **asyncio.run(load(texts, n, given.seconds))}
                    found["load"].append(row)
                    rates[engine] = row["requests/s"]
                    print(row, file=sys.stderr, flush=True)
    if given.overload:
        with serving("regard", given.model) as server:
            asyncio.run(load(texts, 64, WARM_UP))
            found["overload"] = overload(texts, 10 * rates["regard"], given.overload, server.pid)
    print(report(found))
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def report(found: dict[str, Any]) -> str:
    columns = ("engine", "clients", "requests/s", "words/s", "p50 ms", "p99 ms", "errors")
    rows = [tuple(str(row[name]) for name in columns) for row in found["load"]]
    lines = format_table([columns, *rows], 1)
    if found["overload"]:
        lines += ["", *(f"{name}: {value}" for name, value in found["overload"].items())]
    return "\n".join(lines)


# ---- servers ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def serving(engine: str, model: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server with an engine in a process of its own."""
    command = [sys.executable, __file__, "-", "--serve", engine, "--model", model]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=sys.stderr)
    try:
        end = time.monotonic() + START_SECONDS
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{PORT}/v2/health/ready", timeout=30)
                break
            if time.monotonic() > end or server.poll() is not None:
                raise SystemExit(f"the server with {engine} did not start")
            time.sleep(0.2)
        yield server
    finally:
        server.terminate()
        server.wait(60)


def run_server(engine: str, model: str) -> None:
    import logging

    from regard.pretrained import bundled_models, bundled_path
    from regard.serve.model_store import ModelStore
    from regard.serve.server import serve
    from regard.serve.settings import ServeSettings

    logging.disable(logging.INFO)
    kind = {"regard": ModelStore, "serial": make_serial_store(), "ctranslate2": make_ctranslate2_store()}[engine]
    path = bundled_path(model) if model in bundled_models() else Path(model)
    settings = ServeSettings(port=PORT, drain_delay=0.0, drain=5.0, page=False)
    serve(settings, kind({model: path}, weights="int8", device="cpu"))


def make_serial_store() -> Any:
    from regard.inference.load import load
    from regard.serve.model_store import LoadedModel, ModelStore

    class SerialStore(ModelStore):
        """A store whose model answers one request after the other."""

        turn = threading.Lock()

        def _load(self, entry: Any) -> LoadedModel:
            return LoadedModel(entry, load(entry.path, "cpu", "int8"), None, None, 0)

        @contextlib.contextmanager
        def lease(self, name: str | None = None) -> Iterator[LoadedModel]:
            with self.turn, super().lease(name) as loaded:
                yield loaded

    return SerialStore


def make_ctranslate2_store() -> Any:
    from regard.inference.load import load
    from regard.serve.model_store import LoadedModel, ModelStore

    class CTranslate2Store(ModelStore):
        """A store whose model is decoded by CTranslate2."""

        def _load(self, entry: Any) -> LoadedModel:
            inference: Any = load(entry.path, "cpu", "int8")
            exact: Any = load(entry.path, "cpu", "fp32")
            inference.decode = make_ctranslate2_decoder(exact.model, self.workers)
            return LoadedModel(entry, inference, None, None, 0)

    return CTranslate2Store


def make_ctranslate2_decoder(model: Any, workers: int) -> Any:
    """Return a function like `regard.decode.batch_decoding.decode` that decodes by CTranslate2, in int8."""
    import ctranslate2
    import numpy as np
    from cpu_decode import fill_stack
    from ctranslate2.specs import TransformerSpec

    from regard.decode.constraints import Hypothesis

    config = model.config
    layers = (config.n_encoder_layers, config.n_decoder_layers)
    spec = TransformerSpec.from_config(layers, config.n_heads, pre_norm=True)
    spec.encoder.scale_embeddings = spec.decoder.scale_embeddings = True
    fill_stack(spec.encoder, model.encoder, config.max_len)
    fill_stack(spec.decoder, model.decoder, config.max_len)
    words = model.source_embedding.weight.detach().numpy()
    embedding = spec.encoder.embeddings
    (embedding[0] if isinstance(embedding, list) else embedding).weight = words
    spec.decoder.embeddings.weight = spec.decoder.projection.weight = words
    bias = model.head.bias
    spec.decoder.projection.bias = np.zeros(len(words), np.float32) if bias is None else bias.detach().numpy()
    names = ["<blank>", "<s>", "</s>", "<unk>", *(f"t{i}" for i in range(4, len(words)))]
    number = {name: i for i, name in enumerate(names)}
    spec.register_source_vocabulary(names)
    spec.register_target_vocabulary(names)
    spec.validate()
    spec.optimize(quantization="int8")
    with tempfile.TemporaryDirectory() as folder:
        spec.save(folder)
        translator = ctranslate2.Translator(folder, inter_threads=workers, intra_threads=1, compute_type="int8")

    def decode(_: Any, sources: Any, options: Any, most: int, device: Any, progress: Any, template: Any) -> Any:
        rows = [[names[i] for i in template.wrap(ids)] for ids in sources]
        if not rows:
            return []
        longest = max(map(len, rows))
        found = translator.translate_batch(
            rows,
            beam_size=options.beam,
            length_penalty=options.length_penalty,
            max_decoding_length=int(options.max_len_a * longest + options.max_len_b),
            disable_unk=True,
            suppress_sequences=[[names[i]] for i in config.suppress_tokens if names[i] != "<unk>"],
            return_scores=True,
        )
        progress(len(rows))
        return [
            [
                Hypothesis(
                    [number[piece] for piece in one.hypotheses[0]],
                    one.scores[0],
                    one.scores[0] * (len(one.hypotheses[0]) + 1),
                    True,
                )
            ]
            for one in found
        ]

    return decode


# ---- clients ---------------------------------------------------------------------------------------------------------


class Client:
    """A connection that is kept open."""

    def __init__(self) -> None:
        self.streams: Any = None

    async def post(self, path: str, value: Any) -> tuple[int, bytes]:
        body = json.dumps(value).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return await self._exchange(head.encode() + body)

    async def get(self, path: str) -> tuple[int, bytes]:
        return await self._exchange(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())

    async def _exchange(self, data: bytes) -> tuple[int, bytes]:
        if self.streams is None:
            self.streams = await asyncio.open_connection("127.0.0.1", PORT)
        reader, writer = self.streams
        try:
            writer.write(data)
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in head[1:] if ": " in line)}
            body = await reader.readexactly(int(headers.get("content-length", 0)))
        except (OSError, asyncio.IncompleteReadError):
            self.close()
            raise
        if headers.get("connection") == "close":
            self.close()
        return int(head[0].split()[1]), body

    def close(self) -> None:
        if self.streams is not None:
            self.streams[1].close()
        self.streams = None


async def load(texts: list[str], clients: int, seconds: float) -> dict[str, Any]:
    """Let clients send one request after the other for some seconds; return rates, delays and errors."""
    delays: list[float] = []
    errors: Counter[int] = Counter()
    words, turn = 0, iter(range(10**9))
    end = time.monotonic() + seconds

    async def run() -> None:
        nonlocal words
        client = Client()
        while time.monotonic() < end:
            text = texts[next(turn) % len(texts)]
            start = time.monotonic()
            status, _ = await client.post("/translate", {"q": text, "source": "en", "target": "de"})
            if status != 200:
                errors[status] += 1
                continue
            delays.append(time.monotonic() - start)
            words += len(text.split())
        client.close()

    start = time.monotonic()
    await asyncio.gather(*(run() for _ in range(clients)))
    took = time.monotonic() - start
    return {
        "requests/s": round(len(delays) / took, 1),
        "words/s": round(words / took),
        "p50 ms": round(1000 * quantile(delays, 0.5)),
        "p99 ms": round(1000 * quantile(delays, 0.99)),
        "errors": dict(errors),
    }


def overload(texts: list[str], rate: float, seconds: float, pid: int) -> dict[str, Any]:
    """Send requests at a rate, and watch the server from another process; return what became of both."""
    command = [sys.executable, __file__, "-", "--watch", str(pid), "--overload", str(seconds)]
    watcher = subprocess.Popen(command, stdout=subprocess.PIPE)
    found = asyncio.run(send_at_rate(texts, rate, seconds))
    seen = json.loads(watcher.communicate()[0])
    return found | {
        "health p50, p99, max, ms": [round(1000 * quantile(seen["health"], q), 1) for q in (0.5, 0.99, 1.0)],
        "memory MB, least and most": [round(min(seen["memory"])), round(max(seen["memory"]))],
        "memory MB, every tenth of the time": [round(seen["memory"][len(seen["memory"]) * i // 10]) for i in range(10)],
    }


async def send_at_rate(texts: list[str], rate: float, seconds: float) -> dict[str, Any]:
    """Send requests at a rate, whether or not earlier ones are answered."""
    statuses: Counter[int | str] = Counter()
    delays: dict[int | str, list[float]] = {}

    async def one(text: str) -> None:
        client, start = Client(), time.monotonic()
        try:
            status: int | str = (await client.post("/translate", {"q": text, "source": "en", "target": "de"}))[0]
        except OSError as error:
            status = type(error).__name__
        client.close()
        statuses[status] += 1
        delays.setdefault(status, []).append(time.monotonic() - start)

    tasks, begun, sent = set(), time.monotonic(), 0
    end = begun + seconds
    while time.monotonic() < end:
        while sent < (time.monotonic() - begun) * rate:
            task = asyncio.create_task(one(texts[sent % len(texts)]))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            sent += 1
        await asyncio.sleep(0.005)
    await asyncio.gather(*tasks)
    return {
        "requests a second asked for": round(rate, 1),
        "sent": sent,
        "answers by status": dict(statuses),
        "longest delay by status, s": {str(k): round(max(v), 2) for k, v in delays.items()},
    }


async def watch(pid: int, seconds: float) -> dict[str, list[float]]:
    """Ask for health and measure memory from time to time."""
    health, memory, client = [], [], Client()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        start = time.monotonic()
        await client.get("/health")
        health.append(time.monotonic() - start)
        memory.append(resident_megabytes(pid))
        await asyncio.sleep(0.2)
    return {"health": health, "memory": memory}


def quantile(values: list[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else float("nan")


def resident_megabytes(pid: int) -> float:
    """Return the memory of a process and all that it started; pages that they share count once (PSS)."""
    total, todo = 0, [pid]
    while todo:
        one = todo.pop()
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{one}/task"):
                todo += map(int, Path(f"/proc/{one}/task/{task}/children").read_text().split())
            rollup = Path(f"/proc/{one}/smaps_rollup").read_text()
            total += next(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:"))
    return total / 1024


# ---- a GPU -------------------------------------------------------------------------------------------------------------


def measure_scheduler(texts: list[str], clients: list[int], given: argparse.Namespace) -> None:
    """Compare requests of many clients, through the scheduler, with decoding all texts at once."""
    import regard
    from regard.serve.model_store import ModelStore
    from regard.serve.request_context import RequestContext, current_request

    direct: Any = regard.load(given.model, given.device)
    store = ModelStore({given.model: Path(given.model)}, device=given.device, queue_tokens=1 << 22)
    ids = direct.encode_sources(texts, "de")[0]

    def decode(translator: Any, rows: list[list[int]]) -> int:
        options = translator.options
        device = next(translator.model.parameters()).device
        limit = translator.model.config.max_len
        found = translator.decode(
            translator.model, rows, options, limit, device, lambda n: None, translator.token_template
        )
        return sum(len(ranked[0].tokens) + 1 for ranked in found)

    decode(direct, ids)
    offline = 0.0
    for _ in range(3):
        start = time.perf_counter()
        offline = max(offline, decode(direct, ids) / (time.perf_counter() - start))
    rows = [("offline, all at once", "", f"{offline:,.0f}", "1.00")]
    with store.lease() as loaded:
        served = (RequestContext, current_request)
        for some in (ids, ids[:64]):  # warm-up: the worker loads the model and captures its graphs
            decode(loaded.inference, some)
        rows += [serve_clients(loaded.inference, ids, n, given, offline, decode, served) for n in clients]
    print("\n".join(format_table([("clients", "requests/s", "tokens/s", "of offline"), *rows], 1)))
    store.close()


def serve_clients(
    inference: Any, ids: Any, n: int, given: argparse.Namespace, offline: float, decode: Any, serve: Any
) -> tuple[str, ...]:
    context, current = serve
    counts = {"requests": 0, "tokens": 0}
    lock, turn, end = threading.Lock(), iter(range(10**9)), time.perf_counter() + given.seconds + 2

    def client(i: int) -> None:
        current.set(context(str(i), f"client {i}"))
        while time.perf_counter() < end:
            with lock:
                rows = [ids[next(turn) % len(ids)] for _ in range(given.lines)]
            tokens = decode(inference, rows)
            with lock:
                counts["requests"] += 1
                counts["tokens"] += tokens

    threads = [threading.Thread(target=client, args=(i,)) for i in range(n)]
    for thread in threads:
        thread.start()
    time.sleep(2)  # warm-up
    with lock:
        counts.update(requests=0, tokens=0)
    start = time.perf_counter()
    for thread in threads:
        thread.join()
    took = time.perf_counter() - start
    rate = counts["tokens"] / took
    return str(n), f"{counts['requests'] / took:,.0f}", f"{rate:,.0f}", f"{rate / offline:.2f}"


if __name__ == "__main__":
    main()
