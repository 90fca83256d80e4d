"""Tiny random checkpoints, made by transformers and sentence-transformers themselves, and the reference's answers."""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

from anypool import LLM

HIDDEN = 32
MAX_POSITIONS = 160

_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,:;!?-'"
_WORDS = ["the", "query", "passage", "title", "none", "cat", "sat", "on", "mat", "and", "a", "long", "story"]

logging.disable_progress_bar()

_folder = Path(tempfile.mkdtemp(prefix="anypool-tests-"))
atexit.register(shutil.rmtree, _folder, ignore_errors=True)

# About 1, 7, 63 and 130 tokens, in an order that is not sorted by length.
RAGGED = [
    "cat and mat and a cat",
    " ".join(["the cat sat on a long mat, and none saw the story"] * 9),
    "cat",
    " ".join(["a story: the passage"] * 12),
]


def new_folder(name: str) -> Path:
    """A folder that nobody else has, removed when the process ends."""
    return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=_folder))


def wordpiece_tokenizer(**settings: Any) -> PreTrainedTokenizerFast:
    """A cased WordPiece tokenizer that writes [CLS] text [SEP]."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokens = dict.fromkeys([*special, *_WORDS, *_LETTERS, *(f"##{c}" for c in _LETTERS)])
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=False)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    named = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, **{f"{name}_token": token for name, token in named.items()}, **settings
    )


def byte_tokenizer(template: str = "<s> $A", **settings: Any) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer without merges, and the special tokens of `template` around the text."""
    special = ["<pad>", "<s>", "</s>"]
    vocab = {token: i for i, token in enumerate([*special, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    if template != "$A":
        backend.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=[("<s>", 1), ("</s>", 2)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>", **settings
    )


@cache
def tiny_bert(dtype: torch.dtype = torch.float32) -> Path:
    """A BERT encoder of two layers, weights and tokenizer."""
    torch.manual_seed(1)
    tokenizer = wordpiece_tokenizer(model_max_length=MAX_POSITIONS)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=MAX_POSITIONS,
        initializer_range=0.2,
    )
    return save(BertModel(config).to(dtype), tokenizer, "tiny-bert")


@cache
def tiny_llama(dtype: torch.dtype = torch.float32, *, template: str = "<s> $A", tied: bool = False) -> Path:
    """A Llama causal LM of two layers, weights and tokenizer."""
    torch.manual_seed(2)
    tokenizer = byte_tokenizer(template, model_max_length=MAX_POSITIONS)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        max_position_embeddings=MAX_POSITIONS,
        initializer_range=0.2,
        tie_word_embeddings=tied,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return save(LlamaForCausalLM(config).to(dtype), tokenizer, "tiny-llama")


def save(model: Any, tokenizer: Any, name: str, **save_options: Any) -> Path:
    """Saves a transformers model and its tokenizer in a folder of their own."""
    folder = new_folder(name)
    with torch.no_grad():
        for parameter in model.parameters():  # fresh biases and norms are 0 and 1, which hides what is done with them
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(folder, **save_options)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return folder


def save_sentence_transformer(backbone: Path, *modules: Any, **settings: Any) -> Path:
    """A sentence-transformers checkpoint over a saved backbone, in the dialect of the installed version."""
    folder = new_folder("sentence-transformer")
    model = SentenceTransformer(modules=[Transformer(str(backbone)), *modules], device="cpu", **settings)
    model.save(str(folder), create_model_card=False)
    return folder


def copy_of(folder: Path) -> Path:
    """A copy of a checkpoint that a test may spoil."""
    target = new_folder(folder.name.rsplit("-", 1)[0])
    shutil.copytree(folder, target, dirs_exist_ok=True)
    return target


def edit_json(path: Path, change: Callable[[Any], Any]) -> None:
    """Rewrites a JSON file; `change` edits in place or returns what takes its place."""
    content = json.loads(path.read_text())
    changed = change(content)
    path.write_text(json.dumps(content if changed is None else changed))


def reference(folder: Path, texts: Sequence[str], *, truncate_dim: int | None = None, **options: Any) -> torch.Tensor:
    """`SentenceTransformer.encode` of the folder, on the CPU, in the dtype that the checkpoint says."""
    state = tuple((file, file.stat().st_mtime_ns) for file in sorted(folder.rglob("*.json")))
    model = _reference_model(folder, state, truncate_dim)
    return torch.from_numpy(numpy.asarray(model.encode(list(texts), show_progress_bar=False, **options)))


@lru_cache(maxsize=4)
def _reference_model(folder: Path, state: object, truncate_dim: int | None) -> SentenceTransformer:
    return SentenceTransformer(str(folder), device="cpu", truncate_dim=truncate_dim, local_files_only=True)


@contextmanager
def loaded(folder: Path | str, **engine_args: Any) -> Iterator[LLM]:
    """An `LLM` on the CPU without progress bars, closed afterwards."""
    with LLM(folder, device="cpu", use_tqdm_on_load=False, **engine_args) as llm:
        yield llm


def vectors(
    llm: LLM, prompts: Any, *params: Any, truncate_prompt_tokens: int | None = -1, **options: Any
) -> torch.Tensor:
    """Embeddings of all prompts in one batch, `[N, E]`."""
    outputs = llm.embed(prompts, *params, truncate_prompt_tokens=truncate_prompt_tokens, use_tqdm=False, **options)
    return torch.stack([output.outputs.data for output in outputs])


def embed(folder: Path | str, prompts: Any, *, engine: dict[str, Any] | None = None, **options: Any) -> torch.Tensor:
    """Embeddings by a freshly loaded engine, `[N, E]`."""
    with loaded(folder, **(engine or {})) as llm:
        return vectors(llm, prompts, **options)


def assert_close(actual: torch.Tensor, expected: torch.Tensor, *, atol: float = 1e-5) -> None:
    """Equal shapes and no element further apart than `atol`."""
    torch.testing.assert_close(actual.float(), expected.float(), atol=atol, rtol=0)
