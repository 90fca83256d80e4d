"""Where an extra is not installed, whatever needs it names the command that installs it."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import transformers as hf

from anypool import LLM
from anypool.errors import MissingDependencyError
from tests.helpers import byte_tokenizer, save, tiny_bert


@pytest.fixture
def _without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)


@pytest.mark.usefixtures("_without_transformers")
def test_transformers_backend_asked_for() -> None:
    with pytest.raises(
        MissingDependencyError, match=re.escape("BertModel runs through transformers: pip install 'any")
    ):
        LLM(tiny_bert(), device="cpu", model_impl="transformers")


def test_an_architecture_that_is_not_native(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = byte_tokenizer()
    config = hf.GPT2Config(
        vocab_size=len(tokenizer), n_embd=32, n_layer=1, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2
    )
    folder = save(hf.GPT2LMHeadModel(config), tokenizer, "gpt2")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingDependencyError, match=re.escape("pip install 'anypool[transformers]'")):
        LLM(folder, device="cpu")


def test_the_application_for_ray_serve_without_fastapi() -> None:
    code = "import sys; sys.modules['fastapi'] = None; import anypool.entrypoints.ray.serve"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert "MissingDependencyError: the server needs fastapi" in ended.stderr
    assert "pip install 'anypool[serve]'" in ended.stderr
