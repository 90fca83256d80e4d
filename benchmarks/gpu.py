"""A GPU: kernels beside plain torch and the memory's speed, whole models beside transformers and sentence-transformers.

    python benchmarks/gpu.py                               # all of it: about 40 GB of disk for the weights
    python benchmarks/gpu.py --parts kernels
    python benchmarks/gpu.py --parts models --models bert-base qwen3-0.6b
    python benchmarks/gpu.py --device cpu --parts models --models tiny     # tries the script out; no figures to keep

Both sides of every comparison run in one process on one card, in bfloat16, after warming up; times are medians. Models
have random weights of the true shapes and words of one token each. transformers runs its own SDPA attention on batches
that are sorted by length and padded, sentence-transformers its `encode`; both get the batch size that is best for them
among a few. The share of a kernel is the bytes that it has to read and write, over its time, over the speed of a copy
of 1 GiB on the same card; the share of a model is 2 x its parameters outside embeddings x tokens, over the time, over
the rate of a product of 8192 x 8192 matrices.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import anypool
from anypool import LLM, PoolerConfig
from anypool.kernels import dispatch
from anypool.kernels.gated import gated
from anypool.kernels.maxsim import maxsim_pairs
from anypool.kernels.normalize_cut import normalize_cut
from anypool.kernels.rms_norm import rms_norm
from anypool.kernels.rotary import apply_rotary
from anypool.kernels.score_head import score_head
from anypool.kernels.segment_pool import METHODS, segment_pool
from anypool.kernels.segmented_lora import LoRARows, LoRAStack, segmented_lora
from anypool.kernels.token_pool import token_pool
from anypool.kernels.varlen_attention import varlen_attention

BF16 = torch.bfloat16
VOCABULARY = 30_000
DECODER = {"max_position_embeddings": 4096, "vocab_size": VOCABULARY, "pad_token_id": 0}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "tiny": (
        "Bert",
        {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128},
    ),
    "bert-base": ("Bert", {}),
    "qwen3-0.6b": (
        "Qwen3",
        {
            "hidden_size": 1024,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 3072,
        },
    ),
    "qwen3-8b": (
        "Qwen3",
        {
            "hidden_size": 4096,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 12288,
        },
    ),
}


def main() -> None:
    arguments = parse_arguments()
    device = torch.device(arguments.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        sys.exit(
            "benchmarks/gpu.py measures a GPU, and torch sees none here. Try it out with --device cpu --models tiny"
        )
    print(f"command: python {' '.join(sys.argv)}")
    print(f"{_card(device)}, {_versions()}")
    if "kernels" in arguments.parts and device.type == "cuda":
        measure_kernels(device)
    if "models" in arguments.parts:
        ceiling = matmul_rate(device)
        print(f"\nproduct of two 8192 x 8192 matrices in bfloat16: {ceiling / 1e12:.0f} TFLOP/s")
        for name in arguments.models:
            with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
                measure_model(name, Path(folder), device, ceiling)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measures kernels and models on a GPU.")
    parser.add_argument("--parts", nargs="+", choices=("kernels", "models"), default=["kernels", "models"])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[name for name in MODELS if name != "tiny"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--folder", help="where random weights are written; by default the system's temporary folder")
    return parser.parse_args()


def _card(device: torch.device) -> str:
    return "CPU" if device.type == "cpu" else torch.cuda.get_device_name(device)


def _versions() -> str:
    others = {name: _version(name) for name in ("triton", "transformers", "sentence-transformers")}
    listed = {"anypool": anypool.__version__, "torch": torch.__version__, **others}
    platform = torch.version.hip or torch.version.cuda or "none"
    return ", ".join(f"{name} {version}" for name, version in listed.items()) + f", CUDA or HIP {platform}"


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


# Kernels


def seconds(function: Callable[[], Any], device: torch.device, *, rounds: int = 30) -> float:
    """Median time of a call on the device, its launch included where that takes longer."""
    for _ in range(3):
        function()
    if device.type == "cpu":
        times = []
        for _ in range(3):
            began = time.perf_counter()
            function()
            times.append(time.perf_counter() - began)
        return statistics.median(times)
    times = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1000)
    return statistics.median(times)


def matmul_rate(device: torch.device) -> float:
    size = 8192 if device.type == "cuda" else 512
    a, b = (torch.randn(size, size, dtype=BF16, device=device) for _ in range(2))
    return 2 * size**3 / seconds(lambda: a @ b, device)


def copy_rate(device: torch.device) -> float:
    """Bytes read and written in a second by a copy of 1 GiB."""
    source = torch.empty(1 << 29, dtype=BF16, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() * 2 / seconds(lambda: target.copy_(source), device)


@contextmanager
def plain_torch() -> Iterator[None]:
    """Operations run as their references."""
    before = os.environ.get(dispatch.KERNELS)
    os.environ[dispatch.KERNELS] = "torch"
    try:
        yield
    finally:
        if before is None:
            del os.environ[dispatch.KERNELS]
        else:
            os.environ[dispatch.KERNELS] = before


def measure_kernels(device: torch.device) -> None:
    copy = copy_rate(device)
    print(f"copy of 1 GiB: {copy / 1e9:.0f} GB/s\n")
    print(f"{'kernel':<46}{'us':>9}{'plain us':>10}{'times':>7}{'GB/s':>7}{'of copy':>9}")
    for name, function, moved in kernel_calls(device):
        ours = seconds(function, device)
        with plain_torch():
            plain = seconds(function, device, rounds=10)
        rate = moved / ours
        print(
            f"{name:<46}{ours * 1e6:>9.0f}{plain * 1e6:>10.0f}{plain / ours:>7.1f}{rate / 1e9:>7.0f}{rate / copy:>9.0%}"
        )


def kernel_calls(device: torch.device) -> Iterator[tuple[str, Callable[[], Any], int]]:
    """What is measured: a name, a call, and the bytes that it has to move."""
    tokens, size = 65_536, 4096
    hidden_TD = torch.randn(tokens, size, dtype=BF16, device=device)
    read, row = hidden_TD.numel() * 2, size * 4
    for count in (16, 512):
        cu = torch.arange(0, tokens + 1, tokens // count, dtype=torch.int32, device=device)
        for method in METHODS:
            moved = (count * size * 2 if method in ("CLS", "LAST") else read) + count * row

            def pooled(method: Any = method, cu: torch.Tensor = cu) -> torch.Tensor:
                return segment_pool(hidden_TD, cu, method, normalize=True)

            yield f"segment_pool {method}, normalised, {count} sequences", pooled, moved
    yield "token_pool, normalised", lambda: token_pool(hidden_TD, finish="normalize", dtype=BF16), 2 * read
    index_S = torch.arange(0, tokens, 3, device=device)
    third = len(index_S) * size * 4
    yield "token_pool, a third of the rows", lambda: token_pool(hidden_TD, index_S=index_S, dtype=BF16), third
    rows_NE = hidden_TD.float()[:16_384]
    yield "normalize_cut", lambda: normalize_cut(rows_NE, normalize=True), 2 * rows_NE.numel() * 4
    weight_CD = torch.randn(2, size, device=device)
    yield "score_head, 2 labels", lambda: score_head(hidden_TD, weight_CD, activation="softmax"), read
    norm_D = torch.ones(size, dtype=BF16, device=device)
    yield "rms_norm with residual", lambda: rms_norm(hidden_TD, norm_D, eps=1e-6, residual=hidden_TD), 4 * read
    heads_THK = hidden_TD.view(tokens, 32, 128)
    angles = torch.randn(tokens, 1, 128, dtype=BF16, device=device)
    yield "rotary", lambda: apply_rotary(heads_THK, angles, angles), 2 * read + 2 * angles.numel() * 2
    yield "gated silu", lambda: gated(hidden_TD, "silu"), read + read // 2
    lora = LoRAStack(8, 16, size, size, dtype=BF16, device=device)
    for slot in range(8):
        lora.put(slot, hidden_TD[:16] / size, hidden_TD[:size, :16], 0.1)
    summed_TO = torch.zeros_like(hidden_TD)
    for adapters in (1, 8):
        rows = LoRARows.pack(range(adapters), [tokens // adapters] * adapters, device=device)

        def adapted(rows: LoRARows = rows) -> torch.Tensor:
            return segmented_lora(summed_TO, hidden_TD, lora, rows)

        yield f"segmented_lora, rank 16, {adapters} adapters", adapted, 3 * read
    yield from attention_calls(device)
    queries_QE, documents_DE = (torch.randn(n, 128, device=device) for n in (32, 300 * 1000))
    cu_query, cu_documents = (
        torch.tensor([0, 32], dtype=torch.int32, device=device),
        torch.arange(0, 300_001, 300, dtype=torch.int32, device=device),
    )
    pairs_P2 = torch.stack([torch.zeros(1000).long(), torch.arange(1000)], dim=1).to(device)

    def late() -> torch.Tensor:
        return maxsim_pairs(queries_QE, cu_query, documents_DE, cu_documents, pairs_P2)

    yield "maxsim, 1 query of 32, 1000 documents of 300", late, documents_DE.numel() * 4


def attention_calls(device: torch.device) -> Iterator[tuple[str, Callable[[], Any], int]]:
    """Attention is bound by products, not by memory: compare its times with each other."""
    for length, window, softcap in (
        (512, (-1, 0), None),
        (512, (-1, -1), None),
        (512, (-1, 0), 50.0),
        (4096, (511, 0), None),
    ):
        tokens = 16_384
        qkv = torch.randn(tokens, 16 + 2 * 8, 128, dtype=BF16, device=device)
        q, k, v = qkv.split([16, 8, 8], dim=1)
        cu = torch.arange(0, tokens + 1, length, dtype=torch.int32, device=device)

        def attend(
            q: Any = q,
            k: Any = k,
            v: Any = v,
            cu: Any = cu,
            length: int = length,
            window: Any = window,
            cap: Any = softcap,
        ) -> torch.Tensor:
            return varlen_attention(q, k, v, cu, length, scale=128**-0.5, window=window, softcap=cap)

        yield f"attention, {length} tokens, window {window}, cap {softcap}", attend, qkv.numel() * 2 + q.numel() * 2


# Models


def save_model(name: str, folder: Path) -> None:
    """Random weights in bfloat16, and a tokenizer of words."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    stem, values = MODELS[name]
    sizes = {"vocab_size": VOCABULARY, **values} if stem == "Bert" else {**DECODER, **values}
    config = getattr(transformers, f"{stem}Config")(**sizes)
    model_cls = transformers.BertModel if stem == "Bert" else getattr(transformers, f"{stem}ForCausalLM")
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = model_cls._from_config(config, dtype=BF16)
    model.save_pretrained(folder)
    backend = Tokenizer(models.WordLevel({"[PAD]": 0, **{f"w{i}": i for i in range(1, VOCABULARY)}}, unk_token="[PAD]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    limit = sizes.get("max_position_embeddings", 512)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="[PAD]", model_max_length=limit
    ).save_pretrained(folder)


def texts_of(lengths: list[int]) -> list[str]:
    chance = random.Random(0)
    return [" ".join(f"w{chance.randrange(1, VOCABULARY)}" for _ in range(length)) for length in lengths]


def measure_model(name: str, folder: Path, device: torch.device, ceiling: float) -> None:
    save_model(name, folder)
    chance = random.Random(1)
    short = device.type == "cpu"
    work = {
        "512 tokens each": texts_of([512] * (4 if short else 256)),
        "16 to 512 tokens": texts_of([chance.randint(16, 512) for _ in range(8 if short else 512)]),
    }
    lone = {"32 tokens": texts_of([32]), "512 tokens": texts_of([512])}
    print(f"\n{name}, random weights, bfloat16, mean of the last hidden states")
    print(f"{'':<34}" + "".join(f"{title:>26}" for title in (*work, *(f"alone, {one}" for one in lone))))
    shown: dict[str, float] = {}
    for side, run in sides(folder, device):
        cells = []
        for title, texts in work.items():
            rate = sum(len(text.split()) for text in texts) / best(run, texts, device, batches=(16, 64, 256))
            shown[f"{side} {title}"] = rate
            cells.append(f"{rate:,.0f} tokens/s")
        cells += [f"{best(run, texts, device, batches=(1,)) * 1e3:.2f} ms" for texts in lone.values()]
        print(f"{side:<34}" + "".join(f"{cell:>26}" for cell in cells))
        del run  # the model goes before the next side's comes
        gc.collect()
    parameters = linear_parameters(folder)
    rate = shown["anypool, graphs 512 tokens each"]
    print(f"share of the product's rate at 512 tokens: {2 * parameters * rate / ceiling:.0%}")


Run = Callable[[list[str], int], Any]


def best(run: Run, texts: list[str], device: torch.device, *, batches: tuple[int, ...]) -> float:
    """The least of the median times over batch sizes, results on the host."""
    return min(wall_seconds(lambda size=size: run(texts, size)) for size in batches)  # type: ignore[misc]


def wall_seconds(function: Callable[[], Any]) -> float:
    for _ in range(2):
        function()
    times = []
    for _ in range(5):
        began = time.perf_counter()
        function()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def sides(folder: Path, device: torch.device) -> Iterator[tuple[str, Run]]:
    """Each side, loaded, one after the other so that they do not share the memory: who runs one must let go of it."""
    yield from anypool_side(folder, device, "anypool, graphs", enforce_eager=False)
    yield from anypool_side(folder, device, "anypool, eager", enforce_eager=True)
    yield from transformers_side(folder, device)
    yield from sentence_transformers_side(folder, device)


def anypool_side(folder: Path, device: torch.device, title: str, *, enforce_eager: bool) -> Iterator[tuple[str, Run]]:
    settings: dict[str, Any] = {"dtype": "bfloat16", "device": str(device), "use_tqdm_on_load": False}
    pooling = PoolerConfig(pooling_type="MEAN", normalize=True)
    with LLM(folder, enforce_eager=enforce_eager, pooler_config=pooling, **settings) as llm:
        yield title, lambda texts, size: llm.embed(texts, use_tqdm=False)


def transformers_side(folder: Path, device: torch.device) -> Iterator[tuple[str, Run]]:
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder, dtype=BF16, attn_implementation="sdpa").to(device).eval()

    @torch.inference_mode()
    def run(texts: list[str], size: int) -> list[torch.Tensor]:
        ordered = sorted(texts, key=len)
        rows = []
        for start in range(0, len(ordered), size):
            batch = tokenizer(ordered[start : start + size], padding=True, return_tensors="pt").to(device)
            batch.pop("token_type_ids", None)
            states = model(**batch).last_hidden_state.float()
            mask = batch["attention_mask"].unsqueeze(-1)
            means = (states * mask).sum(1) / mask.sum(1)
            rows.append(torch.nn.functional.normalize(means, dim=-1).cpu())
        return rows

    yield "transformers, SDPA, eager", run


def sentence_transformers_side(folder: Path, device: torch.device) -> Iterator[tuple[str, Run]]:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Normalize, Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    backbone = Transformer(str(folder), model_kwargs={"dtype": BF16})
    modules = [backbone, Pooling(backbone.get_embedding_dimension(), "mean"), Normalize()]
    model = SentenceTransformer(modules=modules, device=str(device))
    yield (
        "sentence-transformers",
        lambda texts, size: model.encode(texts, batch_size=size, show_progress_bar=False),
    )


def linear_parameters(folder: Path) -> int:
    """Parameters of the products of one token: all matrices but those of embeddings and the LM head."""
    import transformers

    with torch.device("meta"):
        model = transformers.AutoModel.from_config(transformers.AutoConfig.from_pretrained(folder))
    return sum(
        p.numel()
        for name, p in model.named_parameters()
        if p.dim() == 2 and "embed" not in name and "pooler" not in name
    )


if __name__ == "__main__":
    main()
