"""In which company a text keeps its own numbers in a module of transformers: tried at load, not guessed."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from anypool.errors import EngineError, UnsupportedArchitectureError
from anypool.model_executor.attention import PrefixKeys
from anypool.model_executor.kv_store import KVStore
from anypool.model_executor.layers.packing import replace_linears
from anypool.model_executor.model_config import ModelConfig
from anypool.model_executor.models.transformers_backend.attention import PACKED_ATTENTION
from anypool.model_executor.models.transformers_backend.loading import quiet, refusal
from anypool.model_executor.models.transformers_backend.ways import Way
from anypool.model_executor.packed_batch import PackedBatch

if TYPE_CHECKING:
    from anypool.model_executor.models.transformers_backend.model import TransformersModel

# What modules of transformers and of a checkpoint's own code raise where they are not made for what they are given.
_RAISED = (RuntimeError, TypeError, ValueError, IndexError, AttributeError, KeyError, AssertionError, ImportError)

# Ways with the attention of transformers that each is tried with, best first.
_WAYS = (
    (Way.PACKED, PACKED_ATTENTION),
    (Way.PADDED, "sdpa"),
    (Way.PADDED, "eager"),
    (Way.EQUAL_LENGTHS, "sdpa"),
    (Way.EQUAL_LENGTHS, "eager"),
    (Way.ALONE, "eager"),
)


class Probed(NamedTuple):
    """What was tried.

    Attributes:
        texts: The probe's texts.
        states_TD: Their hidden states, the chosen way.
        rejected: Why each better way was not taken.
    """

    texts: list[list[int]]
    states_TD: torch.Tensor
    rejected: tuple[str, ...]


@torch.inference_mode()
def choose_way(backbone: TransformersModel, device: torch.device) -> Probed:
    """Finds the best way in which texts together have the hidden states that each has alone, and sets it.

    Raises:
        UnsupportedArchitectureError: There is none.
    """
    config = backbone.config
    texts, alone = _alone(backbone, device)
    batch = PackedBatch.pack(texts, device=device)
    rejected: list[str] = []
    for way, attention in _WAYS:
        if not _set_attention(backbone.model, attention):
            continue
        backbone.way = way
        problem, states_TD = _problem(backbone, batch, torch.cat(alone))
        if problem is None:
            assert states_TD is not None
            return Probed(texts, states_TD, tuple(dict.fromkeys(rejected)))
        rejected.append(f"{way.label}: {problem}")
    raise refusal(config, "; ".join(dict.fromkeys(rejected)))


@torch.inference_mode()
def runs_in_chunks(backbone: TransformersModel, probed: Probed) -> bool:
    """Whether a text in two chunks, the second behind the cached keys of the first, has the states of the whole."""
    if backbone.way is not Way.PACKED or backbone.lengths.frequencies_follow:
        return False
    ids = probed.texts[1]
    whole_TD = probed.states_TD.split([len(text) for text in probed.texts])[1]
    store = KVStore(len(ids), 4, whole_TD.device)
    middle = len(ids) * 2 // 5
    chunks = []
    for start, end in ((0, middle), (middle, len(ids))):
        prefix = PrefixKeys.plan(
            store, starts=(start,), lengths=(end - start,), block_tables=(range(len(ids)),), stored=(end,)
        )
        batch = PackedBatch.pack(
            [ids[start:end]], device=whole_TD.device, starts=(start,), prompt_lengths=(len(ids),), prefix=prefix
        )
        try:
            chunks.append(backbone(batch.input_ids_T, batch.positions_T, batch.attn))
            prefix.end()
        except (*_RAISED, EngineError):
            return False
    return _difference(torch.cat(chunks), whole_TD) <= _tolerance(whole_TD.dtype)


@torch.inference_mode()
def exchange_linears(backbone: TransformersModel, probed: Probed) -> bool:
    """Puts our linear layers into the module, unless it then gives other numbers or reads a weight by itself.

    Returns:
        Whether they are in.
    """
    restore = replace_linears(backbone.model)
    is_alike = differs_from(backbone, probed) is None
    if not is_alike:
        restore()
    return is_alike


@torch.inference_mode()
def differs_from(backbone: TransformersModel, probed: Probed) -> str | None:
    """How the module, which was changed, differs from what was probed; None where it does not."""
    return _problem(backbone, PackedBatch.pack(probed.texts, device=probed.states_TD.device), probed.states_TD)[0]


def _alone(backbone: TransformersModel, device: torch.device) -> tuple[list[list[int]], list[torch.Tensor]]:
    """The probe's texts, and what transformers gives each: short ones, or longer ones where it takes no short ones."""
    try:
        texts = _texts(backbone.config, backbone.model)
        return texts, _states_alone(backbone, texts, device)
    except UnsupportedArchitectureError:
        if backbone.config.max_positions < 8 * 21:
            raise
        texts = _texts(backbone.config, backbone.model, scale=8)
        return texts, _states_alone(backbone, texts, device)


def _texts(config: ModelConfig, model: Any, scale: int = 1) -> list[list[int]]:
    """Four texts, the second the longest, the last as long as the first."""
    generator = torch.Generator().manual_seed(0)
    vocab = config.vocab_size
    with contextlib.suppress(AttributeError, NotImplementedError):  # not every module has one table of embeddings
        vocab = min(vocab, model.get_input_embeddings().weight.shape[0])
    first = min(vocab - 1, 1 if config.pad_token_id is None else config.pad_token_id + 1)
    lengths = [scale * length for length in (5, _longest(config, model), 3, 5)]
    texts: list[list[int]] = [torch.randint(first, vocab, (n,), generator=generator).tolist() for n in lengths]
    if config.pad_token_id is not None and 0 <= config.pad_token_id < vocab:
        texts[1][1] = config.pad_token_id  # where padding inside a text counts, it must count alike
    return texts


def _longest(config: ModelConfig, model: Any) -> int:
    """Long enough to leave a short sliding window, and short enough to cost nothing."""
    window = _sliding_window(getattr(model, "config", None))
    return max(3, min(config.max_positions, 2 * window + 3 if 0 < window <= 256 else 21))


def _sliding_window(hf_config: Any) -> int:
    """The window of layers that have one; 0 where none has."""
    try:
        return getattr(hf_config, "sliding_window", None) or 0
    except Exception:  # transformers refuses one number where layers differ
        return max(getattr(layer, "sliding_window", None) or 0 for layer in hf_config.per_layer_config)


def _states_alone(backbone: TransformersModel, texts: list[list[int]], device: torch.device) -> list[torch.Tensor]:
    """What transformers itself gives each text, with its eager attention.

    Raises:
        UnsupportedArchitectureError: It gives no row per token, or not twice the same.
    """
    config = backbone.config
    _set_attention(backbone.model, "eager")
    try:
        alone = [backbone.run_text(torch.tensor(ids, device=device)) for ids in (*texts, texts[0])]
    except _RAISED as error:
        raise refusal(config, f"a text by itself raises {_said(error)}") from error
    for ids, states in zip(texts, alone, strict=False):
        if tuple(states.shape) != (len(ids), config.hidden_size):
            raise refusal(
                config,
                f"{len(ids)} tokens have states of shape {list(states.shape)}, not {[len(ids), config.hidden_size]}",
            )
    again = alone.pop()
    if not _difference(again, alone[0]) <= _tolerance(again.dtype):
        raise refusal(config, "it gives the same text other numbers when it is run again")
    return alone


def _problem(
    backbone: TransformersModel, batch: PackedBatch, expected_TD: torch.Tensor
) -> tuple[str | None, torch.Tensor | None]:
    """What is wrong with a batch's states, run the way that is set; None and the states where nothing is.

    Padded texts are run by themselves as well: some modules mask a lone text otherwise than the same in a batch.
    """
    try:
        states_TD = backbone.run_together(batch)
        each = batch.input_ids_T.split(batch.attn.lengths) if backbone.way is Way.PADDED else ()
        lone = [backbone.run_text(ids_L) for ids_L in each]
    except UnsupportedArchitectureError as error:
        return str(error), None
    except _RAISED as error:
        return f"raises {_said(error)}", None
    for found_TD in (states_TD, *([torch.cat(lone)] if lone else [])):
        if found_TD.shape != expected_TD.shape:
            return f"gives states of shape {list(found_TD.shape)}", None
        worst = _difference(found_TD, expected_TD)
        if not worst <= _tolerance(found_TD.dtype):
            return f"hidden states differ by {worst:.1e} of their length", None
    return None, states_TD


def _set_attention(model: Any, name: str) -> bool:
    """Makes a module use an implementation of attention; False where it has no such one."""
    if not getattr(model, "_can_set_attn_implementation", lambda: False)():
        return name != "sdpa"  # it has one, whatever it is called
    try:
        with quiet():
            model.set_attn_implementation(name)
    except (ValueError, ImportError):
        return False
    return True


def _said(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"


def _difference(a_TD: torch.Tensor, b_TD: torch.Tensor) -> float:
    """The largest distance of two rows, as a part of their length."""
    distances_T = (a_TD - b_TD).float().norm(dim=-1)
    return float((distances_T / b_TD.float().norm(dim=-1).clamp_min(1e-6)).max())


def _tolerance(dtype: torch.dtype) -> float:
    return 1e-3 if dtype == torch.float32 else 0.1
