"""sentence-transformers, with torch, OpenVINO or ONNX Runtime behind it."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from .pipe import Side, serve, versions


class SentenceTransformers(Side):
    """`SentenceTransformer.encode` with its own batch size."""

    backend: ClassVar[Literal["torch", "openvino", "onnx"]] = "torch"
    packages: ClassVar[tuple[str, ...]] = ("torch", "transformers", "sentence-transformers")
    model: Any

    def load(self, *, model: str, dtype: str, prompt: str, gguf: str | None) -> dict[str, Any]:
        from sentence_transformers import SentenceTransformer

        self.model = SentenceTransformer(
            model, device="cpu", backend=self.backend, model_kwargs=self.model_kwargs(dtype)
        )
        return {"versions": versions(*self.packages), "dtype": self.dtype(dtype)}

    def model_kwargs(self, dtype: str) -> dict[str, Any]:
        """What the backend takes in order to compute in a dtype."""
        return {"dtype": dtype}

    def dtype(self, asked: str) -> str:
        """What is computed in."""
        return str(next(self.model.parameters()).dtype).removeprefix("torch.")

    def vectors(self, texts: list[str]) -> Any:
        return self.model.encode(texts, batch_size=32, show_progress_bar=False, normalize_embeddings=True)


class OpenVino(SentenceTransformers):
    """OpenVINO, with its hint for few requests at a time, which is the faster one for batches as well."""

    backend: ClassVar[Literal["torch", "openvino", "onnx"]] = "openvino"
    packages: ClassVar[tuple[str, ...]] = ("openvino", "optimum-intel", "sentence-transformers")
    _HINTS: ClassVar[dict[str, str]] = {"float32": "f32", "bfloat16": "bf16"}

    def model_kwargs(self, dtype: str) -> dict[str, Any]:
        config = {"PERFORMANCE_HINT": "LATENCY"}
        if dtype != "auto":
            config["INFERENCE_PRECISION_HINT"] = self._HINTS[dtype]
        return {"export": True, "ov_config": config}

    def dtype(self, asked: str) -> str:
        return asked


class Onnx(SentenceTransformers):
    """ONNX Runtime on the CPU, which computes in float32."""

    backend: ClassVar[Literal["torch", "openvino", "onnx"]] = "onnx"
    packages: ClassVar[tuple[str, ...]] = ("onnxruntime", "optimum-onnx", "sentence-transformers")

    def model_kwargs(self, dtype: str) -> dict[str, Any]:
        return {"export": True, "provider": "CPUExecutionProvider"}

    def dtype(self, asked: str) -> str:
        return "float32"


def main() -> None:
    serve(SentenceTransformers())
