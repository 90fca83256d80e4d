"""What a model answers with low-rank adapters, on every rank alike."""

from __future__ import annotations

from typing import Any

import torch

from anypool import LLM, LoRARequest, PoolingParams
from anypool.errors import AnypoolError

RAW = PoolingParams(normalize=False)


def adapted(
    jobs: dict[str, tuple[str, str]], prompts: list[list[int]]
) -> dict[str, dict[str, list[torch.Tensor] | str]]:
    """Of each base and adapter the hidden states by request ("beside") and merged; or the words of a refusal."""
    found: dict[str, dict[str, list[torch.Tensor] | str]] = {}
    for name, (base, adapter) in jobs.items():
        found[name] = {
            "beside": _states(base, prompts, LoRARequest("one", 1, adapter), enable_lora=True),
            "merged": _states(base, prompts, None, lora=adapter),
        }
    return found


def _states(
    base: str, prompts: list[list[int]], request: LoRARequest | None, **engine: Any
) -> list[torch.Tensor] | str:
    try:
        with LLM(base, device="cpu", use_tqdm_on_load=False, **engine) as llm:
            outputs = llm.token_embed(prompts, RAW, lora_request=request, use_tqdm=False)  # type: ignore[arg-type]
            return [output.outputs.data for output in outputs]
    except AnypoolError as error:
        return str(error)
