"""What a server does under far more than it can serve, with clients that leave and bodies that are no JSON among it.

    anypool serve MODEL --port 8000 --dtype bfloat16 --max-queued-tokens 4000
    python benchmarks/http_stress.py http://127.0.0.1:8000 --seconds 60

A request without load is timed first. Then so many clients call at once that requests are refused, and the table says
how long those took that were not, whether every answer was right, and what memory did. Only addresses of this machine
are taken.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from urllib.parse import urlsplit

TEXTS = [
    "Pooling models turn a text into one vector, and a server of them should spend its time in the model.",
    "A cat sat on a mat.",
    "Overload is refused with 429, and what was accepted is answered.",
]
_MALFORMED = (b'{"input": "\xff"}', b"[" * 20_000, b'{"input": 3}', b"", b'{"input": ["a", null]}')


@dataclass
class Outcome:
    """What came of the requests of one kind."""

    statuses: Counter[int] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    wrong: int = 0
    without_retry_after: int = 0

    def percentile(self, share: float) -> float:
        """Of the seconds that answered requests took."""
        ordered = sorted(self.seconds)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


@dataclass(frozen=True)
class Reply:
    """A response."""

    status: int
    head: str
    body: bytes


async def call(host: str, port: int, body: bytes, *, path: str = "/v1/embeddings", leave_after: float = 0) -> Reply:
    """One request over a connection of its own; `leave_after` seconds, if any, are all that is waited."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()
        if leave_after:
            await asyncio.sleep(leave_after)
            return Reply(0, "", b"")
        received = await reader.read()
        top, _, rest = received.partition(b"\r\n\r\n")
        return Reply(int(top.split(b" ", 2)[1]), top.decode("latin-1").lower(), rest)
    finally:
        writer.close()


async def storm(address: str, *, clients: int, seconds: float, leaving: float, malformed: float) -> dict[str, Outcome]:
    """Calls from many clients at once.

    Args:
        address: Of the server.
        clients: How many.
        seconds: For how long.
        leaving, malformed: Shares of requests whose client leaves, and that are no request.
    """
    parts = urlsplit(address)
    host, port = parts.hostname or "", parts.port or 80
    expected = [await call(host, port, _body(text)) for text in TEXTS]
    rows = [_row(reply) for reply in expected]
    outcomes = {name: Outcome() for name in ("good", "malformed", "left")}
    end = time.monotonic() + seconds
    dice = random.Random(0)

    async def client() -> None:
        while time.monotonic() < end:
            roll, number = dice.random(), dice.randrange(len(TEXTS))
            if roll < leaving:
                await call(host, port, _body(TEXTS[number]), leave_after=dice.random() * 0.05)
                outcomes["left"].statuses[0] += 1
            elif roll < leaving + malformed:
                reply = await call(host, port, dice.choice(_MALFORMED))
                outcomes["malformed"].statuses[reply.status] += 1
            else:
                await _good(number)

    async def _good(number: int) -> None:
        began = time.perf_counter()
        reply = await call(host, port, _body(TEXTS[number]))
        found = outcomes["good"]
        found.statuses[reply.status] += 1
        if reply.status == 200:
            found.seconds.append(time.perf_counter() - began)
            row = _row(reply)
            found.wrong += len(row) != len(rows[number]) or any(
                abs(a - b) > 0.02 for a, b in zip(row, rows[number], strict=True)
            )
        elif reply.status == 429:
            found.without_retry_after += "retry-after:" not in reply.head
            await asyncio.sleep(0.01)

    await asyncio.gather(*(client() for _ in range(clients)))
    return outcomes


def _body(text: str) -> bytes:
    return json.dumps({"input": text}).encode()


def _row(reply: Reply) -> list[float]:
    vector: list[float] = json.loads(reply.body)["data"][0]["embedding"]
    return vector


async def counters(address: str) -> dict[str, float]:
    """What /metrics says."""
    parts = urlsplit(address)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    writer.write(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    text = (await reader.read()).decode()
    writer.close()
    return {
        name: float(value) for name, value in re.findall(r"^([a-z_:]+(?:\{.*\})?) ([\d.e+-]+)$", text, re.MULTILINE)
    }


async def settled(address: str, *, timeout_s: float) -> bool:
    """Whether nothing waits or runs any more, within some time."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        found = await counters(address)
        if found["te_queue_size"] == 0 and found["anypool_http_requests_running"] <= 1:
            return True
        await asyncio.sleep(0.1)
    return False


async def _main(arguments: argparse.Namespace) -> int:
    calm = await storm(arguments.server, clients=1, seconds=5, leaving=0, malformed=0)
    storms = await storm(
        arguments.server, clients=arguments.clients, seconds=arguments.seconds, leaving=0.1, malformed=0.1
    )
    is_settled = await settled(arguments.server, timeout_s=30)
    print("| requests | statuses | p50 ms | p99 ms | wrong |\n| --- | --- | --- | --- | --- |")
    for name, one in {"good, without load": calm["good"], **storms}.items():
        p50, p99 = 1000 * one.percentile(0.5), 1000 * one.percentile(0.99)
        print(f"| {name} | {dict(sorted(one.statuses.items()))} | {p50:.1f} | {p99:.1f} | {one.wrong} |")
    print(f"\nidle afterwards: {is_settled}; 429 without Retry-After: {storms['good'].without_retry_after}")
    return 0 if is_settled else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("server", help="address of anypool")
    parser.add_argument("--clients", type=int, default=400, choices=range(1, 1001), metavar="1..1000")
    parser.add_argument("--seconds", type=int, default=60, choices=range(1, 301), metavar="1..300")
    arguments = parser.parse_args()
    if urlsplit(arguments.server).hostname not in ("127.0.0.1", "localhost"):
        parser.error(f"{arguments.server} is not on this machine")
    return asyncio.run(_main(arguments))


if __name__ == "__main__":
    sys.exit(main())
