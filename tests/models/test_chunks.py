"""Prompts in chunks, and prompts that share cached keys, have the hidden states of the whole prompt alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from anypool.errors import EngineError
from anypool.model_executor.attention import PrefixKeys
from anypool.model_executor.kv_store import KVStore
from anypool.model_executor.packed_batch import PackedBatch
from anypool.model_executor.pooling_model_runner import PoolingModelRunner
from tests.models.parity import (
    CPU,
    Part,
    PoisonedStore,
    chunked_states,
    load,
    pack_parts,
    random_ids,
    reference_states,
    run,
    save_random,
)
from tests.models.test_native_parity import DECODER, DECODERS, ENCODER, ENCODERS, rope
from tests.models.test_transformers_backend import GQA, save

CAUSAL = [name for name in DECODERS if not name.endswith("-bidirectional")]
THROUGH_TRANSFORMERS = [
    "cohere2",
    "diffllama",  # calls attention twice with values of twice the size
    "gpt2",
    "gpt_neox",
    "gpt_oss",
    "granite",
    "mixtral",
    "olmo2",
    "opt",
    "phi3",
    "smollm3",
    "stablelm",
]
LENGTHS = (1, 7, 63, 130, 64)
FORGETFUL = ("llama-dynamic", "llama-longrope")  # the reference remembers lengths: each text gets a fresh one


def save_native(name: str, folder: Path) -> Any:
    model_cls, config_cls, changes = {**DECODERS, **ENCODERS}[name]
    sizes = DECODER if name in DECODERS else ENCODER
    model = model_cls._from_config(config_cls(**{**sizes, **changes}), attn_implementation="eager")
    save_random(model, folder)
    return model


def expected_states(name: str, folder: Path, texts: list[list[int]]) -> torch.Tensor:
    model = save_native(name, folder)
    if name not in FORGETFUL:
        return reference_states(model, texts)
    fresh = [type(model).from_pretrained(folder, attn_implementation="eager") for _ in texts]
    return torch.cat([reference_states(m, [text]) for m, text in zip(fresh, texts, strict=True)])


@pytest.mark.parametrize("name", CAUSAL)
def test_chunks_equal_the_whole_prompt(name: str, tmp_path: Path) -> None:
    texts = random_ids(120, LENGTHS)
    expected = expected_states(name, tmp_path, texts)
    model = load(tmp_path)
    assert model.takes_prefix
    for block_size, longest in ((16, 50), (3, 7)):
        actual = chunked_states(model, texts, block_size=block_size, longest=longest)
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", THROUGH_TRANSFORMERS)
def test_chunks_through_transformers_equal_the_whole_prompt(name: str, tmp_path: Path) -> None:
    texts = random_ids(120, LENGTHS)
    expected = reference_states(save(name, tmp_path), texts)
    model = load(tmp_path, model_impl="transformers")
    assert model.takes_prefix
    actual = chunked_states(model, texts, block_size=16, longest=50)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["llama", "llama-yarn", "mistral-sliding", "gemma2", "gemma3"])
def test_a_prefix_may_be_computed_in_the_batch_that_reads_it(name: str, tmp_path: Path) -> None:
    [prefix] = random_ids(120, (40,))
    texts = [prefix + tail for tail in random_ids(120, (9, 1, 30, 9, 17))]
    expected = reference_states(save_native(name, tmp_path), texts).split([len(ids) for ids in texts])
    store, blocks = PoisonedStore(8, 8, CPU), [6, 1, 7, 0, 3]
    parts = [Part(ids, 40, len(ids), blocks, stored=0) for ids in texts]
    parts[2] = Part(texts[2], 0, len(texts[2]), blocks, stored=40)  # not the first: order must not matter
    batch = pack_parts(parts, store)
    actual = run(load(tmp_path), batch).split(batch.attn.lengths)
    for part, states_LD, whole_LD in zip(parts, actual, expected, strict=True):
        torch.testing.assert_close(states_LD, whole_LD[part.start :], atol=1e-5, rtol=0)


def test_two_chunks_of_one_prompt_may_be_in_one_batch(tmp_path: Path) -> None:
    [ids] = random_ids(120, (50,))
    expected = reference_states(save_native("llama", tmp_path), [ids])
    parts = [Part(ids, 0, 21, [1, 0, 2, 3], 21), Part(ids, 21, 50, [1, 0, 2, 3], 21)]
    actual = run(load(tmp_path), pack_parts(parts, PoisonedStore(4, 16, CPU)))
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_prompts_share_keys_where_their_rotary_frequencies_are_equal(rope_type: str, tmp_path: Path) -> None:
    save_native(f"llama-{rope_type}", tmp_path)
    lengths = load(tmp_path).config.frequency_lengths
    assert lengths(3) == lengths(64) != lengths(65)
    assert (lengths(65) == lengths(130)) == (rope_type == "longrope")


@pytest.mark.parametrize("name", ["llama-bidirectional", "gemma3-bidirectional", "bert", "modernbert"])
def test_a_model_that_is_not_causal_takes_no_prefix(name: str, tmp_path: Path) -> None:
    save_native(name, tmp_path)
    assert not load(tmp_path).takes_prefix
    assert not load(tmp_path, model_impl="transformers").takes_prefix


def test_a_causal_model_through_transformers_turned_bidirectional_takes_no_prefix(tmp_path: Path) -> None:
    save("granite", tmp_path)
    assert not load(tmp_path, hf_overrides={"is_causal": False}).takes_prefix


@pytest.mark.parametrize(
    ("config_cls", "changes"),
    [
        (hf.GraniteConfig, rope("dynamic", factor=4.0)),
        (
            hf.Phi3Config,
            rope(
                "longrope",
                long_factor=[2.0] * 4,
                short_factor=[1.0] * 4,
                original_max_position_embeddings=64,
                factor=2.5,
            ),
        ),
        (
            hf.Gemma3TextConfig,
            {
                "head_dim": 8,
                "layer_types": ["sliding_attention", "full_attention"],
                "rope_parameters": {
                    "full_attention": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                },
            },
        ),
    ],
)
def test_transformers_rotary_that_depends_on_length_takes_no_prefix(
    config_cls: Any, changes: dict[str, Any], tmp_path: Path
) -> None:
    save_random(hf.AutoModelForCausalLM.from_config(config_cls(**{**GQA, **changes})), tmp_path)
    assert not load(tmp_path, model_impl="transformers").takes_prefix


def test_the_probe_notices_positions_that_restart_with_a_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from anypool.model_executor.models.transformers_backend import TransformersModel

    forward = TransformersModel.forward

    def broken(self: Any, ids: torch.Tensor, positions: torch.Tensor, attn: Any, **kwargs: Any) -> torch.Tensor:
        return forward(self, ids, torch.cat([torch.arange(n) for n in attn.lengths]), attn, **kwargs)

    save("gpt2", tmp_path)
    monkeypatch.setattr(TransformersModel, "forward", broken)
    assert not load(tmp_path).takes_prefix


def test_positions_and_prompt_lengths_of_a_chunk_are_those_of_the_prompt() -> None:
    [ids] = random_ids(120, (30,))
    parts = [Part(ids, 10, 14, [0, 1], 14), Part(ids, 0, 2, [2], 2)]
    batch = pack_parts(parts, KVStore(3, 8, CPU))
    assert batch.positions_T.tolist() == [10, 11, 12, 13, 0, 1]
    assert batch.segments.cu_seqlens.tolist() == [0, 4, 6]
    assert batch.attn.prompt_lengths == (30, 30)
    whole = PackedBatch.pack([ids], device=CPU)
    assert whole.attn.prompt_lengths == whole.attn.lengths


class Calls(torch.nn.Module):
    """Calls attention so many times."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.calls = calls

    def forward(self, input_ids_T: torch.Tensor, positions_T: torch.Tensor, attn: Any, **_: Any) -> torch.Tensor:
        for _call in range(self.calls):
            attn.prefix.store_own(torch.zeros(len(input_ids_T), 1, 2), torch.zeros(len(input_ids_T), 1, 2))
        return torch.zeros(len(input_ids_T), 2)

    def pooler(self, *_: Any) -> list[Any]:
        return []


def test_a_forward_that_passes_cached_keys_by_is_an_error() -> None:
    batch = pack_parts([Part([5, 6], 0, 2, [0], 2)], KVStore(1, 8, CPU))
    with pytest.raises(EngineError, match="called attention 0 times: a class with takes_prefix = True"):
        PoolingModelRunner(Calls(0), CPU).run(batch, [])


def test_a_forward_with_another_number_of_layers_is_an_error() -> None:
    batch = pack_parts([Part([5, 6], 0, 2, [0], 2)], KVStore(1, 8, CPU))
    for _ in range(2):  # the same batch may run again, as one does that failed
        PoolingModelRunner(Calls(3), CPU).run(batch, [])
    with pytest.raises(EngineError, match="called attention 2 times, and one before it 3 times"):
        PoolingModelRunner(Calls(2), CPU).run(batch, [])
    with pytest.raises(AssertionError, match="3 calls of attention, and one more"):
        PoolingModelRunner(Calls(4), CPU).run(batch, [])


def test_hidden_states_are_read_as_they_were_written() -> None:
    store = KVStore(3, 4, CPU)
    slots_S, rows_SD = torch.tensor([5, 0, 11]), torch.randn(3, 6, dtype=torch.bfloat16)
    with torch.inference_mode():
        store.write_hidden(slots_S, rows_SD)
    store.write_hidden(slots_S[:1], rows_SD[1:2])
    assert torch.equal(store.read_hidden(torch.tensor([0, 5, 11])), rows_SD[[1, 1, 2]])


def test_a_chunk_is_stored_in_the_slots_of_its_blocks() -> None:
    prefix = PrefixKeys.plan(
        KVStore(9, 4, CPU), starts=(3, 0, 8), lengths=(4, 5, 3), block_tables=([7, 2], [5], [1, 4]), stored=(6, 4, 0)
    )
    assert prefix.rows_S.tolist() == [0, 1, 2, 4, 5, 6, 7]
    assert prefix.slots_S.tolist() == [31, 8, 9, 20, 21, 22, 23]
    assert [table.tolist() for table in prefix.block_tables] == [[7, 2], [5], [1, 4]]
