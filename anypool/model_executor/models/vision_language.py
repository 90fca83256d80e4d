"""Language models that read images: `*ForConditionalGeneration` and `*ForRetrieval`, run by transformers' modules.

Texts run packed. A prompt with images runs by itself, through transformers' own forward: its positions may have three
axes (M-RoPE), and its image tokens may see one another in both directions. The vision tower's part is kept, so that an
image that comes again costs only the language model's part.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from anypool.model_executor.attention import AttentionMetadata
from anypool.model_executor.images import FeatureCache, ImageInputs
from anypool.model_executor.layers.packing import replace_linears
from anypool.model_executor.model_config import ModelConfig
from anypool.model_executor.models.interfaces import Backbone, refuse_unused
from anypool.model_executor.models.transformers_backend import _RAISED, _difference, _probe_texts, _tolerance
from anypool.model_executor.models.vision_module import load_module, module_batch, packed_text
from anypool.model_executor.packed_batch import PackedBatch
from anypool.model_executor.weights.repository import Repository
from anypool.pooling.pooler import DispatchPooler, TokenEmbedPooler
from anypool.pooling.tasks import PoolingTask

logger = logging.getLogger(__name__)


class VisionLanguageModel(Backbone):
    """A language model with a vision tower.

    Attributes:
        features: What the vision tower made of images that were seen lately.
        packs_texts: Whether texts run packed; where that gives other states than alone they run one by one.
    """

    attn_type = "decoder"
    default_pooling_type = "LAST"
    image_input: ClassVar[Literal["tower", "page", "inline"] | None] = "inline"
    # What the module is given per token of a text, with the value that it has there.
    text_types: ClassVar[tuple[str, ...]] = ()
    texts_are_causal: ClassVar[bool] = True

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.lm_head: nn.Module | None = None
        self.model: Any = None  # comes with its weights in `load`
        self.features = FeatureCache()
        self.packs_texts = True
        self._accepts: frozenset[str] = frozenset()
        self._of_prompt: ImageInputs | None = None

    @property
    def image_token_id(self) -> int | None:
        """The token in whose places an image stands."""
        found = getattr(self.model.config, "image_token_id", None)
        return found if found is not None else getattr(self.model.config, "image_token_index", None)

    def load(
        self,
        repository: Repository,
        *,
        device: torch.device,
        dtype: torch.dtype,
        claimed: frozenset[str] = frozenset(),
        progress: bool = False,
    ) -> None:
        """Loads the module through transformers, then compares packed texts with texts alone.

        Args:
            repository: The checkpoint.
            device, dtype: Where and in what it runs.
            claimed: Tensors that a head has read already.
            progress: Whether a bar is shown.
        """
        self.model = self._load(repository, device, dtype, claimed, progress)
        self._accepts = frozenset(inspect.signature(self.model.forward).parameters)
        self._keep_features()
        texts = _probe_texts(self.config, self.model)
        alone_TD = self._states(texts, device, packed=False)
        assert alone_TD is not None
        self.packs_texts = _are_close(self._states(texts, device, packed=True), alone_TD)
        if not self.packs_texts:
            logger.info("%s runs its texts one by one: packed they have other states", self.config.name)
        restore = replace_linears(self.model.get_decoder())
        if not _are_close(self._states(texts, device, packed=self.packs_texts), alone_TD):
            logger.info("%s keeps transformers' linear layers", self.config.name)
            restore()

    def _load(
        self,
        repository: Repository,
        device: torch.device,
        dtype: torch.dtype,
        claimed: frozenset[str],
        progress: bool,
    ) -> Any:
        """The language model with its vision tower, and no head."""
        return load_module(self.config, repository, device=device, dtype=dtype, claimed=claimed, progress=progress)

    def _states(self, texts: Sequence[Sequence[int]], device: torch.device, *, packed: bool) -> torch.Tensor | None:
        """`[T, D]` states of texts, or None where the module cannot run them."""
        self.packs_texts = packed
        batch = PackedBatch.pack(texts, device=device)
        try:
            with torch.inference_mode():
                return VisionLanguageModel.forward(self, batch.input_ids_T, batch.positions_T, batch.attn)
        except _RAISED as error:
            if not packed:
                raise
            logger.debug("%s: packed: %r", self.config.name, error)
            return None

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
        refuse_unused(
            inputs_embeds_TD=inputs_embeds_TD,
            token_type_ids_T=token_type_ids_T,
            intermediate=intermediate,
            output_layers=tuple(output_layers),
        )
        assert input_ids_T is not None
        of = dict(enumerate(images))
        packed = [i for i in range(len(attn.lengths)) if self.packs_texts and of.get(i) is None]
        if len(packed) == len(attn.lengths):
            return self._packed(input_ids_T, positions_T, attn)
        states_TD = input_ids_T.new_zeros((len(input_ids_T), self.config.hidden_size), dtype=self.model.dtype)
        for i, ids in enumerate(input_ids_T.split(attn.lengths)):
            if i not in packed:
                start = int(attn.cu_seqlens[i])
                states_TD[start : start + len(ids)] = self._alone(ids, of.get(i))
        if packed:
            ids_T, places_T, group, rows_T = packed_text(input_ids_T, positions_T, attn, packed)
            states_TD[rows_T] = self._packed(ids_T, places_T, group)
        return states_TD

    def _packed(self, input_ids_T: torch.Tensor, positions_T: torch.Tensor, attn: AttentionMetadata) -> torch.Tensor:
        causal = {} if self.texts_are_causal else {"is_causal": False}
        with module_batch(attn):
            output = self.model(
                input_ids=input_ids_T.unsqueeze(0), position_ids=positions_T.unsqueeze(0), use_cache=False, **causal
            )
        states_TD: torch.Tensor = output[0][0]
        return states_TD

    def _alone(self, input_ids_L: torch.Tensor, images: ImageInputs | None) -> torch.Tensor:
        """`[L, D]` states of one prompt by transformers' own forward."""
        device = input_ids_L.device
        ids = input_ids_L.unsqueeze(0)
        inputs: dict[str, torch.Tensor] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if images is None:
            inputs |= {name: torch.zeros_like(ids) for name in self.text_types}
        else:
            inputs |= {name: types.unsqueeze(0).to(device) for name, types in images.by_token.items()}
            inputs |= {name: self._on_device(tensor) for name, tensor in images.tensors.items()}
            if "mm_token_type_ids" in self._accepts and "mm_token_type_ids" not in inputs:
                inputs["mm_token_type_ids"] = ids.eq(self.image_token_id or -1).int()
        self._of_prompt = images
        try:
            states_LD: torch.Tensor = self.model(**inputs, use_cache=False)[0][0]
        finally:
            self._of_prompt = None
        return states_LD

    def _on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.to(self.model.device)
        return tensor.to(self.model.dtype) if tensor.is_floating_point() else tensor

    def _keep_features(self) -> None:
        """Puts the cache between the module's forward and its vision tower."""
        tower = self.model.get_image_features
        signature = inspect.signature(tower)

        def through_cache(*args: Any, **kwargs: Any) -> Any:
            asked = dict(signature.bind(*args, **kwargs).arguments)
            asked |= asked.pop("kwargs", {})

            def compute(parts: Sequence[ImageInputs]) -> list[Any]:
                return [_trimmed(tower(**asked | self._own(part, asked))) for part in parts]

            assert self._of_prompt is not None, "the vision tower runs for a prompt"
            return self._features(self._of_prompt, compute)

        self.model.get_image_features = through_cache

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

    def build_lm_head(self) -> nn.Module | None:
        """The output projection; a pooling subclass builds none."""
        raise NotImplementedError("this engine does not generate text, so transformers' LM heads are never built")

    def compute_logits(self, hidden_TD: torch.Tensor) -> torch.Tensor:
        """`[T, V]` logits of the next token."""
        head = self.lm_head if self.lm_head is not None else self.build_lm_head()
        assert head is not None
        logits_TV: torch.Tensor = head(hidden_TD)
        return logits_TV


class TransformersForConditionalGeneration(VisionLanguageModel):
    """Any `*ForConditionalGeneration` with a vision tower: Qwen2-VL, PaliGemma, LLaVA, Idefics3 and their like."""


class RetrievalModel(VisionLanguageModel):
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

    def _load(
        self,
        repository: Repository,
        device: torch.device,
        dtype: torch.dtype,
        claimed: frozenset[str],
        progress: bool,
    ) -> Any:
        module = load_module(
            self.config, repository, device=device, dtype=dtype, progress=progress, cls=self.config.architecture
        )
        self.projection = module.embedding_proj_layer
        return module.vlm

    def forward(
        self, input_ids_T: torch.Tensor | None, positions_T: torch.Tensor, attn: AttentionMetadata, **inputs: Any
    ) -> torch.Tensor:
        """`[T, E]` vectors, not yet normalised."""
        vectors_TE: torch.Tensor = self.projection(super().forward(input_ids_T, positions_T, attn, **inputs))
        return vectors_TE


class ColPaliForRetrieval(RetrievalModel):
    """ColPali: PaliGemma, in which a query's tokens see one another in both directions, as an image's do."""

    text_types = ("token_type_ids",)
    texts_are_causal = False


class ColQwen2ForRetrieval(RetrievalModel):
    """ColQwen2: Qwen2-VL. Image tokens have positions of three axes, as in training.

    transformers' own class gives them plain positions unless `position_ids` are passed.
    """


class ColModernVBertForRetrieval(RetrievalModel):
    """ColModernVBERT: an Idefics3-like model over ModernBERT. Teiletche et al., arXiv:2510.01149."""

    texts_are_causal = False


def _trimmed(output: Any) -> Any:
    """What the tower gives to the language model, without states that nobody reads any more."""
    unread = ("last_hidden_state", "hidden_states", "attentions")
    return type(output)(**{name: value for name, value in output.items() if name not in unread})


def _are_close(states_TD: torch.Tensor | None, others_TD: torch.Tensor) -> bool:
    return states_TD is not None and _difference(states_TD, others_TD) <= _tolerance(others_TD.dtype)
