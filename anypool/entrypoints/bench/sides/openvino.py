"""OpenVINO through sentence-transformers."""

from .pipe import serve
from .sentence_transformers import OpenVino


def main() -> None:
    serve(OpenVino())
