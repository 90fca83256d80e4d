"""anypool. It knows the tokens of a text, so all sides are counted by it; and it measures what its own time goes to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .pipe import Side, serve, versions

if TYPE_CHECKING:
    from anypool import LLM


class Ours(Side):
    """`LLM` on the CPU."""

    llm: LLM

    def load(self, *, model: str, dtype: str, prompt: str, gguf: str | None) -> dict[str, Any]:
        import anypool

        kind, _, quantization = dtype.rpartition("+") if dtype.endswith("int8") else (dtype, "", "")
        self.llm = anypool.LLM(
            model, dtype=kind or "auto", quantization=quantization or None, device="cpu", use_tqdm_on_load=False
        )
        name = str(self.llm.engine.loaded.dtype).removeprefix("torch.")
        return {
            "versions": {**versions("torch"), "anypool": anypool.__version__},
            "dtype": f"int8 in {name}" if quantization else name,
        }

    def vectors(self, texts: list[str]) -> Any:
        import numpy as np

        from anypool import PoolingParams

        params = PoolingParams(normalize=True)
        outputs = self.llm.embed(texts, params, use_tqdm=False, truncate_prompt_tokens=-1)
        return np.stack([one.outputs.numpy() for one in outputs])

    def facts(self) -> dict[str, Any]:
        """The longest prompt in tokens, whether attention is causal, and what is put before each text."""
        from anypool.engine.prompt_options import PromptOptions
        from anypool.model_executor.models.interfaces import is_encoder_model

        engine = self.llm.engine
        return {
            "max_tokens": engine.max_model_len,
            "causal": engine.loaded.config.is_causal and not is_encoder_model(type(engine.loaded.model)),
            "prompt": engine.prompt_text(PromptOptions()),
        }

    def count(self, *, file: str) -> dict[str, Any]:
        """The tokens of the texts in a file, as they are run."""
        from anypool import PoolingTask
        from anypool.engine.prompt_options import PromptOptions

        texts = json.loads(Path(file).read_text(encoding="utf-8"))
        requests = self.llm.engine.prepare(texts, PoolingTask.EMBED, options=PromptOptions(truncate_prompt_tokens=-1))
        return {"tokens": sum(map(len, requests))}

    def ceiling(self) -> dict[str, Any]:
        """What this machine multiplies in a second, and what a token asks of the linear layers."""
        from anypool.entrypoints.bench.ceiling import flop_per_token, measure_ceiling

        model = self.llm.engine.loaded.model
        return {"flop_per_s": measure_ceiling(model), "flop_per_token": flop_per_token(model)}

    def breakdown(self, *, file: str) -> dict[str, Any]:
        """Seconds by what they go to, for the texts in a file."""
        from anypool.entrypoints.bench.breakdown import measure_breakdown

        return {"seconds": measure_breakdown(self.llm.engine, json.loads(Path(file).read_text(encoding="utf-8")))}


def main() -> None:
    serve(Ours())
