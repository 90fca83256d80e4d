"""The examples run, and say what they promise. `demo.py` loads a larger model: `scripts/demo` runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tests.helpers import assert_close, loaded

ROOT = Path(__file__).parents[1]


def example(name: str, *argv: str) -> str:
    """What an example prints."""
    return subprocess.run(
        [sys.executable, str(ROOT / "examples" / name), *argv],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
        capture_output=True,
        text=True,
    ).stdout


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("own_causal_lm.py", ["GruForEmbedding serves embed", "LM head: None", "normalised: True"]),
        ("own_pooler.py", ["the new checkpoint runs as GatedBertModel", "a gate of zeros is the mean: True"]),
        ("colbert_search.py", ["vectors kept of each document:", "  Bread rises because yeast", "all vectors: [0, 3"]),
        ("bulk_search.py", ["4 rows of 2 files, with 384 numbers each", "best: sea/1 ("]),
        ("splade.py", ["words have a weight in the query", "as sentence-transformers has them: True"]),
        ("bge_m3_hybrid.py", ["serves embed, token_embed, sparse_embed", "5 words with a weight", "best by fused"]),
        ("colpali_picture.py", ["64 of them of patches", "page 1: ", "best patches: True", "wrote patches.png"]),
        ("own_head.py", ["serves embed, token_embed, classify", "as torch computes it: True"]),
    ],
)
def test_example_prints_what_it_promises(name: str, words: list[str]) -> None:
    printed = example(name)
    assert [word for word in words if word not in printed] == []


def test_trained_classifier_is_better_and_loads_elsewhere(tmp_path: Path) -> None:
    before, after = (
        int(line.split("%")[0].split()[-1]) for line in example("train_classifier.py", str(tmp_path)).splitlines()
    )
    assert before <= 70
    assert after >= 90
    texts = ["Slice the onions.", "Restart the computer."]
    with loaded(tmp_path) as llm:
        outputs = llm.classify(texts, use_tqdm=False)
    assert [output.outputs.label for output in outputs] == ["cooking", "computing"]
    batch = AutoTokenizer.from_pretrained(tmp_path)(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        logits_NC = AutoModelForSequenceClassification.from_pretrained(tmp_path)(**batch).logits
    assert_close(torch.stack([output.outputs.data for output in outputs]), logits_NC.softmax(dim=-1))
