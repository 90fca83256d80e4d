"""Every architecture that has no native class: transformers' own module, run on the packed batch.

The module runs with a batch of one row, explicit positions and no mask, and its attention layers call our function
through transformers' attention interface, which attends within the sequences. Whether an architecture gives its own
numbers that way is not guessed: a short probe at load time compares packed with unpacked and refuses on a difference.
Another one compares a text in two chunks with the whole text: `takes_prefix` says whether they are equal.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import re
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from anypool.errors import EngineError, MissingDependencyError, UnsupportedArchitectureError, WeightsError
from anypool.model_executor.attention import Attention, AttentionMetadata, PrefixKeys
from anypool.model_executor.attention.layer import window_of
from anypool.model_executor.kv_store import KVStore
from anypool.model_executor.layers.packing import replace_linears
from anypool.model_executor.layers.positions import positions_after_padding
from anypool.model_executor.model_config import ModelConfig
from anypool.model_executor.models.interfaces import Backbone, refuse_unused
from anypool.model_executor.packed_batch import PackedBatch
from anypool.model_executor.weights.repository import Repository

logger = logging.getLogger(__name__)

ATTENTION = "anypool_packed"

# The sequences of the batch that is running, and how often an attention layer asked for them.
_running: ContextVar[tuple[AttentionMetadata, list[int]] | None] = ContextVar("anypool_packed_batch", default=None)


def packed_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    position_bias: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function over a packed row: `[1, H, T, K]` in, `[1, T, H, K]` out."""
    running = _running.get()
    if running is None or query.shape[0] != 1 or key.shape[2] != query.shape[2] or position_bias is not None:
        raise UnsupportedArchitectureError(
            f"{type(module).__name__} calls attention in a way that a packed batch does not allow"
        )
    attn, calls = running
    calls[0] += 1
    config = getattr(module, "config", None)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if getattr(config, "is_causal", True) is False:
        causal = False
    attend = Attention(
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=window_of(causal=causal, sliding=sliding_window),
        softcap=softcap,
    )
    q_THK, k_TGK, v_TGK = (x[0].transpose(0, 1) for x in (query, key, value))
    return attend(q_THK, k_TGK, v_TGK, attn, sinks_H=s_aux).unsqueeze(0), None


class TransformersModel(Backbone):
    """An encoder, or a base model without an LM head."""

    attn_type: ClassVar[Literal["decoder", "encoder_only"]] = "encoder_only"
    default_pooling_type = "MEAN"

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.lm_head: nn.Module | None = None
        self.model: Any = None  # comes with its weights in `load`, since transformers converts names while loading
        self._accepts: frozenset[str] = frozenset()
        self._position_padding: int | None = None
        self._trained_length: int | None = None

    def load(
        self,
        repository: Repository,
        *,
        device: torch.device,
        dtype: torch.dtype,
        claimed: frozenset[str] = frozenset(),
        progress: bool = False,
    ) -> None:
        """Loads module and weights through transformers, checks the audit it keeps, then probes packing and chunks.

        Args:
            repository: The checkpoint.
            device, dtype: Where and in what the module runs.
            claimed: Tensors that a head has read already.
            progress: Whether a bar is shown.
        """
        _register()
        from transformers import AutoModel

        hf_config = _hf_config(self.config, repository)
        gguf: dict[str, Any] = {"gguf_file": repository.gguf.name} if repository.gguf is not None else {}
        if hf_config.is_encoder_decoder:
            raise _refusal(self.config, "it is an encoder-decoder, which has no single packed sequence of states")
        try:
            with _progress(progress):
                self.model, report = AutoModel.from_pretrained(
                    repository.folder,
                    config=hf_config,
                    dtype=dtype,
                    attn_implementation=ATTENTION,
                    output_loading_info=True,
                    trust_remote_code=self.config.trust_remote_code,
                    **gguf,
                )
        except Exception as error:  # transformers and the modules it builds raise whatever they meet
            raise _refusal(self.config, f"transformers raises {type(error).__name__}: {error}") from error
        _audit(self.config, report, claimed)
        self.model.eval().requires_grad_(False).to(device)
        accepts = inspect.signature(self.model.forward).parameters
        self._accepts = frozenset(accepts)
        self._position_padding = _position_padding(self.model)
        self._trained_length = _trained_length(self.model)
        texts = _probe_texts(self.config, self.model)
        packed = _probe(self, texts, device)
        self.takes_prefix = _runs_in_chunks(self, texts[1], packed[1])
        # A module that passed the probe mixes tokens in our attention alone; its two parts know nothing of keys.
        self.takes_fewer_keys = self._trained_length is None
        _replace_linears(self, texts, torch.cat(tuple(packed)))

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
        if self._position_padding is not None:
            padding = self._position_padding
            positions_T = positions_after_padding(input_ids_T, positions_T, attn, padding_id=padding)
        packed = {
            "input_ids_T": input_ids_T,
            "positions_T": positions_T,
            "inputs_embeds_TD": inputs_embeds_TD,
            "token_type_ids_T": token_type_ids_T,
        }
        if self._trained_length is None or attn.max_length <= self._trained_length:
            return self._forward(attn, **packed)
        return self._long_and_short(attn, packed, self._trained_length)

    def _long_and_short(
        self, attn: AttentionMetadata, packed: dict[str, torch.Tensor | None], trained_length: int
    ) -> torch.Tensor:
        """Runs the texts that are longer than the trained length apart from the others.

        With LongRoPE the length of a text decides its frequencies, and transformers takes the longest of a batch.
        """
        lengths_N = torch.tensor(attn.lengths)
        is_long_N = lengths_N > trained_length
        is_long_T = is_long_N.repeat_interleave(lengths_N)
        states, places = [], []
        for in_group_N, in_group_T in ((is_long_N, is_long_T), (~is_long_N, ~is_long_T)):
            if in_group_N.any():
                rows_T = in_group_T.nonzero().squeeze(1).to(attn.cu_seqlens.device)
                group = AttentionMetadata.from_lengths(tuple(lengths_N[in_group_N].tolist()), rows_T.device)
                parts = {name: None if tensor is None else tensor[rows_T] for name, tensor in packed.items()}
                states.append(self._forward(group, **parts))
                places.append(rows_T)
        return torch.cat(states)[torch.cat(places).argsort()]

    def _forward(
        self,
        attn: AttentionMetadata,
        *,
        input_ids_T: torch.Tensor | None,
        positions_T: torch.Tensor | None,
        inputs_embeds_TD: torch.Tensor | None,
        token_type_ids_T: torch.Tensor | None,
    ) -> torch.Tensor:
        assert positions_T is not None
        inputs: dict[str, torch.Tensor] = {"position_ids": positions_T.unsqueeze(0)}
        if inputs_embeds_TD is not None:
            inputs["inputs_embeds"] = inputs_embeds_TD.unsqueeze(0)
        elif input_ids_T is not None:
            inputs["input_ids"] = input_ids_T.unsqueeze(0)
        if token_type_ids_T is not None:
            if "token_type_ids" not in self._accepts:
                refuse_unused(token_type_ids_T=token_type_ids_T)
            inputs["token_type_ids"] = token_type_ids_T.unsqueeze(0)
        calls = [0]
        token = _running.set((attn, calls))
        try:
            hidden_TD: torch.Tensor = self._run(**inputs)[0]
        finally:
            _running.reset(token)
        if calls[0] == 0:
            raise _refusal(self.config, "its attention does not go through transformers' attention interface")
        return hidden_TD

    def _run(self, **inputs: torch.Tensor) -> torch.Tensor:
        """`[1, T, D]` last hidden states."""
        if "use_cache" in self._accepts:
            output = self.model(**inputs, use_cache=False, return_dict=True)
        else:
            output = self.model(**inputs, return_dict=True)
        last: torch.Tensor = output.last_hidden_state
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


def is_causal_family(model_type: str) -> bool:
    """Whether transformers knows the family as causal LMs and not as masked ones."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    )

    return model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and model_type not in MODEL_FOR_MASKED_LM_MAPPING_NAMES


def _register() -> None:
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        raise MissingDependencyError(
            "this architecture runs through transformers: pip install 'transformers>=5'"
        ) from error
    AttentionInterface.register(ATTENTION, packed_attention)
    AttentionMaskInterface.register(ATTENTION, lambda *args, **kwargs: None)


def _hf_config(config: ModelConfig, repository: Repository) -> Any:
    from transformers import AutoConfig

    if config.trust_remote_code and "auto_map" in config.raw:
        return AutoConfig.from_pretrained(repository.folder, trust_remote_code=True)
    return AutoConfig.for_model(**config.raw).get_text_config()


def _position_padding(model: Any) -> int | None:
    """The padding id after which RoBERTa-like embeddings count positions; they expect explicit ones to do so too."""
    embeddings = getattr(model, "embeddings", None)
    if embeddings is not None and hasattr(embeddings, "create_position_ids_from_input_ids"):
        return int(embeddings.padding_idx)
    return None


def _trained_length(model: Any) -> int | None:
    """The length above which LongRoPE has other frequencies; None for models without it."""
    for module in model.modules():
        rope_type = getattr(module, "rope_type", None)
        kinds = rope_type if isinstance(rope_type, dict) else {None: rope_type}
        for layer_type, kind in kinds.items():
            if kind == "longrope":
                parameters = module.config.rope_parameters
                parameters = parameters if layer_type is None else parameters[layer_type]
                return int(parameters["original_max_position_embeddings"])
    return None


def _audit(config: ModelConfig, report: dict[str, Any], claimed: frozenset[str]) -> None:
    """Every tensor is used and every parameter filled, but for heads that are not part of the base model."""
    missing = sorted(name for name in report["missing_keys"] if not re.match(r"pooler\.", name))
    unused = sorted(name for name in report["unexpected_keys"] if name not in claimed and not _is_head(name))
    wrong = [f"{key[0]} ({list(key[1])}, the model expects {list(key[2])})" for key in report["mismatched_keys"]]
    problems = [
        f"{label}: {', '.join(names[:5])}" + (f", and {len(names) - 5} more" if len(names) > 5 else "")
        for label, names in (("missing", missing), ("no place in the model", unused), ("wrong shape", wrong))
        if names
    ]
    if problems:
        raise WeightsError(f"{config.name}: tensors with {'; '.join(problems)}")


_HEADS = (
    r"^(lm_head|embed_out|cls|predictions|generator_predictions|generator_lm_head|discriminator_predictions|"
    r"vocab_(transform|layer_norm|projector)|head|decoder|qa_outputs|sop_classifier|nsp|output_projection|lm_output)\b",
    r"(^|\.)pooler\.",
    r"rotary_emb\.inv_freq$",
    r"position_ids$",
    r"\.(masked_bias|attn\.bias)$",
)


def _is_head(name: str) -> bool:
    return any(re.search(pattern, name) for pattern in _HEADS)


def _refusal(config: ModelConfig, reason: str) -> UnsupportedArchitectureError:
    return UnsupportedArchitectureError(
        f"{config.name}: {config.architecture} cannot run on packed batches through transformers: {reason}"
    )


@contextlib.contextmanager
def _progress(shown: bool) -> Iterator[None]:
    """transformers' progress bar as asked, and its report of unused tensors held back: the audit is ours."""
    from transformers.utils import logging

    switches: dict[bool, Any] = {True: logging.enable_progress_bar, False: logging.disable_progress_bar}
    was_shown, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    switches[shown]()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        switches[was_shown]()
        logging.set_verbosity(verbosity)


# What modules of transformers and of a checkpoint's own code raise where they are not made for what they are given.
_RAISED = (RuntimeError, TypeError, ValueError, IndexError, AttributeError, KeyError)


def _probe_texts(config: ModelConfig, model: Any) -> list[list[int]]:
    """Three short texts, the second the longest."""
    generator = torch.Generator().manual_seed(0)
    vocab = min(config.vocab_size, model.get_input_embeddings().weight.shape[0])
    first = min(vocab - 1, 1 if config.pad_token_id is None else config.pad_token_id + 1)
    lengths = (5, _probe_length(config, model), 3)
    texts: list[list[int]] = [torch.randint(first, vocab, (n,), generator=generator).tolist() for n in lengths]
    if config.pad_token_id is not None and 0 <= config.pad_token_id < vocab:
        texts[1][1] = config.pad_token_id  # where padding inside a text counts, it must count alike
    return texts


@torch.inference_mode()
def _probe(backbone: TransformersModel, texts: list[list[int]], device: torch.device) -> Sequence[torch.Tensor]:
    """Runs texts packed and each alone through transformers' eager attention, and compares.

    Returns:
        Per text its hidden states from the packed batch.

    Raises:
        UnsupportedArchitectureError: They differ by more than rounding: positions, windows or masks are handled
            somewhere that a packed batch does not reach.
    """
    config, model = backbone.config, backbone.model
    if "position_ids" not in backbone._accepts:
        raise _refusal(config, "its forward takes no position_ids")
    batch = PackedBatch.pack(texts, device=device)
    try:
        packed_TD = backbone(batch.input_ids_T, batch.positions_T, batch.attn)
    except UnsupportedArchitectureError:  # says what it is already
        raise
    except _RAISED as error:
        raise _refusal(config, f"it raises {type(error).__name__}: {error}") from error
    model.set_attn_implementation("eager")
    try:
        alone_TD = torch.cat([backbone._run(input_ids=torch.tensor([ids], device=device))[0] for ids in texts])
    finally:
        model.set_attn_implementation(ATTENTION)
    worst = _difference(packed_TD, alone_TD)
    if not worst <= _tolerance(packed_TD.dtype):
        raise _refusal(config, f"packed and unpacked hidden states differ by {worst:.1e} of their length")
    states: Sequence[torch.Tensor] = packed_TD.split(batch.attn.lengths)
    return states


@torch.inference_mode()
def _runs_in_chunks(backbone: TransformersModel, ids: list[int], whole_TD: torch.Tensor) -> bool:
    """Whether a text in two chunks, the second behind the cached keys of the first, has the states of the whole."""
    if _frequencies_depend_on_length(backbone.model):
        return False
    device = whole_TD.device
    store = KVStore(len(ids), 4, device)
    middle = len(ids) * 2 // 5
    chunks = []
    for start, end in ((0, middle), (middle, len(ids))):
        prefix = PrefixKeys.plan(
            store, starts=(start,), lengths=(end - start,), block_tables=(range(len(ids)),), stored=(end,)
        )
        batch = PackedBatch.pack(
            [ids[start:end]], device=device, starts=(start,), prompt_lengths=(len(ids),), prefix=prefix
        )
        try:
            chunks.append(backbone(batch.input_ids_T, batch.positions_T, batch.attn))
            prefix.end()
        except (*_RAISED, AssertionError, EngineError):
            return False
    return _difference(torch.cat(chunks), whole_TD) <= _tolerance(whole_TD.dtype)


def _frequencies_depend_on_length(model: nn.Module) -> bool:
    """Whether rotary frequencies follow the length of a text, which transformers takes for that of a chunk."""
    for module in model.modules():
        rope_type = getattr(module, "rope_type", None)
        kinds = rope_type.values() if isinstance(rope_type, dict) else (rope_type,)
        if any(isinstance(kind, str) and ("dynamic" in kind or kind == "longrope") for kind in kinds):
            return True
    return False


@torch.inference_mode()
def _replace_linears(backbone: TransformersModel, texts: list[list[int]], before_TD: torch.Tensor) -> None:
    """Puts our linear layers into the module, unless it then gives other numbers or reads a weight by itself."""
    batch = PackedBatch.pack(texts, device=before_TD.device)
    restore = replace_linears(backbone.model)
    try:
        after_TD = backbone(batch.input_ids_T, batch.positions_T, batch.attn)
        same = _difference(after_TD, before_TD) <= _tolerance(before_TD.dtype)
    except _RAISED as error:
        logger.debug("%s: with packed linear layers: %r", backbone.config.name, error)
        same = False
    if not same:
        logger.info("%s keeps transformers' linear layers", backbone.config.name)
        restore()


def _difference(a_TD: torch.Tensor, b_TD: torch.Tensor) -> float:
    """The largest distance of two rows, as a part of their length."""
    distances_T = (a_TD - b_TD).float().norm(dim=-1)
    return float((distances_T / b_TD.float().norm(dim=-1).clamp_min(1e-6)).max())


def _tolerance(dtype: torch.dtype) -> float:
    return 1e-3 if dtype == torch.float32 else 0.1


def _probe_length(config: ModelConfig, model: Any) -> int:
    """Long enough to leave a short sliding window, and short enough to cost nothing."""
    window = getattr(model.config, "sliding_window", None) or 0
    return max(3, min(config.max_positions, 2 * window + 3 if 0 < window <= 256 else 21))
