"""The server's request rate and latency against another server's, both driven by `wrk`, which costs a core little.

Both servers must run already, on this machine, with the same model under the same name. They are measured in turns, so
that a machine that is slow for a while is slow for both:

    anypool serve MODEL --port 8000 --dtype bfloat16 --served-model-name minilm
    python benchmarks/http_load.py http://127.0.0.1:8000 --other http://127.0.0.1:8001 --model minilm

`wrk` is in Debian's package of that name. Only addresses of this machine are taken.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median
from urllib.parse import urlsplit

# About 30 tokens of a BERT vocabulary.
TEXT = (
    "Pooling models turn a text into one vector, and a server of them should spend its time in the model rather than "
    "in the layers around it."
)
_SCRIPT = """
wrk.method = "POST"
wrk.headers["Content-Type"] = "application/json"
wrk.body = [==[{body}]==]
done = function(summary, latency, requests)
  local errors = summary.errors
  io.write(string.format("RESULT %d %d %d %f %f %f\\n", summary.requests, summary.duration,
    errors.connect + errors.read + errors.write + errors.status + errors.timeout,
    latency:percentile(50), latency:percentile(90), latency:percentile(99)))
end
"""
_TIMES = ("tokenization", "queue", "inference", "total")


@dataclass(frozen=True)
class Measured:
    """One run of `wrk`. Latencies are in milliseconds."""

    requests_per_s: float
    p50: float
    p90: float
    p99: float
    errors: int


def main() -> int:
    arguments = _parse()
    if shutil.which("wrk") is None:
        print("wrk is missing: apt-get install wrk", file=sys.stderr)
        return 2
    for name in ("anypool", "torch", "uvicorn", "uvloop", "httptools"):
        print(f"{name} {version(name)}", end="  ")
    print(f"\n{platform.platform()}, Python {platform.python_version()}\n{' '.join(sys.argv)}\n")
    servers = [arguments.server, *([arguments.other] if arguments.other else [])]
    print("| texts | concurrency | server | requests/s | p50 ms | p90 ms | p99 ms | errors |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for texts in arguments.texts:
        for concurrency in arguments.concurrency:
            _compare(arguments, servers, texts, concurrency)
    print()
    _where_the_time_goes(arguments)
    return 0


def _compare(arguments: argparse.Namespace, servers: list[str], texts: int, concurrency: int) -> None:
    runs: dict[str, list[Measured]] = {server: [] for server in servers}
    for _ in range(arguments.rounds):
        for server in servers:
            runs[server].append(_wrk(server, _body(arguments.model, texts), concurrency, arguments.seconds))
    for server in servers:
        rate, p50, p90, p99 = (
            median(getattr(one, name) for one in runs[server]) for name in ("requests_per_s", "p50", "p90", "p99")
        )
        errors = sum(one.errors for one in runs[server])
        print(f"| {texts} | {concurrency} | {server} | {rate:.1f} | {p50:.2f} | {p90:.2f} | {p99:.2f} | {errors} |")
    if len(servers) == 2:
        first, second = (median(one.requests_per_s for one in runs[server]) for server in servers)
        print(f"| | | | {first / second:.2f} x | | | | |", flush=True)


def _body(model: str, texts: int) -> bytes:
    given = TEXT if texts == 1 else [f"{number} {TEXT}" for number in range(texts)]
    return json.dumps({"model": model, "input": given, "encoding_format": "float"}).encode()


def _wrk(server: str, body: bytes, concurrency: int, seconds: int) -> Measured:
    with tempfile.NamedTemporaryFile("w", suffix=".lua", delete=False) as script:
        script.write(_SCRIPT.replace("{body}", body.decode()))
    try:
        command = ["wrk", "-t1", f"-c{concurrency}", f"-d{seconds}s", "--timeout", "60s", "-s", script.name]
        done = subprocess.run(
            [*command, f"{server}/v1/embeddings"], capture_output=True, text=True, check=True, timeout=seconds + 90
        )
    finally:
        Path(script.name).unlink()
    found = re.search(r"^RESULT (\d+) (\d+) (\d+) ([\d.]+) ([\d.]+) ([\d.]+)$", done.stdout, re.MULTILINE)
    if found is None:
        raise SystemExit(f"wrk said something else:\n{done.stdout}{done.stderr}")
    requests, microseconds, errors = (int(found[i]) for i in (1, 2, 3))
    p50, p90, p99 = (float(found[i]) / 1000 for i in (4, 5, 6))
    return Measured(requests / (microseconds / 1e6), p50, p90, p99, errors)


def _where_the_time_goes(arguments: argparse.Namespace) -> None:
    """Parts of a lone request, as the server's own headers have them, and what is outside of it."""
    body = _body(arguments.model, 1)
    parts: dict[str, list[float]] = {name: [] for name in (*_TIMES, "outside")}
    for _ in range(200):
        request = urllib.request.Request(
            f"{arguments.server}/v1/embeddings", body, {"Content-Type": "application/json"}
        )
        began = time.perf_counter()
        with urllib.request.urlopen(request, timeout=60) as response:
            response.read()
            taken = 1000 * (time.perf_counter() - began)
            if response.headers["x-total-time"] is None:
                return
            for name in _TIMES:
                parts[name].append(float(response.headers[f"x-{name}-time"]))
        parts["outside"].append(taken - parts["total"][-1])
    middle = {name: median(values) for name, values in parts.items()}
    rest = middle["total"] - middle["tokenization"] - middle["queue"] - middle["inference"]
    print("| part of a lone request | ms, median of 200 |\n| --- | --- |")
    for name, meaning in (
        ("tokenization", "checking and tokenising"),
        ("queue", "in the queue"),
        ("inference", "forward pass and pooling"),
    ):
        print(f"| {meaning} | {middle[name]:.3f} |")
    print(f"| parsing, handing over between threads, encoding | {rest:.3f} |")
    print(f"| sockets, HTTP and this client, a new connection each time | {middle['outside']:.3f} |")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("server", type=_address, help="address of anypool")
    parser.add_argument("--other", type=_address, help="address of the server that it is compared with")
    parser.add_argument("--model", default="minilm", help="the name under which both serve the model")
    parser.add_argument("--concurrency", type=_numbers, default=[1, 32, 128], help="connections (default: 1,32,128)")
    parser.add_argument("--texts", type=_numbers, default=[1], help="texts per request (default: 1)")
    parser.add_argument("--seconds", type=int, default=10, choices=range(1, 61), metavar="1..60", help="of each run")
    parser.add_argument("--rounds", type=int, default=3, choices=range(1, 11), metavar="1..10", help="runs of each")
    return parser.parse_args()


def _address(text: str) -> str:
    host = urlsplit(text).hostname
    if host not in ("127.0.0.1", "localhost", "::1"):
        raise argparse.ArgumentTypeError(f"{text} is not on this machine")
    return text.rstrip("/")


def _numbers(text: str) -> list[int]:
    numbers = [int(part) for part in text.split(",")]
    if not all(1 <= number <= 1024 for number in numbers):
        raise argparse.ArgumentTypeError("numbers are 1 to 1024")
    return numbers


if __name__ == "__main__":
    sys.exit(main())
