"""What every backbone class offers, and how classes are told apart."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from anypool.model_executor.attention import AttentionMetadata
from anypool.model_executor.model_config import ModelConfig
from anypool.model_executor.stages import Stages
from anypool.model_executor.weights.checkpoint import Checkpoint
from anypool.model_executor.weights.loading import Renames, load_weights, materialize


class Backbone(nn.Module):
    """Base of all backbones: packed tokens in, hidden states out.

    A class of a user's own need not derive from it: `register_model` takes any `nn.Module` class that is built from a
    `ModelConfig` and has this `forward`; `load_weights` below is used for it where it has none.

    Class attributes:
        attn_type: "decoder" or "encoder_only".
        default_pooling_type: Pooling type where neither the user nor the checkpoint says one.
        checkpoint_renames: Regular expressions that turn checkpoint names into parameter names.
        checkpoint_view: What gives a checkpoint's tensors as the class names them, where renaming is not enough.
        ignored_checkpoint_names: Regular expressions of tensors that a checkpoint may hold and nobody needs.
        has_attention_bias: Whether a table is added to the scores of every layer.
        gives_layers: Whether `forward` takes `output_layers`.
        lora_tables: Names of tables beside that of words whose rows adapters may change: all are looked up.
        mixes_adapters: Whether the texts of a batch may have different LoRA adapters: every linear layer sees the
            packed rows of the batch, in their order. Where nobody says so, a batch has one adapter.
        can_split: Whether several processes may hold a model together: its layers say how they are split, and its
            attention computes the heads of this process (`layers.split`).
        stages: How `forward` may be cut into pipeline stages: given `intermediate`, it begins with the layers. None for
            classes that cannot be cut.
        image_input: How images come into a prompt, for classes whose `forward` takes `images`, one entry per sequence:
            "tower" for an image in place of a text, "page" for an image with a text of the model's own around it,
            "inline" for images anywhere in a text. None for classes that read text alone.

    Attributes:
        takes_prefix: Whether a prompt may be run in chunks, each attending to the cached keys of those before it:
            every layer that mixes tokens goes through `Attention`, once per forward and in the same order, and is
            causal. A class or an instance says so; False where nobody does.
        takes_fewer_keys: Whether some tokens of a prompt may attend to others without being attended to: every layer
            that mixes tokens goes through `Attention`. False where nobody says so.
        can_capture: Whether `forward` asks nothing of the host that depends on the batch, such as `attn.lengths`, and
            never waits for the device, so that a CUDA graph can hold it. False where nobody says so.
        fills_batches: Whether texts of one token may be added to a batch at next to no cost. False for a class that
            runs texts one by one.
    """

    attn_type: ClassVar[Literal["decoder", "encoder_only"]]
    default_pooling_type: ClassVar[str]
    checkpoint_renames: ClassVar[Renames] = ()
    checkpoint_view: ClassVar[type[Checkpoint] | None] = None
    ignored_checkpoint_names: ClassVar[Sequence[str]] = ()
    has_attention_bias: ClassVar[bool] = False
    gives_layers: ClassVar[bool] = False
    lora_tables: ClassVar[Sequence[str]] = ()
    mixes_adapters: ClassVar[bool] = False
    can_split: ClassVar[bool] = False
    stages: ClassVar[Stages | None] = None
    image_input: ClassVar[Literal["tower", "page", "inline"] | None] = None

    takes_prefix: bool = False
    takes_fewer_keys: bool = False
    can_capture: bool = False
    fills_batches: bool = True
    config: ModelConfig

    def forward(
        self,
        input_ids_T: torch.Tensor | None,
        positions_T: torch.Tensor,
        attn: AttentionMetadata,
        *,
        inputs_embeds_TD: torch.Tensor | None = None,
        token_type_ids_T: torch.Tensor | None = None,
        intermediate: torch.Tensor | None = None,
        output_layers: Sequence[int] = (),
    ) -> torch.Tensor:
        """Runs the packed batch.

        Args:
            input_ids_T: `[T]` int64 token ids; None where embeddings are given.
            positions_T: `[T]` int64 positions, counted from 0 per prompt.
            attn: The sequences.
            inputs_embeds_TD: `[T, D]` embeddings in place of the ids.
            token_type_ids_T: `[T]` segment ids, for encoders that have them.
            intermediate: `[T, D]` hidden states of the stage before, in a pipeline: they take the place of embeddings.
            output_layers: Layers whose hidden states are wanted in place of the last ones, in rising order: 0 is what
                the first layer takes, and the last is after the final norm.

        Returns:
            `[T, D]` hidden states after the final norm, or `[len(output_layers), T, D]`.
        """
        raise NotImplementedError


class LayerStates:
    """The hidden states of some layers, kept while they pass.

    Args:
        layers: Their numbers, as `Backbone.forward` has them.
    """

    def __init__(self, layers: Sequence[int]) -> None:
        self.layers = frozenset(layers)
        self.seen = 0
        self.kept: list[torch.Tensor] = []

    def see(self, x_TD: torch.Tensor) -> None:
        """Takes the states of the next layer, which later ones may overwrite."""
        if self.seen in self.layers:
            self.kept.append(x_TD.clone())
        self.seen += 1

    def result(self, last_TD: torch.Tensor) -> torch.Tensor:
        """What `forward` returns, given the states of the last layer."""
        if not self.layers:
            return last_TD
        self.see(last_TD)
        assert len(self.kept) == len(self.layers), "a layer was asked for that there is not"
        return torch.stack(self.kept)


def is_text_generation_model(cls: type) -> bool:
    """Whether a class is a causal LM: it can turn hidden states into logits."""
    return hasattr(cls, "compute_logits") and not is_pooling_model(cls)


def is_encoder_model(cls: type) -> bool:
    """Whether a class is a bidirectional encoder."""
    return getattr(cls, "attn_type", None) == "encoder_only"


def is_pooling_model(cls: type) -> bool:
    """Whether a class has a pooler of its own."""
    return bool(getattr(cls, "is_pooling_model", False))


LM_HEAD_NAMES = (r"^lm_head\.", r"\.lm_head\.", r"^embed_out\.", r"^output\.weight$")


def load_backbone(
    model: nn.Module,
    checkpoint: Checkpoint,
    *,
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    claimed: frozenset[str] = frozenset(),
    elsewhere: frozenset[str] = frozenset(),
    progress: bool = False,
) -> None:
    """Allocates a backbone built on the meta device and fills it. The LM head is neither allocated nor read.

    Args:
        model: The backbone.
        checkpoint: The tensors.
        name: Of the model, for messages.
        device, dtype: Where and in what it runs.
        claimed: Tensors that a head has read already.
        elsewhere: Slots of tensors that other stages read.
        progress: Whether a bar is shown.
    """
    waiting = materialize(model, device=device, dtype=dtype)
    cls: Any = type(model)
    view: Any = getattr(cls, "checkpoint_view", None)
    load_weights(
        model,
        checkpoint if view is None else view(checkpoint),
        name=name,
        renames=getattr(cls, "checkpoint_renames", ()),
        ignored=(
            *LM_HEAD_NAMES,
            *getattr(cls, "ignored_checkpoint_names", ()),
            *(f"^{re.escape(tensor)}$" for tensor in claimed),
        ),
        only=waiting,
        elsewhere=elsewhere,
        progress=progress,
    )


def refuse_unused(**unused: object) -> None:
    """Raises for a part of the forward signature that a backbone does not implement, so that nothing is dropped."""
    given = [name for name, value in unused.items() if value is not None and value != ()]
    if given:
        raise NotImplementedError(f"this backbone does not take {', '.join(given)}")
