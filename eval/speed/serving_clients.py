"""Two servers of one model and their clients: ``transformers serve`` on ours, and llama-server.

A Mamba of 130M parameters with random weights in float32 is saved as a model of the zoo and as
GGUF. The servers take turns, on two threads, to answer 1, 8, 32 and 64 clients over HTTP on
loopback, and the best of three rounds counts: prompts of 64 random tokens, new in each round, 32
new ones, greedy. llama-server starts anew for each number of clients, with as many slots. For one
client also, streamed, the time to the first token of two requests that begin with the same 2,000
tokens. "same" counts answers that are those of ``generate`` alone, of those compared.

    python eval/speed/serving_clients.py LLAMA_SERVER eval/speed/serving_clients.csv

This Python needs gguf and ``transformers[serving]``. LLAMA_SERVER is built from the sources that
llama-cpp-python brings (``pip download --no-binary :all: --no-deps llama-cpp-python``), unpacked,
in ``vendor/llama.cpp``: ``cmake -B build -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF`` and
``cmake --build build --target llama-server``.

Ours reads and tells text, so its tokenizer has a word for each token: its number. llama-server
gets and tells tokens, and has no tokenizer.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from llama import VOCABULARY, mamba, write_gguf
from report import write_table
from serving import GREEDY, NEW, SHARED
from transformers import PreTrainedTokenizerFast

from ssmzoo_kernels.machine import circumstances

CLIENTS = {1: 3, 8: 2, 32: 1, 64: 1}  # and the requests of each, in a round
PROMPT, OWN, ROUNDS, THREADS, COMPARED = 64, 20, 3, 2, 4
Prompt = list[int]


class Server:
    """A server's command, and how it is asked; both take prompts and tell answers as tokens."""

    name, path = "", ""

    def command(self, port: int, clients: int) -> list[str]:
        """Return what starts it."""
        raise NotImplementedError

    def body(self, prompt: Prompt, new: int) -> dict[str, Any]:
        """Return a greedy request."""
        raise NotImplementedError

    def tokens(self, answer: dict[str, Any]) -> list[int]:
        """Return the new tokens of an answer, whole or a piece of a stream."""
        raise NotImplementedError


class Ours(Server):
    """``transformers serve`` with a model of the zoo: tokens are the numbers of a text."""

    name, path = "ssmzoo", "/v1/completions"

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)

    def command(self, port: int, clients: int) -> list[str]:
        """Return what starts it, which is the same for any number of clients."""
        place = ["--host", "127.0.0.1", "--port", str(port), "--device", "cpu"]
        serve = ["transformers", "serve", self._folder, "--continuous-batching", *place]
        return [sys.executable, "-m", "ssmzoo", "exec", *serve]

    def body(self, prompt: Prompt, new: int) -> dict[str, Any]:
        """Return a greedy request."""
        text = " ".join(map(str, prompt))
        return {"model": self._folder, "prompt": text, "max_tokens": new, "temperature": 0}

    def tokens(self, answer: dict[str, Any]) -> list[int]:
        """Return the new tokens of an answer, whole or a piece of a stream."""
        return [int(word) for word in answer["choices"][0]["text"].split()]


class Llama(Server):
    """``llama-server``, with a slot for each client."""

    name, path = "llama.cpp", "/completion"

    def __init__(self, program: Path, weights: Path) -> None:
        self._program, self._weights = str(program), str(weights)

    def command(self, port: int, clients: int) -> list[str]:
        """Return what starts it."""
        place = ["--host", "127.0.0.1", "--port", str(port)]
        sizes = ["-np", str(clients), "-c", str(clients * 2 * SHARED), "-t", str(THREADS)]
        return [self._program, "-m", self._weights, *sizes, *place]

    def body(self, prompt: Prompt, new: int) -> dict[str, Any]:
        """Return a greedy request."""
        greedy = {"temperature": 0, "ignore_eos": True, "return_tokens": True}
        return {"prompt": prompt, "n_predict": new, **greedy}

    def tokens(self, answer: dict[str, Any]) -> list[int]:
        """Return the new tokens of an answer, whole or a piece of a stream."""
        return answer["tokens"]


@contextmanager
def started(server: Server, clients: int, log: Path) -> Iterator[int]:
    """Start a server, and yield its port once it answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(THREADS)}
    with log.open("w") as told:
        command = server.command(port, clients)
        process = subprocess.Popen(command, env=environment, stdout=told, stderr=told)
        try:
            while not healthy(port):
                if process.poll() is not None:
                    raise RuntimeError(f"{server.name} ended: {log.read_text()[-2000:]}")
                time.sleep(0.1)
            yield port
        finally:
            process.terminate()
            process.wait()


def healthy(port: int) -> bool:
    """Return whether a server is there, and has its model."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def client(server: Server, port: int, prompts: Sequence[Prompt]) -> list[list[int]]:
    """Send requests one behind the other over one connection; return the answers."""
    connection, answers = http.client.HTTPConnection("127.0.0.1", port), []
    for prompt in prompts:
        found = json.load(asked(connection, server, server.body(prompt, NEW)))
        answers.append(server.tokens(found))
    connection.close()
    return answers


def asked(
    connection: http.client.HTTPConnection, server: Server, body: dict[str, Any]
) -> http.client.HTTPResponse:
    """Send a request, and return what comes back."""
    headers = {"Content-Type": "application/json"}
    connection.request("POST", server.path, json.dumps(body), headers)
    response = connection.getresponse()
    if response.status != 200:
        raise RuntimeError(f"{server.name}: {response.status} {response.read()[:500]!r}")
    return response


def first_token(server: Server, port: int, prompt: Prompt) -> float:
    """Return the seconds until the first token of a streamed answer is there."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    body, begin, seconds = {**server.body(prompt, 4), "stream": True}, time.perf_counter(), 0.0
    for line in asked(connection, server, body):
        piece = line.decode().removeprefix("data: ").strip()
        if not seconds and piece.startswith("{") and server.tokens(json.loads(piece)):
            seconds = time.perf_counter() - begin
    connection.close()
    return seconds


def drawn(count: int, length: int) -> list[Prompt]:
    """Return prompts of random tokens."""
    return torch.randint(VOCABULARY, (count, length)).tolist()


def requests_a_second(
    server: Server, port: int, prompts: Sequence[Prompt], clients: int
) -> tuple[float, list[list[int]]]:
    """Return how many requests are answered in a second, and the answers."""
    shares = [prompts[i::clients] for i in range(clients)]
    with ThreadPoolExecutor(clients) as pool:
        begin = time.perf_counter()
        told = list(pool.map(lambda share: client(server, port, share), shares))
        seconds = time.perf_counter() - begin
    answers = [told[i % clients][i // clients] for i in range(len(prompts))]
    return len(prompts) / seconds, answers


def take_turns(
    ports: dict[Server, int], clients: int, expected: list[list[int]], rounds: list[list[Prompt]]
) -> list[dict[str, Any]]:
    """Return a row for each server, with the best of all rounds."""
    best, same = dict.fromkeys(ports, 0.0), dict.fromkeys(ports, 0)
    for number, prompts in enumerate(rounds):
        for server, port in ports.items():
            speed, answers = requests_a_second(server, port, prompts, clients)
            if any(len(answer) != NEW for answer in answers):
                raise RuntimeError(f"{server.name} told {[*map(len, answers)]} tokens, not {NEW}")
            best[server] = max(best[server], speed)
            if not number:
                same[server] = sum(a == b for a, b in zip(answers, expected, strict=False))
    return [
        {"server": server.name, "clients": clients, "requests": len(rounds[0])}
        | {"prompt": PROMPT, "new_tokens": NEW, "requests_a_second": f"{best[server]:.2f}"}
        | {"same": same[server], "compared": len(expected)}
        for server in ports
    ]


def first_tokens(ports: dict[Server, int]) -> list[dict[str, str]]:
    """Return the columns of the first tokens behind a shared prompt, of each server."""
    pairs: dict[Server, list[list[float]]] = {server: [] for server in ports}
    for (shared,) in (drawn(1, SHARED) for _ in range(ROUNDS)):
        prompts = [[*shared, *own] for own in drawn(2, OWN)]
        for server, port in ports.items():
            pairs[server].append([first_token(server, port, prompt) for prompt in prompts])
    best = ([min(times) for times in zip(*found, strict=True)] for found in pairs.values())
    return [{"first_token": f"{a:.3f}", "second_request": f"{b:.3f}"} for a, b in best]


def measured(ours: Server, llama: Server, model: Any, folder: Path) -> list[dict[str, Any]]:
    """Return a row for each number of clients and each server."""
    table = []
    with started(ours, 1, folder / "ours.log") as port:
        for clients, each in CLIENTS.items():
            rounds = [drawn(clients * each, PROMPT) for _ in range(ROUNDS)]
            expected = alone(model, rounds[0][:COMPARED])
            with started(llama, clients, folder / "llama.log") as other:
                ports = {ours: port, llama: other}
                for server in ports:
                    client(server, ports[server], drawn(2, PROMPT))  # warms up
                rows = take_turns(ports, clients, expected, rounds)
                if clients == 1:
                    both = zip(rows, first_tokens(ports), strict=True)
                    rows = [row | columns for row, columns in both]
                for row in rows:
                    print(*row.values(), flush=True)
                table += rows
    return table


@torch.no_grad()
def alone(model: Any, prompts: Sequence[Prompt]) -> list[list[int]]:
    """Return the answers of ``generate``."""
    ids = (model.generate(torch.tensor([p]), generation_config=GREEDY) for p in prompts)
    return [answer[0, PROMPT:].tolist() for answer in ids]


def save(folder: Path) -> Any:
    """Save the model in both forms; return the zoo's."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    from ssmzoo_bmojo.convert_bmojo import from_mamba

    stock = mamba(24)
    write_gguf(stock, folder / "mamba.gguf")
    zoo = from_mamba(stock)
    zoo.generation_config.eos_token_id = zoo.config.eos_token_id = None  # nothing ends an answer
    zoo.save_pretrained(folder / "zoo")
    words = Tokenizer(models.WordLevel({str(token): token for token in range(VOCABULARY)}))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder / "zoo")
    return zoo


def main() -> int:
    """Measure, and write a CSV."""
    parser = argparse.ArgumentParser(description="Requests of many clients, beside llama-server.")
    parser.add_argument("llama_server", type=Path)
    parser.add_argument("output", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(THREADS)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = save(folder)
        llama = Llama(given.llama_server, folder / "mamba.gguf")
        table = measured(Ours(folder / "zoo"), llama, model, folder)
    write_table([row | circumstances(torch.device("cpu")) for row in table], given.output)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
