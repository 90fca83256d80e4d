"""ONNX Runtime through sentence-transformers."""

from .pipe import serve
from .sentence_transformers import Onnx


def main() -> None:
    serve(Onnx())
