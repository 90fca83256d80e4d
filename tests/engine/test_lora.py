"""Adapters in one engine: several in a batch, few in memory, none seen by requests of another."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM

from anypool import LLM, AsyncEngine, EmbeddingRequestOutput, LoRARequest
from anypool.config import EngineConfig
from anypool.engine.preparation import PromptOptions
from anypool.errors import (
    AnypoolError,
    CheckpointFormatError,
    ConfigError,
    InvalidParameterError,
    InvalidRequestError,
    ModelNotFoundError,
    UnsupportedArchitectureError,
    WeightsError,
)
from tests.adapters.lora_checkpoints import TEXTS, adapter, assert_as_peft, base, request, states
from tests.helpers import RAGGED, copy_of, edit_json, loaded

TARGETS = {
    "llama": ["q_proj", "v_proj", "gate_proj", "embed_tokens"],
    "bert": ["query", "dense", "word_embeddings"],
    "gpt2": ["c_attn", "c_fc"],
}


def several(family: str, count: int) -> list[Path]:
    cls = AutoModel if family == "bert" else AutoModelForCausalLM
    return [
        adapter(base(family), cls=cls, seed=seed, target_modules=TARGETS[family][seed % 2 :], r=2 + seed % 3)[0]
        for seed in range(count)
    ]


def token_vectors(llm: LLM, texts: Any, lora: Any = None) -> list[torch.Tensor]:
    outputs = llm.token_embed(texts, lora_request=lora, truncate_prompt_tokens=-1, use_tqdm=False)
    return [output.outputs.data for output in outputs]


def embedded(llm: LLM, text: str, lora: Any = None) -> EmbeddingRequestOutput:
    [output] = llm.embed(text, lora_request=lora, truncate_prompt_tokens=-1, use_tqdm=False)
    return output


@pytest.mark.parametrize(
    ("family", "engine"),
    [
        ("llama", {}),
        ("llama", {"max_loras": 2}),
        ("llama", {"enable_prefix_caching": True}),
        ("llama", {"dtype": "bfloat16"}),
        ("bert", {}),
        ("gpt2", {}),
    ],
    ids=["llama", "two-at-once", "prefix-cache", "bfloat16", "bert", "transformers"],
)
def test_a_batch_of_the_base_and_three_adapters_equals_four_runs(family: str, engine: dict[str, Any]) -> None:
    folders = several(family, 3)
    adapters = [None, *(request(folder, number) for number, folder in enumerate(folders, start=1))]
    texts = [text for text in RAGGED for _ in adapters]
    with loaded(base(family), enable_lora=True, **engine) as llm:
        together = token_vectors(llm, texts, adapters * len(RAGGED))
        apart = {one: token_vectors(llm, RAGGED, one) for one in adapters}
    tolerance = 2e-2 if "dtype" in engine else 1e-6
    for index, found in enumerate(together):
        alone = apart[adapters[index % len(adapters)]][index // len(adapters)]
        torch.testing.assert_close(found, alone, atol=tolerance, rtol=0)
    first = [vectors[1] for vectors in apart.values()]
    assert all((a - b).abs().max() > 0.05 for i, a in enumerate(first) for b in first[:i])


@pytest.mark.parametrize("most", [1, 2])
def test_no_more_adapters_are_in_memory_than_there_may_be(most: int) -> None:
    made = [adapter(base("llama"), cls=AutoModelForCausalLM, seed=i, target_modules=["q_proj"]) for i in range(5)]
    requests = [request(folder, number) for number, (folder, _) in enumerate(made, start=1)]
    with loaded(base("llama"), enable_lora=True, max_loras=most) as llm:
        manager = llm.engine.lora
        assert manager is not None
        for _ in range(2):
            for one, (_, trained) in zip(requests, made, strict=True):
                assert_as_peft(llm, trained, one)
                assert len(manager.resident) <= most
                assert manager.resident[-1] == one
        assert llm.engine.metrics.adapter_loads == 10
        llm.embed("cat", lora_request=requests[-most], use_tqdm=False)
        assert llm.engine.metrics.adapter_loads == 10
        assert manager.resident[-1] == requests[-most]
        vectors = token_vectors(llm, TEXTS[:1] * 5, requests)
        for vector, (_, trained) in zip(vectors, made, strict=True):
            ids = llm.engine.tokenizer.encode(TEXTS[:1])[0]  # type: ignore[union-attr]
            torch.testing.assert_close(vector, F.normalize(states(trained, ids), dim=-1), atol=1e-5, rtol=0)
        assert len(manager.resident) <= most


def test_cached_prefixes_are_those_of_the_same_adapter() -> None:
    (folder, trained), (other, other_trained) = (
        adapter(base("llama"), cls=AutoModelForCausalLM, seed=seed, target_modules=["k_proj"]) for seed in (0, 1)
    )
    first, text = request(folder, 1), RAGGED[3]
    with loaded(base("llama"), enable_lora=True, enable_prefix_caching=True) as llm:
        plain = embedded(llm, text)
        assert plain.num_cached_tokens == 0
        for lora, model in ((first, trained), (request(other, 2), other_trained)):
            assert embedded(llm, text, lora).num_cached_tokens == 0
            assert embedded(llm, text, lora).num_cached_tokens > 0
            assert_as_peft(llm, model, lora, [text])
        again = embedded(llm, text)
        assert again.num_cached_tokens > 0
        torch.testing.assert_close(again.outputs.data, plain.outputs.data, atol=1e-6, rtol=0)


def test_changed_files_are_read_anew_and_nothing_cached_is_theirs() -> None:
    (folder, trained), (other, other_trained) = (
        adapter(base("llama"), cls=AutoModelForCausalLM, seed=seed, target_modules=["k_proj"]) for seed in (0, 1)
    )
    one = request(folder)
    with loaded(base("llama"), enable_lora=True, enable_prefix_caching=True) as llm:
        assert_as_peft(llm, trained, one, [RAGGED[3]])
        shutil.copy(other / "adapter_model.safetensors", folder / "adapter_model.safetensors")
        assert embedded(llm, RAGGED[3], one).num_cached_tokens == 0
        assert_as_peft(llm, other_trained, one, [RAGGED[3]])


def test_an_id_is_that_of_one_adapter_until_it_is_removed() -> None:
    (folder, trained), (other, other_trained) = (
        adapter(base("llama"), cls=AutoModelForCausalLM, seed=seed, target_modules=["k_proj"]) for seed in (0, 1)
    )
    with loaded(base("llama"), enable_lora=True, enable_prefix_caching=True) as llm:
        assert llm.engine.lora is not None
        assert_as_peft(llm, trained, request(folder, 7), [RAGGED[3]])
        with pytest.raises(InvalidParameterError, match="lora_int_id=7 is the adapter 'adapter-7' of"):
            llm.embed("cat", lora_request=request(other, 7), use_tqdm=False)
        assert llm.engine.lora.remove(7) == request(folder, 7)
        assert llm.engine.lora.remove(7) is None
        assert_as_peft(llm, other_trained, request(other, 7), [RAGGED[3]])


def test_a_long_prompt_runs_in_chunks_with_its_adapter() -> None:
    folder, trained = adapter(
        base("llama"), cls=AutoModelForCausalLM, target_modules=["q_proj", "up_proj", "embed_tokens"]
    )
    with loaded(base("llama"), enable_lora=True, max_num_batched_tokens=32) as llm:
        assert llm.engine.config.enable_chunked_prefill
        assert_as_peft(llm, trained, request(folder), RAGGED)
        assert_as_peft(llm, AutoModel.from_pretrained(base("llama")), None, RAGGED)


def test_adapters_of_the_start_are_known_by_name() -> None:
    folder, _trained = adapter(base("llama"), cls=AutoModelForCausalLM, target_modules=["q_proj"])
    with loaded(base("llama"), enable_lora=True, lora_modules={"mine": str(folder)}) as llm:
        [named] = token_vectors(llm, TEXTS[:1], "mine")
        [given] = token_vectors(llm, TEXTS[:1], LoRARequest("mine", 1, str(folder)))
        assert torch.equal(named, given)
        with pytest.raises(InvalidParameterError, match=r"'yours' is neither .* known: 'mine'"):
            llm.embed("cat", lora_request="yours", use_tqdm=False)


def test_int8_layers_take_adapters() -> None:
    """The base's product is the same in both, so what differs is the adapter's own: to within bfloat16 and float32."""
    settings: dict[str, Any] = {"quantization": "int8", "dtype": "float32", "min_quantized_cosine": 0}
    folder, trained = adapter(base("wide"), cls=AutoModelForCausalLM, target_modules="all-linear", lora_alpha=2)
    with loaded(base("wide"), enable_lora=True, **settings) as llm:
        assert llm.engine.loaded.quantization is not None
        [found] = token_vectors(llm, TEXTS[1:2], request(folder))
        [plain] = token_vectors(llm, TEXTS[1:2])
        ids = llm.embed(TEXTS[1:2], use_tqdm=False)[0].prompt_token_ids
    expected = F.normalize(states(trained, ids), dim=-1)
    assert F.cosine_similarity(found, expected).min() > 0.99
    assert F.cosine_similarity(plain, expected).min() < 0.9


@pytest.mark.parametrize("side", ["prompts", "windows"])
def test_scores_and_windows_are_run_with_the_adapter(side: str) -> None:
    folder, trained = adapter(base("bert"), target_modules=["query", "dense"])
    windows = {"pooler_config": {"enable_chunked_processing": True}} if side == "windows" else {}
    with loaded(base("bert"), enable_lora=True, **windows) as llm:
        if side == "windows":
            long = " ".join(RAGGED)
            [output] = llm.embed(long, lora_request=request(folder), use_tqdm=False)
            [plain] = llm.embed(long, use_tqdm=False)
            assert output.num_windows > 1
            assert (output.outputs.data - plain.outputs.data).abs().max() > 0.05
            return
        [score] = llm.score("the cat", "a long story", lora_request=request(folder), use_tqdm=False)
        one, two = (F.normalize(states(trained, ids).mean(0), dim=0) for ids in _ids(llm, ["the cat", "a long story"]))
        assert score.outputs.score == pytest.approx(float(one @ two), abs=1e-5)
        with pytest.raises(InvalidParameterError, match="lora_request is a list"):
            llm.score("the cat", "a mat", lora_request=[request(folder)], use_tqdm=False)


def _ids(llm: LLM, texts: list[str]) -> list[list[int]]:
    return [output.prompt_token_ids for output in llm.embed(texts, use_tqdm=False)]


def test_callers_with_adapters_at_once_get_their_own() -> None:
    """Eight callers, six adapters and room for two, through the engine for asyncio."""
    folders = several("llama", 6)
    asked = [None, *(request(folder, number) for number, folder in enumerate(folders, start=1))]
    with loaded(base("llama"), enable_lora=True, max_loras=2) as llm:
        alone = {one: token_vectors(llm, TEXTS, one) for one in asked}
        engine = AsyncEngine(llm.engine)

        async def call(number: int) -> None:
            for turn in range(6):
                one = asked[(number + turn) % len(asked)]
                _, vectors = await engine.run(TEXTS, "token_embed", None, PromptOptions(lora_request=one))
                for vector, expected in zip(vectors, alone[one], strict=True):
                    torch.testing.assert_close(vector, expected, atol=1e-6, rtol=0)

        async def all_of_them() -> None:
            await asyncio.gather(*map(call, range(8)))
            with pytest.raises(ModelNotFoundError):
                await engine.run(["cat"], "embed", None, PromptOptions(lora_request=LoRARequest("a", 9, "/nowhere")))

        asyncio.run(all_of_them())


# Errors.


def spoiled(change: Any = None, tensors: Any = None) -> Path:
    folder = copy_of(adapter(base("llama"), cls=AutoModelForCausalLM, target_modules=["q_proj"])[0])
    if change is not None:
        edit_json(folder / "adapter_config.json", lambda config: {**config, **change})
    if tensors is not None:
        file = folder / "adapter_model.safetensors"
        save_file({name: x.contiguous() for name, x in tensors(load_file(file)).items()}, file)
    return folder


def renamed(old: str, new: str) -> Any:
    return lambda tensors: {name.replace(old, new): x for name, x in tensors.items()}


@pytest.mark.parametrize(
    ("change", "tensors", "error", "message"),
    [
        ({"peft_type": "LOHA"}, None, UnsupportedArchitectureError, "peft_type='LOHA', and only LoRA"),
        ({"layer_replication": [[0, 2]]}, None, UnsupportedArchitectureError, "layer_replication"),
        ({"init_lora_weights": "pissa"}, None, UnsupportedArchitectureError, "init_lora_weights='pissa'"),
        ({"r": 8}, None, WeightsError, "has rank 8 for model.layers.0.self_attn.q_proj, and the tensors 4"),
        ({"lora_alpha": None}, None, CheckpointFormatError, "lora_alpha None"),
        ({"rank_pattern": {"(": 3}}, None, CheckpointFormatError, "rank_pattern '\\('"),
        ({}, lambda tensors: {}, WeightsError, "no tensors, so it would change nothing"),
        ({}, renamed("q_proj", "lm_head_q"), WeightsError, "lm_head_q has no place in the model"),
        (
            {},
            lambda tensors: {f"base_model.model.lm_head.{name[-13:]}": x for name, x in tensors.items()},
            WeightsError,
            "changes nothing that this model runs",
        ),
        ({}, renamed("lora_A.weight", "lora_C"), WeightsError, "lora_C' is none of a LoRA"),
        (
            {},
            lambda tensors: {name: x for name, x in tensors.items() if "lora_B" not in name},
            WeightsError,
            "lora_a of .* without its lora_b",
        ),
        (
            {},
            lambda tensors: {name: x[:, :16] if "lora_A" in name else x for name, x in tensors.items()},
            WeightsError,
            r"lora_A has shape \[4, 16\], the layer is for \[4, 32\]",
        ),
        (
            {},
            lambda tensors: {name: x[:16] if "lora_B" in name else x for name, x in tensors.items()},
            WeightsError,
            r"lora_B has shape \[16, 4\], the layer is for \[32, 4\]",
        ),
        (
            {"bias": "all"},
            lambda tensors: {**tensors, "base_model.model.model.norm.bias": torch.ones(32)},
            WeightsError,
            "model.norm has no place",
        ),
    ],
    ids=lambda value: None,
)
def test_an_adapter_that_does_not_fit_is_an_error_that_names_it(
    change: Any, tensors: Any, error: type[AnypoolError], message: str
) -> None:
    folder = spoiled(change, tensors)
    with loaded(base("llama"), enable_lora=True) as llm:
        with pytest.raises(error, match=message) as raised:
            llm.embed("cat", lora_request=request(folder), use_tqdm=False)
        assert str(folder) in str(raised.value)
        assert len(llm.embed("cat", use_tqdm=False)) == 1
    with pytest.raises(error, match=message):
        LLM(base("llama"), lora=str(folder), device="cpu", use_tqdm_on_load=False)


def test_what_can_only_be_merged_is_refused_at_run_time() -> None:
    dora, _ = adapter(base("llama"), cls=AutoModelForCausalLM, target_modules=["q_proj"], use_dora=True)
    norms, _ = adapter(base("bert"), target_modules=["query"], bias="all")
    whole, _ = adapter(base("llama"), cls=AutoModelForCausalLM, target_modules=["q_proj"], modules_to_save=["v_proj"])
    for family, folder, what in (("llama", dora, "is a DoRA"), ("bert", norms, "changes"), ("llama", whole, "whole")):
        message = f"{what}.*merge it while loading, with lora="
        with loaded(base(family), enable_lora=True) as llm, pytest.raises(UnsupportedArchitectureError, match=message):
            llm.embed("cat", lora_request=request(folder), use_tqdm=False)


def test_a_rank_above_the_highest_is_an_error() -> None:
    folder, _ = adapter(base("llama"), cls=AutoModelForCausalLM, target_modules=["q_proj"])
    message = r"rank 4 for .* and max_lora_rank is 2: start with max_lora_rank=4"
    with loaded(base("llama"), enable_lora=True, max_lora_rank=2) as llm, pytest.raises(WeightsError, match=message):
        llm.embed("cat", lora_request=request(folder), use_tqdm=False)


def test_an_adapter_that_is_gone_fails_its_own_requests_alone() -> None:
    kept, gone = several("llama", 2)
    with loaded(base("llama"), enable_lora=True, max_loras=1) as llm:
        prepared = [
            llm.engine.prepare(["cat"], llm.engine.supported_tasks[0], options=PromptOptions(lora_request=one))[0]
            for one in (request(kept, 1), request(gone, 2), None)
        ]
        llm.embed("cat", lora_request=request(kept, 1), use_tqdm=False)
        llm.embed("cat", lora_request=LoRARequest("third", 3, str(kept)), use_tqdm=False)
        shutil.rmtree(gone)
        llm.engine.submit(prepared)
        assert prepared[0].future.result(60) is not None
        assert prepared[2].future.result(60) is not None
        with pytest.raises((InvalidRequestError, ModelNotFoundError), match=r"adapter-2|no such folder"):
            prepared[1].future.result(60)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (3, "lora_request=3 is neither a LoRARequest nor"),
        ([None], "1 lora_request were given for 2 prompts"),
        ([None, 3], "lora_request=3 is neither"),
    ],
)
def test_what_is_no_adapter_is_an_error(asked: Any, message: str) -> None:
    with loaded(base("llama"), enable_lora=True) as llm, pytest.raises(InvalidParameterError, match=message):
        llm.embed(["cat", "mat"], lora_request=asked, use_tqdm=False)


def test_an_engine_without_adapters_refuses_them() -> None:
    with loaded(base("llama")) as llm, pytest.raises(InvalidParameterError, match="without enable_lora=True"):
        llm.embed("cat", lora_request=LoRARequest("a", 1, "/nowhere"), use_tqdm=False)
    with loaded(base("llama"), enable_lora=True) as llm, pytest.raises(ModelNotFoundError, match="/nowhere"):
        llm.embed("cat", lora_request=LoRARequest("a", 1, "/nowhere"), use_tqdm=False)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_loras": 0}, "max_loras=0 is not a positive integer"),
        ({"lora_modules": {"a": "b"}}, "has no effect without enable_lora=True"),
        ({"lora_modules": {"a": 1}, "enable_lora": True}, "not a mapping of names"),
    ],
)
def test_settings_that_mean_nothing_are_errors(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(model="m", **values)
    with pytest.raises(ConfigError, match="lora_int_id=0 is not a number from 1 on"):
        LoRARequest("a", 0, "b")
