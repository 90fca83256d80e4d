"""Language models that read images: `*ForConditionalGeneration` and `*ForRetrieval`, run by transformers' modules.

Texts share runs as in any model of the Transformers backend. A prompt with images runs by itself, through transformers'
own forward: its positions may have three axes (M-RoPE), and its image tokens may see one another in both directions.
What the vision tower gives is kept, so that an image that comes again costs only the language model's part.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch

from anypool.model_executor.attention import AttentionMetadata
from anypool.model_executor.images import FeatureCache, ImageInputs
from anypool.model_executor.model_config import ModelConfig
from anypool.model_executor.models.interfaces import refuse_unused
from anypool.model_executor.models.sequences import some_sequences
from anypool.model_executor.models.transformers_backend import TransformersForConditionalGeneration
from anypool.model_executor.models.transformers_backend.loading import load_whole
from anypool.model_executor.weights.repository import Repository
from anypool.pooling.pooler import DispatchPooler, TokenEmbedPooler
from anypool.pooling.tasks import PoolingTask

# Per token what is an image, and in PaliGemma's case what is no suffix; all zeros for a text.
_TYPES = ("token_type_ids",)
_IMAGE_TOKENS = ("image_token_id", "image_token_index", "boi_token_index")


class VisionLanguageForConditionalGeneration(TransformersForConditionalGeneration):
    """Any `*ForConditionalGeneration` with a vision tower: Qwen2-VL, PaliGemma, LLaVA, Idefics3 and their like.

    Attributes:
        features: What the vision tower made of images that were seen lately.
    """

    image_input: ClassVar[Literal["tower", "page", "inline"] | None] = "inline"

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.features = FeatureCache()
        self._of_prompt: ImageInputs | None = None

    def load(self, repository: Repository, **options: Any) -> None:
        """As `Backbone.load`. Prompts run whole: cached keys are found by token ids, which say nothing of images."""
        super().load(repository, **options)
        self.takes_prefix = self.takes_fewer_keys = False

    def text_module(self, whole: Any) -> Any:
        self._whole_accepts = frozenset(inspect.signature(whole.forward).parameters)
        model = super().text_module(whole)
        self._keep_features()
        return model

    @property
    def image_token_ids(self) -> tuple[int, ...]:
        """The token in whose places an image stands, and what a text has in its place where that is another."""
        [whole] = self.whole
        found = (getattr(whole.config, name, None) for name in _IMAGE_TOKENS)
        return tuple(token for token in found if token is not None)

    @property
    def patch_size(self) -> int | None:
        """Side of the vision tower's patches in pixels, where they are squares of one size."""
        [whole] = self.whole
        size = getattr(getattr(whole.config, "vision_config", None), "patch_size", None)
        return size if isinstance(size, int) else None

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
        """As `Backbone.forward`; `images` are those of each sequence, which stand in its image tokens' places."""
        if all(one is None for one in images):
            return super().forward(
                input_ids_T,
                positions_T,
                attn,
                inputs_embeds_TD=inputs_embeds_TD,
                token_type_ids_T=token_type_ids_T,
                intermediate=intermediate,
                output_layers=output_layers,
            )
        refuse_unused(
            inputs_embeds_TD=inputs_embeds_TD,
            token_type_ids_T=token_type_ids_T,
            intermediate=intermediate,
            output_layers=tuple(output_layers),
        )
        assert input_ids_T is not None
        states = list(input_ids_T.split(attn.lengths))
        texts = [i for i in range(len(states)) if i >= len(images) or images[i] is None]
        if texts:
            ids_T, places_T, group = some_sequences(input_ids_T, positions_T, attn, texts)
            for i, states_LD in zip(texts, super().forward(ids_T, places_T, group).split(group.lengths), strict=True):
                states[i] = states_LD
        for i, one in enumerate(images):
            if one is not None:
                states[i] = self._alone(states[i], one)
        return torch.cat(states)

    def run_text(self, ids_L: torch.Tensor) -> torch.Tensor:
        """As the whole model has it, which decides what of a text is seen in both directions."""
        return self._alone(ids_L, None)

    def _alone(self, input_ids_L: torch.Tensor, images: ImageInputs | None) -> torch.Tensor:
        """`[L, D]` states of one prompt by transformers' own forward."""
        [whole] = self.whole
        device = input_ids_L.device
        ids = input_ids_L.unsqueeze(0)
        inputs: dict[str, torch.Tensor] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if images is None:
            inputs |= {name: torch.zeros_like(ids) for name in _TYPES if name in self._whole_accepts}
        else:
            inputs |= {name: types.unsqueeze(0).to(device) for name, types in images.by_token.items()}
            inputs |= {name: self._on_device(tensor) for name, tensor in images.tensors.items()}
            if "mm_token_type_ids" in self._whole_accepts and "mm_token_type_ids" not in inputs:
                inputs["mm_token_type_ids"] = ids.eq(self.image_token_ids[0]).int()
        self._of_prompt = images
        try:
            states_LD: torch.Tensor = whole(**inputs, use_cache=False)[0][0]
        finally:
            self._of_prompt = None
        return states_LD

    def _on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        [whole] = self.whole
        tensor = tensor.to(whole.device)
        return tensor.to(whole.dtype) if tensor.is_floating_point() else tensor

    def _keep_features(self) -> None:
        """Puts the cache between the module's forward and its vision tower."""
        [whole] = self.whole
        tower = whole.get_image_features
        signature = inspect.signature(tower)

        def through_cache(*args: Any, **kwargs: Any) -> Any:
            asked = dict(signature.bind(*args, **kwargs).arguments)
            asked |= asked.pop("kwargs", {})

            def compute(parts: Sequence[ImageInputs]) -> list[Any]:
                return [_trimmed(tower(**asked | self._own(part, asked))) for part in parts]

            assert self._of_prompt is not None, "the vision tower runs for a prompt"
            return self._features(self._of_prompt, compute)

        whole.get_image_features = through_cache

    def _own(self, part: ImageInputs, asked: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        return {name: self._on_device(tensor) for name, tensor in part.tensors.items() if name in asked}

    def _features(self, images: ImageInputs, compute: Callable[[Sequence[ImageInputs]], list[Any]]) -> Any:
        """What the tower gives for a prompt's images, each computed by itself where the results can be joined."""
        outputs = self.features.get(images.each, compute)
        if len(outputs) == 1:
            return outputs[0]
        if any(set(output) != {"pooler_output"} for output in outputs):
            return self.features.get((images,), compute)[0]
        pooled = [output["pooler_output"] for output in outputs]
        joined = torch.cat(pooled) if isinstance(pooled[0], torch.Tensor) else [one for part in pooled for one in part]
        return type(outputs[0])(pooler_output=joined)


class RetrievalModel(VisionLanguageForConditionalGeneration):
    """A `*ForRetrieval`: a vector per token of a query, or of a page's image, compared by MaxSim.

    Faysse et al., arXiv:2407.01449.

    Attributes:
        embedding_size: Length of the vectors.
        projection: The linear layer after the language model.
    """

    image_input = "page"
    is_pooling_model: ClassVar[bool] = True
    processes_texts: ClassVar[bool] = True
    score_type: ClassVar[str] = "late-interaction"

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.embedding_size = int(config.raw.get("embedding_dim") or 128)
        self.projection: Any = None
        self.pooler = DispatchPooler({PoolingTask.TOKEN_EMBED: TokenEmbedPooler()})

    def load_whole(self, repository: Repository, *, dtype: torch.dtype, claimed: frozenset[str], progress: bool) -> Any:
        whole = load_whole(
            self.config, repository, self.config.architecture, dtype=dtype, claimed=claimed, progress=progress
        )
        self._loaded_projection = [whole.embedding_proj_layer]
        whole.vlm.anypool_path = "vlm"
        return whole.vlm

    def load(self, repository: Repository, **options: Any) -> None:
        """As `Backbone.load`. How texts share runs is tried without the layer, which comes last."""
        super().load(repository, **options)
        self.projection = self._loaded_projection.pop().to(options["device"])

    def forward(self, *inputs: Any, **options: Any) -> torch.Tensor:
        """`[T, E]` vectors, not yet normalised."""
        states_TD = super().forward(*inputs, **options)
        vectors_TE: torch.Tensor = states_TD if self.projection is None else self.projection(states_TD)
        return vectors_TE


class ColPaliForRetrieval(RetrievalModel):
    """ColPali: PaliGemma, in which a query's tokens see one another in both directions, as an image's do."""


class ColQwen2ForRetrieval(RetrievalModel):
    """ColQwen2: Qwen2-VL. Image tokens have positions of three axes, as in training.

    transformers' own class gives them plain positions unless `position_ids` are passed.
    """


class ColModernVBertForRetrieval(RetrievalModel):
    """ColModernVBERT: an Idefics3-like model over ModernBERT. Teiletche et al., arXiv:2510.01149."""


def _trimmed(output: Any) -> Any:
    """What the tower gives to the language model, without states that nobody reads any more."""
    unread = ("last_hidden_state", "hidden_states", "attentions")
    return type(output)(**{name: value for name, value in output.items() if name not in unread})
