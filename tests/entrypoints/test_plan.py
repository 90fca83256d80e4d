"""`anypool plan`: its arithmetic, what it reads, and that its documentation shows what it prints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling
from transformers import AutoTokenizer

from anypool.adapters.opened import open_model
from anypool.config import EngineConfig
from anypool.entrypoints.cli import main
from anypool.entrypoints.plan.devices import GPUS
from anypool.model_executor.gpu_memory import per_token
from anypool.model_executor.outline import Outline
from anypool.model_executor.weights.repository import Repository
from anypool.model_executor.weights.stored import stored_bytes
from tests.helpers import HIDDEN, RAGGED, save_sentence_transformer, tiny_bert, tiny_llama
from tests.test_docs import ROOT, fences, page_text, shell_lines, table

# As published; the sizes alone are read.
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "dtype": "bfloat16", "vocab_size": 151669,
    "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 3072, "max_position_embeddings": 32768, "rope_theta": 1000000, "rms_norm_eps": 1e-6,
    "hidden_act": "silu", "tie_word_embeddings": True, "attention_bias": False,
}  # fmt: skip
MINILM = {
    "architectures": ["BertModel"], "model_type": "bert", "vocab_size": 30522, "hidden_size": 384,
    "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536, "max_position_embeddings": 512,
    "type_vocab_size": 2, "layer_norm_eps": 1e-12, "hidden_act": "gelu", "pad_token_id": 0,
}  # fmt: skip
LLAMA_70B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", "vocab_size": 128256,
    "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
    "intermediate_size": 28672, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "tie_word_embeddings": False,
}  # fmt: skip


def only_config(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@pytest.fixture
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory with the configurations, and nothing more, of models that the documentation names."""
    only_config(tmp_path / "Qwen" / "Qwen3-Embedding-0.6B", QWEN3)
    only_config(tmp_path / "sentence-transformers" / "all-MiniLM-L6-v2", MINILM)
    only_config(tmp_path / "meta-llama" / "Llama-3.1-70B", LLAMA_70B)
    monkeypatch.chdir(tmp_path)


def plan(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert main(["plan", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def complaint(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["plan", *words]) == 2
    return capsys.readouterr().err


@pytest.mark.usefixtures("published")
def test_the_sums_follow_from_the_model_and_the_device(capsys: pytest.CaptureFixture[str]) -> None:
    facts = plan(
        capsys, "Qwen/Qwen3-Embedding-0.6B", "--docs", "10e9", "--tokens", "200", "--gpu", "h100",
        "--price-per-hour", "2.5", "--days", "30", "--share", "0.25-0.5",
    )  # fmt: skip
    layer = 1024 * (16 + 2 * 8) * 128 + 16 * 128 * 1024 + 3 * 1024 * 3072
    assert facts["parameters"] == 151669 * 1024 + 28 * (layer + 2 * 1024 + 2 * 128) + 1024
    attention = 28 * 4 * 16 * 128 * 200 * 201 // 2
    flop = 10**10 * (200 * 2 * 28 * layer + attention)
    assert facts["work"]["flop"] == pytest.approx(flop, rel=1e-12)
    seconds = [flop / (share * 989e12) for share in (0.5, 0.25)]
    total = facts["total"]
    assert total["device_hours"] == pytest.approx([one / 3600 for one in seconds])
    assert total["cost"] == pytest.approx([2.5 * one / 3600 for one in seconds])
    assert total["devices"] == [-int(-one // (30 * 86400)) for one in seconds]
    assert facts["speed"]["tokens_per_s_per_device"] == pytest.approx([2e12 / one for one in reversed(seconds)])
    assert facts["storage"]["dimensions"] == 1024
    assert facts["storage"]["vectors"]["binary"] == 10**10 * 128
    assert facts["storage"]["index"]["HNSW32"] == 10**10 * (4 * 1024 + 2 * 32 * 4)


@pytest.mark.usefixtures("published")
def test_a_model_that_does_not_fit_is_split_over_the_fewest_devices(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("meta-llama/Llama-3.1-70B", "--docs", "1e6", "--tokens", "100", "--gpu")
    opened = open_model(EngineConfig(model=words[0]), weights=False)
    outline = Outline.of(opened.config, opened.backbone)
    beside = per_token(opened.config, torch.bfloat16) * 16384
    for gpu in ("h100", "l4"):
        limit = int(GPUS[gpu].memory * 0.9)
        expected = next(
            n for n in range(1, 65) if 64 % n == 28672 % n == 0 and 2 * outline.parameters / n + beside <= limit
        )
        memory = plan(capsys, *words, gpu)["memory"]
        assert memory["devices_per_model"] == expected
        assert memory["needed"] <= memory["limit"] == limit
    one, split = (plan(capsys, *words, gpu)["speed"]["tokens_per_s_per_device"] for gpu in ("h200", "h100"))
    assert one == pytest.approx(split)


@pytest.mark.usefixtures("published")
def test_what_memory_reads_bounds_small_batches(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("Qwen/Qwen3-Embedding-0.6B", "--docs", "1", "--tokens", "8", "--gpu", "l4")
    facts = plan(capsys, *words, "--max-num-batched-tokens", "16")
    widths = 28 * ((1024 + 4096) + (2048 + 1024) + (1024 + 2 * 3072) + (3072 + 1024))
    expected = 0.3e12 / (2 * facts["parameters"] / 16 + 2 * widths)
    assert facts["speed"]["tokens_per_s_per_device"] == pytest.approx([expected] * 2)


def test_this_machines_cpu_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    facts = plan(capsys, str(tiny_bert()), "--docs", "100", "--tokens", "16")
    assert facts["device"]["name"] == "cpu"
    assert facts["device"]["flop_per_s"] > 1e9
    assert facts["memory"]["devices_per_model"] == 1


def test_lengths_of_a_sample_are_those_of_the_models_tokenizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sample = tmp_path / "some.jsonl"
    sample.write_text("".join(json.dumps({"body": text}) + "\n" for text in RAGGED), encoding="utf-8")
    words = (str(tiny_llama()), "--docs", "1000", "--gpu", "a10")
    facts = plan(capsys, *words, "--input", str(sample), "--input-field", "body")
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama())
    counts = [len(ids) for ids in tokenizer(RAGGED, truncation=True)["input_ids"]]
    assert facts["work"]["tokens_per_document"] == pytest.approx(sum(counts) / len(counts))
    each = [plan(capsys, *words, "--tokens", str(count))["work"]["flop"] for count in counts]
    assert facts["work"]["flop"] == pytest.approx(sum(each) / len(each))


def test_vectors_are_as_long_as_the_last_dense_gives(capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_sentence_transformer(
        tiny_bert(), Pooling(HIDDEN, "mean"), Dense(HIDDEN, 20), Normalize(), truncate_dim=16
    )
    words = (str(folder), "--docs", "3", "--tokens", "5", "--gpu", "l4")
    assert plan(capsys, *words)["storage"]["dimensions"] == 16
    assert plan(capsys, *words, "--dimensions", "20")["storage"]["vectors"]["binary"] == 3 * 3
    assert "it supports 1 to 20" in complaint(capsys, *words, "--dimensions", "21")


def test_bytes_in_files_are_those_of_their_tensors(tmp_path: Path) -> None:
    tensors = load_file(tiny_llama() / "model.safetensors")
    assert stored_bytes(Repository.open(str(tiny_llama()))) == sum(one.nbytes for one in tensors.values())
    index = {"metadata": {"total_size": 77}, "weight_map": {"a": "model-00001-of-00001.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert stored_bytes(Repository.open(str(tmp_path))) == 77
    assert stored_bytes(Repository.open(str(tmp_path.parent))) is None


def test_a_hub_id_needs_its_configuration_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    commit = "0" * 40
    cached = tmp_path / "models--org--model"
    only_config(cached / "snapshots" / commit, MINILM)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(commit)
    facts = plan(capsys, "org/model", "--download-dir", str(tmp_path), "--docs", "1", "--tokens", "9", "--gpu", "l4")
    assert facts["model"] == "org/model"
    assert facts["memory"]["weights_in_files"] is None


@pytest.mark.usefixtures("published")
def test_mistakes_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("sentence-transformers/all-MiniLM-L6-v2", "--docs", "5")
    assert "gpu='h1000' is unknown; known: b200, h200" in complaint(capsys, *words, "--tokens", "9", "--gpu", "h1000")
    assert "give --tokens, or --input" in complaint(capsys, *words)
    assert "give --docs" in complaint(capsys, words[0], "--tokens", "9")
    assert "takes 1 to 512" in complaint(capsys, *words, "--tokens", "513", "--gpu", "l4")
    for flag, value in (("--docs", "0"), ("--docs", "1.5"), ("--days", "-1"), ("--share", "0.5-0.2"), ("--share", "2")):
        with pytest.raises(SystemExit) as exit_:
            main(["plan", *words, "--tokens", "9", flag, value])
        assert exit_.value.code == 2
    capsys.readouterr()
    for flag in ("--docs", "--days", "--share"):
        with pytest.raises(SystemExit):
            main(["plan", *words, flag, "lots"])
        assert f"argument {flag}: 'lots' is not a number" in capsys.readouterr().err


@pytest.mark.usefixtures("published")
def test_the_documentation_shows_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    page = ROOT / "docs" / "scaling.md"
    shown = [fence for fence in fences(page) if fence.language == "bash" and fence.output is not None]
    assert len(shown) >= 2
    for fence in shown:
        assert main(fence.code.replace("\\\n", " ").split()[1:]) == 0
        assert capsys.readouterr().out == fence.output
    assert any(line.startswith("anypool plan") for line in shell_lines(ROOT / "docs" / "cli.md"))


def test_the_table_of_devices_is_that_of_the_code() -> None:
    rows = table(page_text("scaling.md"), "| `--gpu` | memory | bfloat16, float16 | float32 | bandwidth |")
    documented = {name.strip("`"): [float(cell.replace(",", "")) for cell in cells[:4]] for name, *cells in rows}
    assert documented == {
        name: [
            gpu.memory / (1 << 30),
            round(gpu.flops[torch.bfloat16] / 1e12, 1),
            round(gpu.flops[torch.float32] / 1e12, 1),
            round((gpu.bandwidth or 0) / 1e12, 3),
        ]
        for name, gpu in GPUS.items()
    }
