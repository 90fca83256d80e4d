"""Architectures that packed batches do not reach run in padded ones, in equal lengths or alone."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from anypool.errors import ConfigError, UnsupportedArchitectureError
from anypool.model_executor.models.transformers_backend import TransformersModel, Way
from anypool.model_executor.models.transformers_backend.ways import groups
from anypool.model_executor.packed_batch import PackedBatch
from tests.helpers import loaded
from tests.models.parity import CPU, load, packed_states, random_ids, run, save_random
from tests.models.test_transformers_backend import COMMON, GQA

T5 = {"vocab_size": 120, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
BART = {
    "vocab_size": 120,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 160,
}
SPARSE = {**COMMON, "attention_type": "block_sparse", "block_size": 4, "num_random_blocks": 1}  # sparse from 29 on

CASES: dict[str, tuple[str, Any, Way]] = {
    "bloom": ("BloomForCausalLM", hf.BloomConfig(vocab_size=120, hidden_size=32, n_layer=2, n_head=4), Way.PADDED),
    "mpt": ("MptForCausalLM", hf.MptConfig(vocab_size=120, d_model=32, n_layers=2, n_heads=4), Way.PADDED),
    "falcon-alibi": ("FalconForCausalLM", hf.FalconConfig(**COMMON, alibi=True), Way.PADDED),
    "mamba": ("MambaForCausalLM", hf.MambaConfig(vocab_size=120, hidden_size=32, num_hidden_layers=2), Way.PADDED),
    "t5": ("T5ForConditionalGeneration", hf.T5Config(**T5), Way.PADDED),
    "umt5": ("UMT5EncoderModel", hf.UMT5Config(**T5), Way.PADDED),
    "bart": ("BartForConditionalGeneration", hf.BartConfig(**BART), Way.PADDED),
    "bart-decoder": ("BartForCausalLM", hf.BartConfig(**BART), Way.PADDED),
    "deberta": ("DebertaModel", hf.DebertaConfig(**COMMON), Way.PADDED),
    "big_bird-full": ("BigBirdModel", hf.BigBirdConfig(**COMMON), Way.PADDED),
    "big_bird-sparse": ("BigBirdModel", hf.BigBirdConfig(**SPARSE), Way.PADDED),
    "fnet": ("FNetModel", hf.FNetConfig(**COMMON), Way.EQUAL_LENGTHS),
}


def save(name: str, folder: Path) -> Any:
    model_name, config, _ = CASES[name]
    torch.manual_seed(0)
    model = getattr(hf, model_name)._from_config(config)
    save_random(model, folder)
    return model


@torch.inference_mode()
def alone(name: str, folder: Path, texts: list[list[int]]) -> list[torch.Tensor]:
    """Of a fresh module each, since some remember what they have seen."""
    states = []
    for ids in texts:
        model = getattr(hf, CASES[name][0]).from_pretrained(folder)
        half = model.get_encoder() if model.config.is_encoder_decoder else model.get_decoder()
        states.append(half(input_ids=torch.tensor([ids])).last_hidden_state[0])
    return states


@pytest.mark.parametrize("name", CASES)
def test_an_architecture_runs_in_the_best_way_that_keeps_its_numbers(name: str, tmp_path: Path) -> None:
    save(name, tmp_path)
    texts = random_ids(120, (1, 7, 40, 130, 7, 38, 6))
    model = load(tmp_path)
    assert model.way is CASES[name][2]
    actual = run(model, PackedBatch.pack(texts, device=CPU))
    torch.testing.assert_close(actual, torch.cat(alone(name, tmp_path, texts)), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["bloom", "t5", "fnet", "mamba"])
def test_a_vector_is_the_same_alone_and_in_any_batch(name: str, tmp_path: Path) -> None:
    save(name, tmp_path)
    texts = random_ids(120, (9, 7, 40, 130, 7, 38, 6, 41))
    with loaded(tmp_path, skip_tokenizer_init=True, max_num_batched_tokens=64) as llm:
        prompts: list[Any] = [{"prompt_token_ids": ids} for ids in texts]
        together = [output.outputs.embedding for output in llm.embed(prompts, use_tqdm=False)]
        single = [llm.embed(prompt, use_tqdm=False)[0].outputs.embedding for prompt in prompts]
    torch.testing.assert_close(torch.tensor(together), torch.tensor(single), atol=1e-6, rtol=0)


def test_a_prompt_above_the_batch_budget_runs_whole_where_chunks_cannot(tmp_path: Path) -> None:
    save("bloom", tmp_path)
    [long] = random_ids(120, (130,))
    with loaded(tmp_path, skip_tokenizer_init=True, max_num_batched_tokens=32) as llm:
        assert not llm.engine.config.enable_chunked_prefill
        [output] = llm.token_embed([{"prompt_token_ids": long}], use_tqdm=False)
    expected = torch.nn.functional.normalize(alone("bloom", tmp_path, [long])[0], dim=-1)
    torch.testing.assert_close(torch.as_tensor(output.outputs.data), expected, atol=1e-5, rtol=0)
    for setting in ("enable_chunked_prefill", "enable_prefix_caching"):
        with pytest.raises(ConfigError, match=f"{setting}=True: .* cannot run a prompt in parts"):
            load_engine(tmp_path, **{setting: True})


def load_engine(folder: Path, **arguments: Any) -> None:
    with loaded(folder, skip_tokenizer_init=True, **arguments):
        pass


def test_the_way_and_its_reason_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save("fnet", tmp_path)
    with caplog.at_level(logging.WARNING):
        load(tmp_path)
    assert "runs in batches of texts of equal length: packed batches: " in caplog.text
    assert "padded batches: hidden states differ by" in caplog.text


def test_only_one_text_at_a_time_is_left_where_batches_mix_texts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save("bloom", tmp_path)
    run_alone = TransformersModel._run

    def mixing(self: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        states_NLD = run_alone(self, inputs)
        return states_NLD + states_NLD.mean(0) if len(states_NLD) > 1 else states_NLD

    monkeypatch.setattr(TransformersModel, "_run", mixing)
    texts = random_ids(120, (5, 5, 9))
    model = load(tmp_path)
    assert model.way is Way.ALONE
    actual = run(model, PackedBatch.pack(texts, device=CPU))
    torch.testing.assert_close(actual, torch.cat(alone("bloom", tmp_path, texts)), atol=1e-5, rtol=0)


def test_a_module_that_never_gives_the_same_twice_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save("bloom", tmp_path)
    steady = TransformersModel._run
    monkeypatch.setattr(TransformersModel, "_run", lambda self, inputs: steady(self, inputs) * (1 + torch.rand(())))
    with pytest.raises(UnsupportedArchitectureError, match="gives the same text other numbers when it is run again"):
        load(tmp_path)


def test_a_module_without_a_row_per_token_is_refused(tmp_path: Path) -> None:
    config = hf.FunnelConfig(
        vocab_size=120, d_model=32, n_head=4, d_head=8, d_inner=48, block_sizes=[1, 1], num_decoder_layers=1
    )
    save_random(hf.FunnelBaseModel._from_config(config), tmp_path)
    config_json = (tmp_path / "config.json").read_text()
    assert '"FunnelBaseModel"' in config_json
    with pytest.raises(UnsupportedArchitectureError, match=r"tokens have states of shape \[\d+, 32\], not \[\d+, 32\]"):
        load(tmp_path)


def test_dynamic_frequencies_of_a_text_are_not_those_of_its_company(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    config = hf.GraniteConfig(**{**GQA, "max_position_embeddings": 16, "rope_parameters": rope})
    save_random(hf.GraniteForCausalLM._from_config(config), tmp_path)
    texts = random_ids(120, (40, 7, 30, 130, 7))
    expected = []
    for ids in texts:
        fresh = hf.GraniteModel.from_pretrained(tmp_path, attn_implementation="eager")
        with torch.inference_mode():
            expected.append(fresh(input_ids=torch.tensor([ids])).last_hidden_state[0])
    actual = packed_states(tmp_path, texts, model_impl="transformers", max_model_len=256)
    torch.testing.assert_close(actual, torch.cat(expected), atol=1e-5, rtol=0)


def test_padding_in_a_group_is_bounded() -> None:
    lengths = [3, 130, 40, 5, 38, 33, 128, 90, 11, 512]
    found = list(groups(lengths, Way.PADDED))
    assert sorted(i for group in found for i in group) == list(range(len(lengths)))
    assert [[lengths[i] for i in group] for group in found] == [[3, 5, 11], [33, 38, 40], [90], [128, 130], [512]]
    assert list(groups([5, 7, 5], Way.EQUAL_LENGTHS)) == [[0, 2], [1]]
    assert list(groups([5, 5], Way.ALONE)) == [[0], [1]]


VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
MULTIMODAL: dict[str, tuple[str, Any]] = {
    "llava": (
        "LlavaForConditionalGeneration",
        hf.LlavaConfig(
            text_config=hf.LlamaConfig(**GQA), vision_config=hf.CLIPVisionConfig(**VISION, image_size=28, patch_size=14)
        ),
    ),
    "qwen2_vl": (
        "Qwen2VLForConditionalGeneration",
        hf.Qwen2VLConfig(
            text_config={**GQA, "rope_parameters": SECTIONS},
            vision_config={"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 4},
        ),
    ),
}


@pytest.mark.parametrize("name", MULTIMODAL)
def test_text_runs_through_the_language_model_of_a_multimodal_one(name: str, tmp_path: Path) -> None:
    model_name, config = MULTIMODAL[name]
    torch.manual_seed(0)
    model = getattr(hf, model_name)._from_config(config, attn_implementation="eager")
    save_random(model, tmp_path)
    texts = random_ids(110, (9, 30, 1, 31))
    ours = load(tmp_path)
    assert type(ours).__name__ == "VisionLanguageForEmbedding"
    assert ours.way is Way.PACKED
    batch = PackedBatch.pack(texts, device=CPU)
    with torch.inference_mode():
        expected = torch.cat([model.model(input_ids=torch.tensor([ids])).last_hidden_state[0] for ids in texts])
        embeds = ours(None, batch.positions_T, batch.attn, inputs_embeds_TD=ours.embed_input_ids(batch.input_ids_T))
    torch.testing.assert_close(run(ours, batch), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(embeds, expected, atol=1e-5, rtol=0)


def test_a_module_that_masks_a_lone_text_otherwise_than_one_in_company_is_not_padded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save("bloom", tmp_path)
    run_text = TransformersModel.run_text
    monkeypatch.setattr(
        TransformersModel, "run_text", lambda self, ids_L: run_text(self, ids_L) + (self.way is Way.PADDED)
    )
    model = load(tmp_path)
    assert model.way is Way.EQUAL_LENGTHS
    assert any("padded" in reason and "differ" in reason for reason in model.rejected)
