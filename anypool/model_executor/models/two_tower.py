"""CLIP and SigLIP: a text tower and an image tower into one space, run by transformers' modules.

Texts run packed, images in one batch per size. The state of a sequence's last token is its embedding, so that a text of
so many tokens and an image of so many patches are pooled alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from anypool.model_executor.attention import AttentionMetadata
from anypool.model_executor.images import FeatureCache, ImageInputs
from anypool.model_executor.model_config import ModelConfig
from anypool.model_executor.models.interfaces import Backbone, refuse_unused
from anypool.model_executor.models.sequences import some_sequences
from anypool.model_executor.models.transformers_backend.attention import (
    PACKED_ATTENTION,
    packed_sequences,
    register_attention,
)
from anypool.model_executor.models.transformers_backend.loading import load_whole
from anypool.model_executor.weights.repository import Repository
from anypool.pooling.methods import PoolingType
from anypool.pooling.pooler import DispatchPooler, EmbedPooler
from anypool.pooling.tasks import PoolingTask

# Images in one batch of the tower.
_IMAGES_AT_ONCE = 32


class TwoTowerModel(Backbone):
    """A pooling model of two towers.

    Attributes:
        embedding_size: Length of the vectors.
        features: What the image tower made of images that were seen lately.
    """

    attn_type = "encoder_only"
    default_pooling_type = "LAST"
    image_input = "tower"
    is_pooling_model: ClassVar[bool] = True
    default_normalize: ClassVar[bool] = True
    texts_are_causal: ClassVar[bool]

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model: Any = None  # comes with its weights in `load`
        self.embedding_size = self._embedding_size(config.raw)
        self.features = FeatureCache()
        self.pooler = DispatchPooler({PoolingTask.EMBED: EmbedPooler((PoolingType.LAST,))})

    def _embedding_size(self, raw: Mapping[str, Any]) -> int:
        raise NotImplementedError

    def load(
        self,
        repository: Repository,
        *,
        device: torch.device,
        dtype: torch.dtype,
        claimed: frozenset[str] = frozenset(),
        progress: bool = False,
    ) -> None:
        """Loads both towers through transformers.

        Args:
            repository: The checkpoint.
            device, dtype: Where and in what they run.
            claimed: Tensors that a head has read already.
            progress: Whether a bar is shown.
        """
        register_attention()
        whole = load_whole(
            self.config,
            repository,
            "AutoModel",
            dtype=dtype,
            claimed=claimed,
            progress=progress,
            attn_implementation=PACKED_ATTENTION,
        )
        self.model = whole.to(device)

    @property
    def patch_size(self) -> int:
        """Side of the vision tower's patches in pixels."""
        return int(self.config.raw["vision_config"].get("patch_size", 16))

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
        images: Sequence[ImageInputs | None] = (),
    ) -> torch.Tensor:
        """`[T, E]` with the embedding of each sequence at its last token, and zeros elsewhere."""
        refuse_unused(inputs_embeds_TD=inputs_embeds_TD, intermediate=intermediate, output_layers=tuple(output_layers))
        assert input_ids_T is not None
        last_N = attn.cu_seqlens[1:].long() - 1
        out_TE = torch.zeros(len(positions_T), self.embedding_size, dtype=self.model.dtype, device=positions_T.device)
        of = dict(enumerate(images))
        pictures = [i for i, one in of.items() if one is not None]
        texts = [i for i in range(len(attn.lengths)) if of.get(i) is None]
        if texts:
            ids, positions, group = some_sequences(input_ids_T, positions_T, attn, texts)
            out_TE[last_N[texts]] = self._texts(ids, positions, group).to(out_TE.dtype)
        if pictures:
            seen = [one for one in images if one is not None]
            out_TE[last_N[pictures]] = torch.stack(self.features.get(seen, self._images))
        return out_TE

    def _texts(self, input_ids_T: torch.Tensor, positions_T: torch.Tensor, attn: AttentionMetadata) -> torch.Tensor:
        """`[N, E]` embeddings of packed texts."""
        raise NotImplementedError

    def _states(self, input_ids_T: torch.Tensor, positions_T: torch.Tensor, attn: AttentionMetadata) -> torch.Tensor:
        """`[T, D]` states of packed texts after the final norm.

        The tower's own forward takes a packed row for one text that is too long, so its parts are called.
        """
        tower = self.model.text_model
        embedded_TD = tower.embeddings.token_embedding(input_ids_T) + tower.embeddings.position_embedding(positions_T)
        with packed_sequences(attn):
            output = tower.encoder(
                inputs_embeds=embedded_TD.unsqueeze(0), attention_mask=None, is_causal=self.texts_are_causal
            )
        states_TD: torch.Tensor = tower.final_layer_norm(output.last_hidden_state[0])
        return states_TD

    def _images(self, images: list[ImageInputs]) -> list[torch.Tensor]:
        by_shape: dict[tuple[int, ...], list[int]] = {}
        for index, one in enumerate(images):
            by_shape.setdefault(tuple(one.tensors["pixel_values"].shape), []).append(index)
        found: dict[int, torch.Tensor] = {}
        for alike in by_shape.values():
            for start in range(0, len(alike), _IMAGES_AT_ONCE):
                some = alike[start : start + _IMAGES_AT_ONCE]
                tensors = {
                    name: torch.cat([images[i].tensors[name] for i in some]).to(self.model.device)
                    for name in images[some[0]].tensors
                }
                tensors["pixel_values"] = tensors["pixel_values"].to(self.model.dtype)
                found |= zip(
                    some, self.model.get_image_features(**tensors, return_dict=True).pooler_output, strict=True
                )
        return [found[i].clone() for i in range(len(images))]


class CLIPModel(TwoTowerModel):
    """CLIP: a causal text tower, pooled at the end-of-text token. Radford et al., arXiv:2103.00020."""

    texts_are_causal = True

    def _embedding_size(self, raw: Mapping[str, Any]) -> int:
        return int(raw.get("projection_dim") or 512)

    def _texts(self, input_ids_T: torch.Tensor, positions_T: torch.Tensor, attn: AttentionMetadata) -> torch.Tensor:
        states_TD = self._states(input_ids_T, positions_T, attn)
        # Checkpoints of before the end-of-text token was named right say 2, and mean the highest id.
        eos = self.model.text_model.eos_token_id
        starts = attn.cu_seqlens[:-1].tolist()
        rows = [
            start + int((ids if eos == 2 else (ids == eos).int()).argmax())
            for start, ids in zip(starts, input_ids_T.split(attn.lengths), strict=True)
        ]
        pooled_NE: torch.Tensor = self.model.text_projection(states_TD[rows])
        return pooled_NE


class SiglipModel(TwoTowerModel):
    """SigLIP and SigLIP 2: texts are padded to the full length, and attend to the padding.

    The state of the last token, which may be padding, is the text's. Zhai et al., arXiv:2303.15343.
    """

    texts_are_causal = False
    processes_texts: ClassVar[bool] = True

    def _embedding_size(self, raw: Mapping[str, Any]) -> int:
        text, vision = raw.get("text_config") or {}, raw.get("vision_config") or {}
        return int(text.get("projection_size") or text.get("hidden_size") or vision.get("hidden_size") or 768)

    def _texts(self, input_ids_T: torch.Tensor, positions_T: torch.Tensor, attn: AttentionMetadata) -> torch.Tensor:
        states_TD = self._states(input_ids_T, positions_T, attn)
        pooled_NE: torch.Tensor = self.model.text_model.head(states_TD[attn.cu_seqlens[1:].long() - 1])
        return pooled_NE
