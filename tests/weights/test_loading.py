"""A checkpoint either loads with every tensor in its place, or fails with one error that names what is wrong."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel

from anypool.adapters.load import load_pooling_model
from anypool.config import EngineConfig
from anypool.errors import CheckpointFormatError, ModelNotFoundError, WeightsError
from anypool.model_executor.weights.checkpoint import PickleCheckpoint, SafetensorsCheckpoint, open_checkpoint
from anypool.model_executor.weights.repository import Repository
from tests.helpers import (
    RAGGED,
    assert_close,
    copy_of,
    edit_json,
    embed,
    reference,
    tiny_bert,
    tiny_llama,
)

Tensors = dict[str, torch.Tensor]


def refuse(folder: Path, kind: type[Exception], match: str) -> None:
    with pytest.raises(kind, match=match) as caught:
        load_pooling_model(EngineConfig(model=str(folder), device="cpu", use_tqdm_on_load=False))
    assert type(caught.value) is kind


def with_tensors(folder: Path, change: Callable[[Tensors], Tensors | None]) -> Path:
    """A copy of a checkpoint with its tensors edited."""
    folder = copy_of(folder)
    tensors = load_file(folder / "model.safetensors")
    save_file(change(tensors) or tensors, folder / "model.safetensors")
    return folder


def as_pickle(folder: Path, **options: Any) -> Path:
    """A copy of a checkpoint with `pytorch_model.bin` in place of safetensors."""
    folder = copy_of(folder)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin", **options)
    (folder / "model.safetensors").unlink()
    return folder


def in_shards(folder: Path, count: int = 3, *, suffix: str = "safetensors") -> Path:
    """A copy of a checkpoint in shards with an index."""
    folder = copy_of(folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    stem = "model" if suffix == "safetensors" else "pytorch_model"
    weight_map = {}
    for number in range(count):
        names = sorted(tensors)[number::count]
        file = f"{stem}-{number + 1:05}-of-{count:05}.{suffix}"
        part = {name: tensors[name] for name in names}
        save_file(part, folder / file) if suffix == "safetensors" else torch.save(part, folder / file)
        weight_map |= dict.fromkeys(names, file)
    (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


LAYOUTS: dict[str, Callable[[Path], Path]] = {
    "safetensors": lambda folder: folder,
    "sharded safetensors": in_shards,
    "bin": as_pickle,
    "bin of torch before 1.6": lambda folder: as_pickle(folder, _use_new_zipfile_serialization=False),
    "sharded bin": lambda folder: in_shards(folder, suffix="bin"),
}


@pytest.mark.parametrize("make", [tiny_bert, tiny_llama], ids=["bert", "llama"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_every_layout_gives_the_numbers_of_the_reference(
    make: Callable[[], Path], layout: Callable[[Path], Path]
) -> None:
    assert_close(embed(layout(make()), RAGGED), reference(make(), RAGGED, normalize_embeddings=True))


def test_checkpoints_of_the_causal_lm_and_of_the_bare_model_give_equal_numbers() -> None:
    whole = tiny_llama()
    bare = with_tensors(
        whole, lambda t: {k.removeprefix("model."): v for k, v in t.items() if not k.startswith("lm_head")}
    )
    assert not any(name.startswith("model.") for name in load_file(bare / "model.safetensors"))
    assert_close(embed(bare, RAGGED), embed(whole, RAGGED), atol=0)


def test_encoders_saved_with_a_head_give_the_numbers_of_the_bare_encoder() -> None:
    def change(tensors: Tensors) -> Tensors:
        head = {"cls.predictions.bias": torch.zeros(157), "cls.seq_relationship.weight": torch.zeros(2, 32)}
        return {f"bert.{name}": tensor for name, tensor in tensors.items()} | head

    folder = with_tensors(tiny_bert(), change)
    edit_json(folder / "config.json", lambda config: config.update(architectures=["BertForPreTraining"]))
    assert_close(embed(folder, RAGGED), embed(tiny_bert(), RAGGED), atol=0)


def test_the_lm_head_is_neither_allocated_nor_read(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_llama()
    assert "lm_head.weight" in load_file(folder / "model.safetensors")
    requested: set[str] = set()
    read = SafetensorsCheckpoint.tensors

    def spy(self: Any, wanted: set[str]) -> Any:
        requested.update(wanted)
        return read(self, wanted)

    monkeypatch.setattr(SafetensorsCheckpoint, "tensors", spy)
    model: Any = load_pooling_model(EngineConfig(model=str(folder), device="cpu")).model
    assert "model.embed_tokens.weight" in requested
    assert "lm_head.weight" not in requested
    assert model.lm_head is None
    backbone = AutoModel.from_pretrained(folder)
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in backbone.parameters())


# What is refused: files


def test_a_missing_shard_is_named() -> None:
    folder = in_shards(tiny_bert())
    (folder / "model-00002-of-00003.safetensors").unlink()
    refuse(folder, CheckpointFormatError, "shards that are not there: model-00002-of-00003.safetensors")


@pytest.mark.parametrize("index", ["{", "[]", '{"metadata": {}}', '{"weight_map": ["a"]}', '{"weight_map": {"a": 3}}'])
def test_an_index_that_is_none_is_named(index: str) -> None:
    folder = in_shards(tiny_bert())
    (folder / "model.safetensors.index.json").write_text(index)
    refuse(folder, CheckpointFormatError, "model.safetensors.index.json is not a valid index")


@pytest.mark.parametrize("keep", [0, 4, 100, 0.5, 0.99])
@pytest.mark.parametrize("make", [lambda: copy_of(tiny_bert()), lambda: as_pickle(tiny_bert())], ids=["st", "bin"])
def test_a_file_that_is_cut_short_is_named(make: Callable[[], Path], keep: float) -> None:
    folder = make()
    [file] = [f for f in folder.iterdir() if f.suffix in (".safetensors", ".bin")]
    content = file.read_bytes()
    file.write_bytes(content[: int(keep * len(content)) if isinstance(keep, float) else keep])
    refuse(folder, CheckpointFormatError, f"{file.name} cannot be read")


def test_a_pointer_of_git_lfs_is_named() -> None:
    folder = copy_of(tiny_bert())
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    refuse(folder, CheckpointFormatError, "Git LFS pointer.*git lfs pull")


def test_a_folder_without_weights_says_what_was_expected() -> None:
    folder = copy_of(tiny_bert())
    (folder / "model.safetensors").unlink()
    refuse(folder, ModelNotFoundError, "has no weights: expected model.safetensors, its shards.*pytorch_model.bin")


def test_a_pickle_never_runs_code(tmp_path: Path) -> None:
    victim = tmp_path / "victim"

    class Evil:
        def __reduce__(self) -> Any:
            return (victim.write_text, ("ran",))

    folder = as_pickle(tiny_bert())
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"embeddings.word_embeddings.weight": Evil()}))
    refuse(folder, CheckpointFormatError, "pytorch_model.bin cannot be read as plain tensors")
    torch.save({"embeddings.word_embeddings.weight": Evil()}, folder / "pytorch_model.bin")
    refuse(folder, CheckpointFormatError, "pytorch_model.bin cannot be read as plain tensors")
    assert not victim.exists()


@pytest.mark.parametrize("content", [[torch.ones(2)], {"a": 3}, torch.ones(2), {"state_dict": {"a": torch.ones(2)}}])
def test_a_pickle_of_something_else_is_named(tmp_path: Path, content: Any) -> None:
    torch.save(content, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointFormatError, match=r"pytorch_model.bin is not a table of tensors by name"):
        PickleCheckpoint([tmp_path / "pytorch_model.bin"])


def test_safetensors_are_preferred_to_pickles() -> None:
    folder = copy_of(tiny_bert())
    (folder / "pytorch_model.bin").write_bytes(b"never looked at")
    assert isinstance(open_checkpoint(Repository.open(str(folder))), SafetensorsCheckpoint)


# What is refused: tensors

QUERY = "encoder.layer.1.attention.self.query.weight"


def test_missing_tensors_are_named() -> None:
    folder = with_tensors(tiny_bert(), lambda t: t.__delitem__(QUERY))
    refuse(folder, WeightsError, "1 tensors that the model needs are missing: layers.1.attention.q_proj.weight")


def test_tensors_without_a_place_are_named() -> None:
    folder = with_tensors(tiny_bert(), lambda t: t.update({"adapter.down.weight": torch.ones(2, 2)}))
    refuse(folder, WeightsError, "1 tensors have no place in the model: adapter.down.weight")


def test_missing_and_left_over_tensors_are_counted_where_they_are_many() -> None:
    folder = with_tensors(tiny_llama(), lambda t: {f"wrapped.{name}": tensor for name, tensor in t.items()})
    refuse(folder, WeightsError, "20 tensors that the model needs are missing: .*, and 15 more; 20 tensors have no")


@pytest.mark.parametrize("shape", [(32, 31), (31, 32), (32,), (32, 32, 1), (1024,)])
def test_tensors_of_a_wrong_shape_are_named(shape: tuple[int, ...]) -> None:
    folder = with_tensors(tiny_bert(), lambda t: t.update({QUERY: torch.ones(shape)}))
    refuse(folder, WeightsError, rf"tensor '{QUERY}' has shape \[.*\], the model expects \[32, 32\]")


def test_a_tensor_given_twice_is_named() -> None:
    folder = with_tensors(tiny_llama(), lambda t: t.update({"norm.weight": torch.ones(32)}))
    refuse(
        folder,
        WeightsError,
        "'model.norm.weight' and 'norm.weight' are both meant|'norm.weight' and 'model.norm.weight'",
    )


# What is refused: settings


def test_a_missing_folder_file_or_config_is_named(tmp_path: Path) -> None:
    refuse(tmp_path / "nowhere", ModelNotFoundError, "nowhere: no such folder or .gguf file")
    refuse(tmp_path / "nowhere.gguf", ModelNotFoundError, "nowhere.gguf: no such folder or .gguf file")
    refuse(tmp_path, ModelNotFoundError, "has no config.json")
    (tmp_path / "weights.bin").write_text("")
    refuse(tmp_path / "weights.bin", ModelNotFoundError, "is a file; give the checkpoint's folder")


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ("", "config.json is not valid JSON"),
        ('{"model_type": ', "config.json is not valid JSON"),
        ("\xff\xfe", "config.json is not valid JSON"),
        ("[]", "config.json is not an object"),
        ("{}", "config.json has model_type None, not a name"),
        ('{"model_type": "bert", "architectures": [1]}', r"architectures \[1\], not a list of names"),
        ('{"model_type": "llama", "hidden_size": "5"}', "hidden_size='5'; it must be an integer from 1 to"),
        (
            '{"model_type": "llama", "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1e30}',
            "it must be an integer from 1 to 10,000",
        ),
        ("[" * 100_000, "is not valid JSON"),
        ("null", "config.json holds null"),
        ('{"model_type": "bert", "architectures": ["BertModel"]}', "config.json has no 'hidden_size'"),
    ],
)
def test_a_config_that_is_damaged_is_named(content: str, match: str) -> None:
    folder = copy_of(tiny_bert())
    (folder / "config.json").write_text(content, encoding="latin-1")
    refuse(folder, CheckpointFormatError, match)


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_a_tensor_that_is_no_plain_float_is_named(dtype: torch.dtype) -> None:
    folder = copy_of(tiny_bert())
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if name.endswith("query.weight"))
    tensors[name] = tensors[name].to(dtype)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    refuse(folder, WeightsError, f"{name}' is {dtype}; weights are float32")


@pytest.mark.parametrize("content", [b"", b"GGUF", b"not a gguf file at all" * 20])
def test_a_damaged_gguf_file_is_named(tmp_path: Path, content: bytes) -> None:
    pytest.importorskip("gguf")
    (tmp_path / "model.gguf").write_bytes(content)
    refuse(tmp_path / "model.gguf", CheckpointFormatError, "model.gguf")


def test_an_infinite_number_in_config_json_is_read_as_transformers_writes_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"time_step_limit": [0.0, {"__float__": "Infinity"}]}')
    assert Repository("m", tmp_path).read_config() == {"time_step_limit": [0.0, float("inf")]}
