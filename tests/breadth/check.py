"""One architecture: saved tiny and random by transformers, loaded here, and compared with transformers' own forward."""

from __future__ import annotations

import tempfile
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch

from anypool import LLM, PoolingParams
from anypool.errors import AnypoolError
from anypool.model_executor.models.transformers_backend import TransformersModel
from tests.breadth.architectures import Case
from tests.breadth.tiny import tiny_config
from tests.models.parity import random_ids, save_random

LENGTHS = (1, 7, 60, 33, 7, 36)
# Largest difference of an entry from the reference, as a part of its row's root mean square where that is above 1; and
# between a batch and alone, as a part of the row's length, so of an embedding.
TOLERANCE, BATCH_TOLERANCE = 1e-5, 1e-6

_LARGEST = 10_000_000  # parameters of what is tried


def check(case: Case) -> dict[str, Any]:
    """What became of an architecture.

    Returns:
        `outcome` is native, packed, padded, equal_lengths or alone for what works and how; "refused"; "wrong" for
        other numbers than the reference's, or for numbers that depend on the batch; "failed" for an error that is not
        one of ours; "no reference" where transformers' own class cannot be run on text by itself. `why` says more.
    """
    warnings.simplefilter("ignore")
    result = {"task": case.task, "model_type": case.model_type, "architecture": case.architecture}
    with tempfile.TemporaryDirectory() as folder:
        try:
            model = _save(case, Path(folder))
        except Exception as error:
            return {**result, "outcome": "no reference", "why": _said(error)}
        try:
            texts, expected = _references(case, model)
        except Exception as error:
            refusal = _refusal(folder)
            if refusal is not None:
                return {**result, "outcome": "refused", "why": refusal}
            return {**result, "outcome": "no reference", "why": _said(error)}
        try:
            return {**result, **_compare(case, folder, texts, expected)}
        except AnypoolError as error:
            return {**result, "outcome": "refused", "why": str(error).replace(folder, "MODEL")}
        except Exception as error:
            return {**result, "outcome": "failed", "why": f"{_said(error)} ({_place(error)})"}


def _refusal(folder: str) -> str | None:
    """Why it does not load here; None if it does."""
    try:
        LLM(folder, device="cpu", use_tqdm_on_load=False, skip_tokenizer_init=True).engine.close()
    except AnypoolError as error:
        return str(error).replace(folder, "MODEL")
    return None


def _save(case: Case, folder: Path) -> Any:
    import transformers

    cls = getattr(transformers, case.architecture)
    config = tiny_config(cls.config_class, case.overrides)
    if case.task in ("classify", "token_classify"):
        config.num_labels = 3
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in cls._from_config(config).parameters())
    if size > _LARGEST:
        raise ValueError(f"the configuration is not tiny: {size:,} parameters")
    torch.manual_seed(0)
    save_random(cls._from_config(config), folder)
    # As it comes back: what is tied, dropped or converted on the way is so for both.
    return cls.from_pretrained(folder, attn_implementation="eager").eval()


def _references(case: Case, model: Any) -> tuple[list[list[int]], list[torch.Tensor]]:
    """The texts that transformers' own class takes, and what it gives for them. Some take none of a few tokens."""
    texts, expected, refused = [], [], []
    for ids in random_ids(110, LENGTHS, first=4):
        try:
            expected.append(_reference(case, model, ids))
            texts.append(ids)
        except Exception as error:
            refused.append(error)
    if len(texts) < 3:
        raise refused[-1]
    return texts, expected


@torch.inference_mode()
def _reference(case: Case, model: Any, ids: list[int]) -> torch.Tensor:
    """`[L, D]` hidden states, `[C]` scores, or `[L, C]` scores of tokens."""
    inputs = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.long)}
    if case.task in ("classify", "token_classify"):
        return model(**_accepted(model, inputs)).logits[0]
    module = _backbone(case, model)
    options = {"use_cache": False} if "use_cache" in _names(module) else {}
    return module(**_accepted(module, inputs), **options).last_hidden_state[0]


def _backbone(case: Case, model: Any) -> Any:
    """The part of a model whose states are wanted: encoder, or decoder of a causal LM."""
    if model.config.is_encoder_decoder:
        return model.get_encoder()
    module = model.base_model if model.base_model is not model else getattr(model, "model", model)
    # A decoder that was saved by itself is wrapped once, so that its weights have the names of the whole model's.
    return module if "input_ids" in _names(module) else getattr(module, "decoder", module)


def _names(module: Any) -> set[str]:
    import inspect

    return set(inspect.signature(module.forward).parameters)


def _accepted(module: Any, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in inputs.items() if name in _names(module)}


def _compare(case: Case, folder: str, texts: list[list[int]], expected: list[torch.Tensor]) -> dict[str, Any]:
    llm = LLM(folder, device="cpu", use_tqdm_on_load=False, skip_tokenizer_init=True)
    try:
        loaded = llm.engine.loaded.model
        together = _run(case, llm, texts)
        alone = [_run(case, llm, [ids])[0] for ids in texts]
    finally:
        llm.engine.close()
    outcome = loaded.way.value if isinstance(loaded, TransformersModel) else "native"
    difference = max(map(_difference, together, expected))
    by_batch = max(_difference(*_as_parts_of_length(one, other)) for one, other in zip(together, alone, strict=True))
    found = {"difference": difference, "batch_difference": by_batch, "why": ""}
    if isinstance(loaded, TransformersModel):
        found["why"] = "; ".join(loaded.rejected)
    if not difference <= TOLERANCE and not _is_rounding(case, folder, texts, together, expected):
        return {**found, "outcome": "wrong", "why": f"{outcome}, differs from the reference by {difference:.1e}"}
    if not by_batch <= BATCH_TOLERANCE:
        return {**found, "outcome": "wrong", "why": f"{outcome}, differs by {by_batch:.1e} in a batch and alone"}
    return {**found, "outcome": outcome}


def _is_rounding(
    case: Case, folder: str, texts: list[list[int]], actual: list[torch.Tensor], expected: list[torch.Tensor]
) -> bool:
    """Whether the numbers are about as near to those in float64 as the reference's own float32 is."""
    import transformers

    cls = getattr(transformers, case.architecture)
    model = cls.from_pretrained(folder, attn_implementation="eager", dtype=torch.float64).eval()
    exact = [_reference(case, model, ids) for ids in texts]
    rounding = max(map(_difference, expected, exact))
    return max(map(_difference, actual, exact)) <= 2 * rounding <= 10 * TOLERANCE


def _run(case: Case, llm: LLM, texts: list[list[int]]) -> list[torch.Tensor]:
    prompts: list[Any] = [{"prompt_token_ids": ids} for ids in texts]
    task = {"classify": "classify", "token_classify": "token_classify"}.get(case.task, "token_embed")
    params = PoolingParams(activation="none") if task != "token_embed" else PoolingParams(normalize=False)
    outputs = llm.encode(prompts, params, pooling_task=task, use_tqdm=False)
    return [torch.as_tensor(output.outputs.data) for output in outputs]


def _difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    if actual.shape != expected.shape:
        return float("inf")
    size = expected.pow(2).mean(-1, keepdim=True).sqrt().clamp_min(1)
    return float(((actual - expected).abs() / size).max())


def _as_parts_of_length(one: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    length = one.norm(dim=-1, keepdim=True).clamp_min(1)
    return one / length, other / length


def _said(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2])[:300] if lines else 'no message'}"


def _place(error: BaseException) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{Path(frame.filename).name}:{frame.lineno}"
