"""Backbones whose module is transformers' own."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from anypool.errors import UnsupportedArchitectureError
from anypool.model_executor.attention import AttentionMetadata
from anypool.model_executor.layers.positions import positions_after_padding
from anypool.model_executor.model_config import ModelConfig
from anypool.model_executor.models.interfaces import Backbone, refuse_unused
from anypool.model_executor.models.transformers_backend.attention import packed_sequences, register_attention
from anypool.model_executor.models.transformers_backend.lengths import LengthRules
from anypool.model_executor.models.transformers_backend.loading import load_module, path_in
from anypool.model_executor.models.transformers_backend.probe import choose_way, exchange_linears, runs_in_chunks
from anypool.model_executor.models.transformers_backend.ways import Way, groups, mask_of, pad
from anypool.model_executor.packed_batch import PackedBatch
from anypool.model_executor.weights.repository import Repository

logger = logging.getLogger(__name__)

Inputs = dict[str, torch.Tensor | None]


class TransformersModel(Backbone):
    """An encoder, that of an encoder-decoder, or a base model without an LM head.

    Attributes:
        model: transformers' module. It comes with its weights in `load`, since transformers converts names while
            loading.
        way: How texts share a run of it.
        rejected: Why each better way was not taken.
        lengths: What it makes of the length of a text.
        module_prefixes: What may stand before the name that a layer has in `model`, in classes that it is a part of.
    """

    attn_type: ClassVar[Literal["decoder", "encoder_only"]] = "encoder_only"
    default_pooling_type = "MEAN"

    way: Way = Way.PACKED
    rejected: tuple[str, ...] = ()
    lengths: LengthRules
    module_prefixes: tuple[str, ...] = ()

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.lm_head: nn.Module | None = None
        self.model: Any = None
        self._accepts: frozenset[str] = frozenset()
        self._position_padding: int | None = None

    def load(
        self,
        repository: Repository,
        *,
        device: torch.device,
        dtype: torch.dtype,
        claimed: frozenset[str] = frozenset(),
        progress: bool = False,
    ) -> None:
        """Loads module and weights through transformers, checks their audit, then tries how texts may share runs.

        Args:
            repository: The checkpoint.
            device, dtype: Where and in what the module runs.
            claimed: Tensors that a head has read already.
            progress: Whether a bar is shown.
        """
        register_attention()
        whole = self.load_whole(repository, dtype=dtype, claimed=claimed, progress=progress)
        self.model = self.text_module(whole.to(device))
        self.module_prefixes = _prefixes(whole, self.model)
        self._accepts = frozenset(inspect.signature(self.model.forward).parameters)
        self._position_padding = _position_padding(self.model)
        self.lengths = LengthRules(self.model)
        probed = choose_way(self, device)
        self.rejected = probed.rejected
        self.takes_prefix = runs_in_chunks(self, probed)
        # A module that passed the probe packed mixes tokens in our attention alone; runs of kinds know nothing of keys.
        self.takes_fewer_keys = self.way is Way.PACKED and self.lengths.treat_all_alike
        self.fills_batches = self.way is Way.PACKED
        if self.way is not Way.PACKED:
            logger.warning("%s runs in %s: %s", self.config.name, self.way.label, "; ".join(self.rejected))
        if not exchange_linears(self, probed):
            logger.info("%s keeps transformers' linear layers", self.config.name)

    def load_whole(self, repository: Repository, *, dtype: torch.dtype, claimed: frozenset[str], progress: bool) -> Any:
        """transformers' module with its weights, on the host. Arguments and errors as for `load`."""
        return load_module(self.config, repository, dtype=dtype, claimed=claimed, progress=progress)

    def text_module(self, whole: Any) -> Any:
        """The part of a loaded module that turns tokens into hidden states. A subclass may keep the rest."""
        return whole

    def embed_input_ids(self, input_ids_T: torch.Tensor) -> torch.Tensor:
        """`[T, D]` what `inputs_embeds_TD` stands for, so that rows of it can be exchanged."""
        embedded_TD: torch.Tensor = self.model.get_input_embeddings()(input_ids_T)
        return embedded_TD

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
        refuse_unused(intermediate=intermediate, output_layers=tuple(output_layers))
        if token_type_ids_T is not None and "token_type_ids" not in self._accepts:
            refuse_unused(token_type_ids_T=token_type_ids_T)
        if self._position_padding is not None:
            padding = self._position_padding
            positions_T = positions_after_padding(input_ids_T, positions_T, attn, padding_id=padding)
        inputs: Inputs = {
            "input_ids": input_ids_T if inputs_embeds_TD is None else None,
            "position_ids": positions_T,
            "inputs_embeds": inputs_embeds_TD,
            "token_type_ids": token_type_ids_T,
        }
        if self.lengths.treat_all_alike:
            return self._forward(attn, inputs)
        return self._by_kind(attn, inputs)

    def _by_kind(self, attn: AttentionMetadata, inputs: Inputs) -> torch.Tensor:
        """Runs texts apart that the module treats differently for their length."""
        kinds = [self.lengths.kind(length) for length in attn.lengths]
        states: list[torch.Tensor] = [torch.empty(0)] * len(kinds)
        for kind in sorted(set(kinds)):
            members = [i for i, own in enumerate(kinds) if own == kind]
            own = AttentionMetadata.from_lengths(tuple(attn.lengths[i] for i in members), attn.cu_seqlens.device)
            self.lengths.prepare(own.max_length)
            states_TD = self._forward(own, _only(inputs, attn, members))
            for i, states_LD in zip(members, states_TD.split(own.lengths), strict=True):
                states[i] = states_LD
        return torch.cat(states)

    def _forward(self, attn: AttentionMetadata, inputs: Inputs) -> torch.Tensor:
        if self.way is not Way.PACKED:
            return self._in_batches(attn, inputs)
        if "position_ids" not in self._accepts:
            raise UnsupportedArchitectureError("its forward takes no position_ids")
        # Positions may have several axes, of which tokens are the last.
        row = {name: x.unsqueeze(-2 if name == "position_ids" else 0) for name, x in inputs.items() if x is not None}
        with packed_sequences(attn) as calls:
            hidden_TD = self._run(row)[0]
        if calls[0] == 0:
            raise UnsupportedArchitectureError("its attention does not go through transformers' attention interface")
        return hidden_TD

    def _in_batches(self, attn: AttentionMetadata, inputs: Inputs) -> torch.Tensor:
        """Runs texts in batches that the module may have. It counts positions by itself, as it does for one text."""
        states: list[torch.Tensor] = [torch.empty(0)] * len(attn.lengths)
        for members in groups(attn.lengths, self.way):
            group = self._run_group(_texts(inputs, attn, members))
            for i, states_LD in zip(members, group, strict=True):
                states[i] = states_LD
        return torch.cat(states)

    def _run_group(self, texts: dict[str, list[torch.Tensor]]) -> list[torch.Tensor]:
        """`[length, D]` per text, out of one batch."""
        lengths = [len(text) for text in next(iter(texts.values()))]
        batch = {name: pad(rows, self._padding_id if name == "input_ids" else 0) for name, rows in texts.items()}
        if "attention_mask" in self._accepts:
            batch["attention_mask"] = mask_of(lengths, next(iter(batch.values())).device)
        states_NLD = self._run(batch)
        return [states_LD[:length] for states_LD, length in zip(states_NLD, lengths, strict=True)]

    @property
    def _padding_id(self) -> int:
        pad_id = self.config.pad_token_id
        return pad_id if pad_id is not None and 0 <= pad_id < self.config.vocab_size else 0

    def run_text(self, ids_L: torch.Tensor) -> torch.Tensor:
        """`[L, D]` of a text by itself, as transformers has it."""
        self.lengths.prepare(len(ids_L))
        return self._run_group({"input_ids": [ids_L]})[0]

    def run_together(self, batch: PackedBatch) -> torch.Tensor:
        """`[T, D]` of a batch as `forward` has it, but with all texts in one padded batch where they are padded."""
        if self.way is not Way.PADDED:
            states_TD: torch.Tensor = self(batch.input_ids_T, batch.positions_T, batch.attn)
            return states_TD
        self.lengths.prepare(batch.attn.max_length)
        return torch.cat(self._run_group({"input_ids": list(batch.input_ids_T.split(batch.attn.lengths))}))

    def _run(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """`[N, L, D]` last hidden states."""
        options = {"use_cache": False} if "use_cache" in self._accepts else {}
        last: torch.Tensor = self.model(**inputs, **options, return_dict=True).last_hidden_state
        return last


class TransformersForCausalLM(TransformersModel):
    """A causal LM. The LM head is transformers' own and is not loaded for pooling."""

    attn_type = "decoder"
    default_pooling_type = "LAST"

    def build_lm_head(self) -> nn.Module | None:
        """The output projection of this architecture; a pooling subclass builds none."""
        raise NotImplementedError("this engine does not generate text, so transformers' LM heads are never built")

    def compute_logits(self, hidden_TD: torch.Tensor) -> torch.Tensor:
        """`[T, V]` logits of the next token."""
        head = self.lm_head if self.lm_head is not None else self.build_lm_head()
        assert head is not None
        logits_TV: torch.Tensor = head(hidden_TD)
        return logits_TV


class TransformersForConditionalGeneration(TransformersForCausalLM):
    """The language model of a model of text and images, or of other things that are not text.

    Text runs through `model`, the language model. `whole` is what it is a part of: `VisionLanguageModel` runs prompts
    with images through that.
    """

    def text_module(self, whole: Any) -> Any:
        self.whole = [whole]  # in a list, so that its parameters are counted once
        return whole.get_decoder()


def is_causal_family(model_type: str) -> bool:
    """Whether transformers knows the family as causal LMs and not as masked ones."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    )

    return model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and model_type not in MODEL_FOR_MASKED_LM_MAPPING_NAMES


def kind_of(architecture: str) -> Literal["causal", "encoder"] | None:
    """What transformers lists a class as; None for one that it lists as neither."""
    from transformers.models.auto import modeling_auto as auto

    def lists(names: Mapping[str, str | Sequence[str]]) -> bool:
        return any(architecture in ((name,) if isinstance(name, str) else name) for name in names.values())

    is_multimodal = architecture.endswith("ForConditionalGeneration")
    if lists(auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES):
        return "encoder"
    if lists(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) and not is_multimodal:
        return "causal"
    if lists(auto.MODEL_MAPPING_NAMES) or lists(auto.MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES):
        return "encoder"
    return None


def _only(inputs: Inputs, attn: AttentionMetadata, members: list[int]) -> Inputs:
    """The rows of some texts."""
    return {
        name: None if x is None else torch.cat([x.split(attn.lengths)[i] for i in members])
        for name, x in inputs.items()
    }


def _texts(inputs: Inputs, attn: AttentionMetadata, members: list[int]) -> dict[str, list[torch.Tensor]]:
    """The rows of some texts, one by one, without positions."""
    split = {name: x.split(attn.lengths) for name, x in inputs.items() if x is not None and name != "position_ids"}
    return {name: [rows[i] for i in members] for name, rows in split.items()}


def _prefixes(whole: Any, part: Any) -> tuple[str, ...]:
    """What stands before the names of a part's layers in the class that was loaded, and in classes with a head.

    Those have the base model under a name of its family. The part of a class with a head begins with it already.
    """
    path = ".".join(filter(None, (getattr(whole, "anypool_path", ""), path_in(whole, part))))
    family = str(getattr(part, "base_model_prefix", "") or "model")
    bare = path.removeprefix(family).removeprefix(".") if f"{path}.".startswith(f"{family}.") else path
    found = [bare, f"{family}.{bare}" if bare else family, path]
    return tuple(dict.fromkeys(f"{one}." if one else "" for one in sorted(found, key=len, reverse=True)))


def _position_padding(model: Any) -> int | None:
    """The padding id after which RoBERTa-like embeddings count positions; they expect explicit ones to do so too."""
    embeddings = getattr(model, "embeddings", None)
    if embeddings is not None and hasattr(embeddings, "create_position_ids_from_input_ids"):
        return int(embeddings.padding_idx)
    return None
