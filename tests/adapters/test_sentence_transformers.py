"""Every module and setting of a sentence-transformers checkpoint gives the vectors that `encode` gives."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize
from sentence_transformers.sentence_transformer.modules import Dropout, LayerNorm, Pooling
from tokenizers import Tokenizer
from torch import nn

from anypool import LLM, PoolerConfig, PoolingParams
from anypool.adapters.load import load_pooling_model
from anypool.config import EngineConfig
from anypool.errors import (
    CheckpointFormatError,
    ConfigError,
    InvalidParameterError,
    InvalidPromptError,
    ModelLoadError,
    UnsupportedArchitectureError,
    WeightsError,
)
from tests.helpers import (
    HIDDEN,
    MAX_POSITIONS,
    RAGGED,
    assert_close,
    copy_of,
    edit_json,
    embed,
    loaded,
    reference,
    save_sentence_transformer,
    tiny_bert,
    tiny_llama,
    vectors,
)

BACKBONES = {"bert": tiny_bert, "llama": tiny_llama}
MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
OLD_KEYS = {
    "cls": "pooling_mode_cls_token",
    "max": "pooling_mode_max_tokens",
    "mean": "pooling_mode_mean_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}
PROMPTS = {"query": "query: ", "passage": "the long passage and "}


@pytest.fixture(params=sorted(BACKBONES))
def backbone(request: pytest.FixtureRequest) -> Path:
    return BACKBONES[request.param]()


def assert_same(folder: Path, texts: list[str] = RAGGED, **options: Any) -> torch.Tensor:
    ours = embed(folder, texts, **options)
    assert_close(ours, reference(folder, texts, **options))
    return ours


def dense(in_features: int, out_features: int, **settings: Any) -> Dense:
    torch.manual_seed(5)
    module = Dense(in_features, out_features, **settings)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module


def layer_norm(dimension: int) -> LayerNorm:
    torch.manual_seed(6)
    module = LayerNorm(dimension)
    nn.init.normal_(module.norm.weight)
    nn.init.normal_(module.norm.bias)
    return module


@cache
def with_dense() -> Path:
    """A checkpoint with mean pooling, a projection to 16 dimensions and normalisation."""
    return save_sentence_transformer(
        tiny_bert(), Pooling(HIDDEN, "mean"), dense(HIDDEN, 16), Normalize(), prompts=PROMPTS
    )


@cache
def with_mean(backbone: Path) -> Path:
    """A checkpoint of a backbone and mean pooling."""
    return save_sentence_transformer(backbone, Pooling(HIDDEN, "mean"), prompts=PROMPTS)


def with_pooling(backbone: Path, *modes: str, include_prompt: bool = True) -> Path:
    """A checkpoint of a backbone and these pooling modes, with the settings that the reference writes for them."""
    folder = copy_of(with_mean(backbone))
    Pooling(HIDDEN, modes, include_prompt=include_prompt).save(str(folder / "1_Pooling"))
    return folder


def to_old_dialect(folder: Path) -> Path:
    """The checkpoint as versions before 5.4 wrote it, in a folder of its own."""
    old = copy_of(folder)

    def pooling(config: dict[str, Any]) -> dict[str, Any]:
        modes = config["pooling_mode"]
        active = [modes] if isinstance(modes, str) else modes
        flags = {key: mode in active for mode, key in OLD_KEYS.items()}
        return {
            "word_embedding_dimension": config["embedding_dimension"],
            **flags,
            "include_prompt": config["include_prompt"],
        }

    def modules(entries: list[dict[str, Any]]) -> None:
        for entry in entries:
            entry["type"] = "sentence_transformers.models." + entry["type"].rsplit(".", 1)[-1]

    edit_json(old / "1_Pooling" / "config.json", pooling)
    edit_json(old / "modules.json", modules)
    (old / "sentence_bert_config.json").write_text('{"max_seq_length": 100, "do_lower_case": false}')
    return old


# Pooling


@pytest.mark.parametrize("mode", MODES)
def test_each_pooling_mode_equals_the_reference(backbone: Path, mode: str) -> None:
    assert_same(with_pooling(backbone, mode))


@pytest.mark.parametrize("modes", [("mean", "cls"), ("lasttoken", "max", "weightedmean"), MODES[::-1]], ids="+".join)
def test_modes_in_a_list_are_concatenated_in_the_order_of_the_list(backbone: Path, modes: tuple[str, ...]) -> None:
    vectors_NE = assert_same(with_pooling(backbone, *modes))
    assert vectors_NE.shape == (len(RAGGED), HIDDEN * len(modes))


@pytest.mark.parametrize("mode", MODES)
def test_each_pooling_mode_of_the_old_dialect_equals_the_reference(mode: str) -> None:
    assert_same(to_old_dialect(with_pooling(tiny_bert(), mode)))


def test_old_booleans_are_concatenated_in_a_fixed_order(backbone: Path) -> None:
    folder = to_old_dialect(with_pooling(backbone, *MODES))
    edit_json(folder / "1_Pooling" / "config.json", lambda config: dict(reversed(config.items())))
    assert_same(folder)


def test_old_booleans_that_are_all_false_mean_the_mean() -> None:
    folder = to_old_dialect(with_pooling(tiny_bert(), "mean"))
    edit_json(folder / "1_Pooling" / "config.json", lambda config: config.update(pooling_mode_mean_tokens=False))
    assert_same(folder)


@pytest.mark.parametrize("mode", MODES)
def test_a_prompt_left_out_of_pooling_equals_the_reference(backbone: Path, mode: str) -> None:
    folder = with_pooling(backbone, mode, include_prompt=False)
    texts = ["cat", RAGGED[0], "a story " * 5]
    assert_same(folder, texts, prompt_name="passage")
    assert_same(folder, texts)


def test_a_text_that_is_all_prompt_is_refused_where_prompts_are_not_pooled() -> None:
    folder = with_pooling(tiny_bert(), "mean", include_prompt=False)
    with loaded(folder) as llm, pytest.raises(InvalidPromptError, match="no tokens left to pool: all 4 belong"):
        vectors(llm, ["none"], prompt="the cat sat on", truncate_prompt_tokens=4)


# What follows pooling


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "act", [nn.Tanh(), nn.Identity(), nn.GELU(), nn.ReLU(), nn.SiLU()], ids=lambda m: m._get_name()
)
def test_dense_with_each_activation_equals_the_reference(bias: bool, act: nn.Module) -> None:
    head = dense(HIDDEN, 24, bias=bias, activation_function=act)
    assert_same(save_sentence_transformer(tiny_bert(), Pooling(HIDDEN, "mean"), head))


@pytest.mark.parametrize("out_features", [HIDDEN, 20])
def test_residual_dense_equals_the_reference(backbone: Path, out_features: int) -> None:
    head = dense(HIDDEN, out_features, use_residual=True, activation_function=nn.GELU())
    assert_same(save_sentence_transformer(backbone, Pooling(HIDDEN, "mean"), head))


def test_a_chain_of_every_module_equals_the_reference(backbone: Path) -> None:
    folder = save_sentence_transformer(
        backbone,
        Pooling(HIDDEN, ("mean", "max")),
        Dropout(0.5),
        dense(2 * HIDDEN, 48, activation_function=nn.GELU()),
        layer_norm(48),
        Normalize(),
        dense(48, 16, bias=False, activation_function=nn.Identity()),
        dense(16, 16, use_residual=True),
        Normalize(),
        Dropout(0.5),
    )
    vectors_NE = assert_same(folder)
    assert_close(vectors_NE.norm(dim=-1), torch.ones(len(RAGGED)))


def test_modules_run_in_the_order_of_the_list_whatever_their_idx_says() -> None:
    folder = save_sentence_transformer(tiny_bert(), Pooling(HIDDEN, "mean"), dense(HIDDEN, HIDDEN), layer_norm(HIDDEN))
    edit_json(folder / "modules.json", lambda entries: [entries[0], entries[1], entries[3], entries[2]])
    assert_same(folder)


def test_dense_without_an_activation_key_means_tanh() -> None:
    folder = copy_of(with_dense())
    edit_json(folder / "2_Dense" / "config.json", lambda config: config.pop("activation_function") and None)
    assert_same(folder)


def test_dense_weights_are_read_from_either_kind_of_file() -> None:
    folder = copy_of(with_dense())
    head = SentenceTransformer(str(folder), device="cpu")[2]
    (folder / "2_Dense" / "model.safetensors").unlink()
    torch.save(head.state_dict(), folder / "2_Dense" / "pytorch_model.bin")
    assert_close(assert_same(folder), embed(with_dense(), RAGGED), atol=0)


def test_normalize_needs_no_folder() -> None:
    folder = copy_of(with_dense())
    shutil.rmtree(folder / "3_Normalize")
    assert_close(assert_same(folder).norm(dim=-1), torch.ones(len(RAGGED)))


def test_vectors_are_not_normalised_where_the_recipe_does_not_say_so() -> None:
    folder = with_pooling(tiny_bert(), "mean")
    assert (assert_same(folder).norm(dim=-1) > 1.5).all()


# Dialects and layouts


@pytest.mark.parametrize(
    "prefix", ["sentence_transformers.models", "pylate.models.Dense", "sentence_transformers.base.modules.dense"]
)
def test_module_types_are_matched_by_their_last_component(prefix: str) -> None:
    folder = copy_of(with_dense())

    def rename(entries: list[dict[str, Any]]) -> None:
        for entry in entries:
            entry["type"] = f"{prefix}.{entry['type'].rsplit('.', 1)[-1]}"

    edit_json(folder / "modules.json", rename)
    assert_close(embed(folder, RAGGED), reference(with_dense(), RAGGED))


def test_the_old_layout_with_a_transformer_folder_equals_the_reference(backbone: Path) -> None:
    folder = to_old_dialect(save_sentence_transformer(backbone, Pooling(HIDDEN, "mean"), Normalize()))
    (folder / "0_Transformer").mkdir()
    for file in folder.iterdir():
        if file.is_file() and file.name not in ("modules.json", "config_sentence_transformers.json"):
            file.rename(folder / "0_Transformer" / file.name)
    edit_json(folder / "modules.json", lambda entries: entries[0].update(path="0_Transformer"))
    assert_same(folder)


# Prompts


def test_named_given_and_default_prompts_equal_the_reference() -> None:
    plain = with_dense()
    assert_same(plain, prompt_name="query")
    assert_same(plain, prompt_name="document")
    assert_same(plain, prompt="title: none ")
    with_default = copy_of(plain)
    edit_json(
        with_default / "config_sentence_transformers.json", lambda config: config.update(default_prompt_name="passage")
    )
    default = assert_same(with_default)
    assert_close(default, embed(plain, RAGGED, prompt=PROMPTS["passage"]), atol=1e-6)
    assert_same(with_default, prompt="")
    assert_same(with_default, prompt_name="query")


def test_every_model_knows_the_empty_prompts_query_and_document() -> None:
    folder = copy_of(with_dense())
    (folder / "config_sentence_transformers.json").unlink()
    assert_same(folder, prompt_name="query")


def test_a_prompt_without_text_is_empty() -> None:
    folder = copy_of(with_dense())
    edit_json(folder / "config_sentence_transformers.json", lambda config: config["prompts"].update(other=None))
    assert_same(folder, prompt_name="other")


def test_token_ids_are_run_without_the_default_prompt() -> None:
    folder = copy_of(with_dense())
    edit_json(folder / "config_sentence_transformers.json", lambda config: config.update(default_prompt_name="passage"))
    with loaded(folder) as llm:
        [output] = llm.embed([[2, 17, 3]], use_tqdm=False)
        assert output.prompt_token_ids == [2, 17, 3]
        with pytest.raises(InvalidParameterError, match="before text and not before token ids"):
            llm.embed([[2, 17, 3]], prompt_name="query", use_tqdm=False)


# Tokenisation


def test_max_seq_length_of_the_old_schema_cuts_as_the_reference_does() -> None:
    folder = to_old_dialect(with_dense())
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 24, "do_lower_case": false}')
    assert_same(folder)
    with loaded(folder) as llm:
        assert llm.engine.max_model_len == 24
        [output] = llm.embed(RAGGED[1], truncate_prompt_tokens=-1, use_tqdm=False)
    assert len(output.prompt_token_ids) == 24
    assert (output.prompt_token_ids[0], output.prompt_token_ids[-1]) == (2, 3)


@pytest.mark.parametrize(("limit", "expected"), [(20, 20), (10**30, MAX_POSITIONS), (5000, MAX_POSITIONS)])
def test_model_max_length_of_the_tokenizer_cuts_as_the_reference_does(
    backbone: Path, limit: int, expected: int
) -> None:
    folder = with_pooling(backbone, "lasttoken")
    edit_json(folder / "tokenizer_config.json", lambda config: config.update(model_max_length=limit))
    assert_same(folder, [*RAGGED, RAGGED[1] * 5])
    with loaded(folder) as llm:
        assert llm.engine.max_model_len == expected


def test_the_recipe_wins_over_the_tokenizer_and_the_user_over_both() -> None:
    folder = to_old_dialect(with_dense())
    edit_json(folder / "tokenizer_config.json", lambda config: config.update(model_max_length=20))
    with loaded(folder) as llm:
        assert llm.engine.max_model_len == 100
    with loaded(folder, max_model_len=7) as llm:
        assert llm.engine.max_model_len == 7


@pytest.mark.parametrize("normalizer", ["sequence", "single", "none"])
def test_lower_casing_equals_the_reference(normalizer: str) -> None:
    folder = to_old_dialect(with_dense())
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 100, "do_lower_case": true}')

    def change(content: dict[str, Any]) -> None:
        single = content["normalizer"]
        content["normalizer"] = {
            "sequence": {"type": "Sequence", "normalizers": [single, {"type": "NFC"}]},
            "single": single,
            "none": None,
        }[normalizer]

    edit_json(folder / "tokenizer.json", change)
    texts = ["THE Cat SAT", "ÜBER İstanbul", "the cat"]
    ours = assert_same(folder, texts)
    assert_close(ours[0], embed(folder, ["the cat sat"])[0], atol=1e-6)


def test_truncation_and_padding_inside_tokenizer_json_are_overridden() -> None:
    folder = copy_of(with_dense())
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(max_length=9)
    backend.enable_padding(length=12, pad_id=0, pad_token="[PAD]")
    backend.save(str(folder / "tokenizer.json"))
    with loaded(folder) as llm:
        lengths = [len(o.prompt_token_ids) for o in llm.embed([RAGGED[1], "cat"], use_tqdm=False)]
    assert lengths[0] > 100
    assert lengths[1] == 3
    assert_same(folder)


def test_an_end_token_of_the_template_survives_truncation() -> None:
    folder = save_sentence_transformer(tiny_llama(template="<s> $A </s>"), Pooling(HIDDEN, "lasttoken"))
    edit_json(folder / "tokenizer_config.json", lambda config: config.update(model_max_length=30))
    assert_same(folder)


# Dimensions and dtypes


def test_truncate_dim_is_the_reference_cut_and_then_normalised() -> None:
    folder = copy_of(with_dense())
    edit_json(folder / "config_sentence_transformers.json", lambda config: config.update(truncate_dim=8))
    ours = embed(folder, RAGGED)
    assert ours.shape == (len(RAGGED), 8)
    assert_close(ours, reference(folder, RAGGED, truncate_dim=8, normalize_embeddings=True))


def test_heads_run_in_float32_over_a_bfloat16_backbone() -> None:
    pooling, normalize = Pooling(HIDDEN, ("mean", "lasttoken")), Normalize()
    settings: dict[str, Any] = {"activation_function": nn.GELU()}
    folder = save_sentence_transformer(tiny_bert(torch.bfloat16), pooling, dense(2 * HIDDEN, 32, **settings), normalize)
    wide = dense(2 * HIDDEN, 32, **settings)  # sentence-transformers rounded its own to bfloat16
    wide.save(str(folder / "2_Dense"))
    head = nn.Sequential(pooling, wide, normalize)
    with loaded(folder, dtype="bfloat16") as llm:
        assert {p.dtype for p in llm.engine.loaded.model.layers.parameters()} == {torch.bfloat16}
        assert {p.dtype for p in llm.engine.loaded.model.pooler.parameters()} == {torch.float32}
        for text in RAGGED:
            # The hidden states are our own here, since bf16 arithmetic depends on the order of operations.
            [tokens] = llm.encode(text, PoolingParams(normalize=False), pooling_task="token_embed", use_tqdm=False)
            states = tokens.outputs.data.unsqueeze(0)
            with torch.inference_mode():
                expected = head({"token_embeddings": states})["sentence_embedding"]
            assert_close(vectors(llm, [text]), expected)
    cosine = torch.cosine_similarity(
        embed(folder, RAGGED, engine={"dtype": "bfloat16"}), reference(folder, RAGGED).float()
    )
    assert cosine.min() > 0.999


# Without a recipe


def test_without_modules_an_encoder_gives_the_mean_and_says_that_it_was_guessed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        ours = embed(tiny_bert(), RAGGED)
    assert "no modules.json: pooling MEAN is a guess" in caplog.text
    assert_close(ours, reference(tiny_bert(), RAGGED, normalize_embeddings=True))


def test_without_modules_a_causal_lm_gives_the_last_token_and_says_that_it_was_guessed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        ours = embed(tiny_llama(), RAGGED)
    assert "no modules.json: pooling LAST is a guess" in caplog.text
    assert_close(ours, reference(tiny_llama(), RAGGED, normalize_embeddings=True))


def test_without_modules_a_decoder_that_attends_both_ways_gives_the_mean() -> None:
    folder = copy_of(tiny_llama())
    edit_json(folder / "config.json", lambda config: config.update(is_causal=False))
    assert_close(embed(folder, RAGGED), reference(folder, RAGGED, normalize_embeddings=True))


def test_the_user_wins_over_the_files() -> None:
    folder = with_pooling(tiny_bert(), "mean")
    other = save_sentence_transformer(tiny_bert(), Pooling(HIDDEN, ("cls", "max")), Normalize())
    pooler = PoolerConfig(pooling_type="cls+MAX", normalize=True)
    assert_close(embed(folder, RAGGED, engine={"pooler_config": pooler}), reference(other, RAGGED))


# What is refused


def refuse(folder: Path, kind: type[Exception], match: str) -> None:
    with pytest.raises(kind, match=match) as caught:
        load_pooling_model(EngineConfig(model=str(folder), device="cpu"))
    assert type(caught.value) is kind


def test_an_unknown_module_stops_the_load_with_its_name() -> None:
    folder = copy_of(with_dense())
    edit_json(folder / "modules.json", lambda entries: entries[2].update(type="sentence_transformers.models.LSTM"))
    refuse(folder, CheckpointFormatError, "'LSTM'.*supported after Pooling: Dense, LayerNorm, Normalize, Dropout")


@pytest.mark.parametrize(
    ("entries", "match"),
    [
        ([], "a Transformer followed by a Pooling is supported"),
        ({"idx": 0}, "has {'idx': 0}"),
        (["Transformer"], "has 'Transformer'"),
        ([{"idx": 0, "path": "", "type": 3}], "a type and a path"),
        ([{"path": "/etc", "type": "x.Transformer"}], "'/etc', outside the checkpoint"),
        ([{"path": "../other", "type": "x.Transformer"}], "'../other', outside the checkpoint"),
        ([{"path": "nowhere", "type": "x.Transformer"}, {"path": "1_Pooling", "type": "x.Pooling"}], "'nowhere'"),
        ([{"path": "", "type": "x.Transformer"}, {"path": "9_Pooling", "type": "x.Pooling"}], "9_Pooling/config.json"),
        ([{"path": "", "type": "x.BoW"}], "lists BoW"),
        ([{"path": "", "type": "x.StaticEmbedding"}], "a table of token vectors has a matrix"),
    ],
)
def test_modules_that_are_not_a_known_chain_are_refused(entries: Any, match: str) -> None:
    folder = copy_of(with_dense())
    edit_json(folder / "modules.json", lambda _: entries)
    refuse(folder, CheckpointFormatError, match)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"pooling_mode": "median"}, "unknown pooling_mode 'median'; known: cls, max, mean"),
        ({"pooling_mode": ["mean", "median"]}, "unknown pooling_mode 'median'"),
        ({"pooling_mode": []}, r"unknown pooling_mode \[\]"),
        ({"pooling_mode": 3}, "unknown pooling_mode 3"),
        ({"pooling_mode": [["mean"]]}, r"unknown pooling_mode \['mean'\]"),
        ({"pooling_mode_cls": True, "temperature": 2}, "unknown keys pooling_mode_cls, temperature"),
    ],
)
def test_unknown_pooling_settings_are_named(change: dict[str, Any], match: str) -> None:
    folder = copy_of(with_dense())
    edit_json(folder / "1_Pooling" / "config.json", lambda config: config.update(change))
    refuse(folder, CheckpointFormatError, f"1_Pooling/config.json.*{match}")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"in_features": 48}, f" takes rows of 48, but what comes before gives {HIDDEN}"),
        ({"in_features": None}, "in_features None, not a positive integer"),
        ({"out_features": "16"}, "out_features '16', not a positive integer"),
        ({"activation_function": "torch.nn.Maxout"}, "'torch.nn.Maxout' is not supported; known: torch.nn.Identity"),
        ({"activation_function": "os.system"}, "'os.system' is not supported"),
        ({"activation_function": None}, "None is not supported"),
        ({"module_input_name": "token_embeddings"}, "'token_embeddings'; only 'sentence_embedding' is supported"),
        ({"scale": 2}, "unknown keys scale; known: activation_function, bias"),
    ],
)
def test_dense_settings_that_are_not_understood_are_named(change: dict[str, Any], match: str) -> None:
    folder = copy_of(with_dense())
    edit_json(folder / "2_Dense" / "config.json", lambda config: config.update(change))
    refuse(folder, CheckpointFormatError, f"2_Dense.*{match}")


def test_a_layer_norm_without_its_size_is_refused() -> None:
    folder = save_sentence_transformer(tiny_bert(), Pooling(HIDDEN, "mean"), layer_norm(HIDDEN))
    (folder / "2_LayerNorm" / "config.json").write_text("{}")
    refuse(folder, CheckpointFormatError, "2_LayerNorm/config.json has dimension None")


def save_dense_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    path = folder / "2_Dense" / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def test_dense_tensors_that_are_missing_left_over_or_of_a_wrong_shape_are_named() -> None:
    missing, extra, wrong = (copy_of(with_dense()) for _ in range(3))
    save_dense_weights(missing, lambda tensors: tensors.__delitem__("linear.bias"))
    refuse(missing, WeightsError, "2_Dense: 1 tensors that the model needs are missing: linear.bias")
    save_dense_weights(extra, lambda tensors: tensors.update({"gate.weight": torch.ones(3)}))
    refuse(extra, WeightsError, "2_Dense: 1 tensors have no place in the model: gate.weight")
    save_dense_weights(wrong, lambda tensors: tensors.update({"linear.bias": torch.ones(3)}))
    refuse(wrong, WeightsError, r"2_Dense: tensor 'linear.bias' has shape \[3\], the model expects \[16\]")


def test_dense_without_weights_or_settings_is_refused() -> None:
    folder = copy_of(with_dense())
    (folder / "2_Dense" / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match="2_Dense has no weights"):
        LLM(folder, device="cpu")
    (folder / "2_Dense" / "config.json").unlink()
    refuse(folder, CheckpointFormatError, "modules.json names 2_Dense/config.json, which is not there")


@pytest.mark.parametrize(
    ("change", "kind", "match"),
    [
        ({"model_type": "SoundEncoder"}, UnsupportedArchitectureError, "model_type 'SoundEncoder'"),
        ({"model_type": "CrossEncoder"}, CheckpointFormatError, "a CrossEncoder is a Transformer alone"),
        (
            {"default_prompt_name": "nope"},
            CheckpointFormatError,
            "'nope'; its prompts are 'query', 'document', 'passage'",
        ),
        ({"prompts": ["query"]}, CheckpointFormatError, "not texts by name"),
        ({"prompts": {"query": 3}}, CheckpointFormatError, "not texts by name"),
        ({"truncate_dim": 1000}, ConfigError, "dimensions=1000 is not available.*1 to 16"),
    ],
)
def test_model_settings_that_cannot_be_followed_are_named(
    change: dict[str, Any], kind: type[Exception], match: str
) -> None:
    folder = copy_of(with_dense())
    edit_json(folder / "config_sentence_transformers.json", lambda config: config.update(change))
    refuse(folder, kind, match)


@pytest.mark.parametrize(
    ("change", "kind", "match"),
    [
        ({"transformer_task": "fill-mask"}, UnsupportedArchitectureError, "transformer_task 'fill-mask'"),
        ({"module_output_name": "sentence_embedding"}, UnsupportedArchitectureError, "module_output_name"),
        (
            {"modality_config": {"text": {"method": "forward", "method_output_name": "pooler_output"}}},
            UnsupportedArchitectureError,
            "'pooler_output'",
        ),
        ({"max_seq_length": "long"}, CheckpointFormatError, "max_seq_length 'long'"),
    ],
)
def test_transformer_settings_that_cannot_be_followed_are_named(
    change: dict[str, Any], kind: type[Exception], match: str
) -> None:
    folder = copy_of(with_dense())
    edit_json(folder / "sentence_bert_config.json", lambda config: config.update(change))
    refuse(folder, kind, f"sentence_bert_config.json has {match}|{match}")


@pytest.mark.parametrize(
    "name", ["modules.json", "config_sentence_transformers.json", "sentence_bert_config.json", "1_Pooling/config.json"]
)
def test_a_file_that_is_not_json_or_not_an_object_is_named(name: str) -> None:
    folder = copy_of(with_dense())
    (folder / name).write_text('{"half": ')
    refuse(folder, CheckpointFormatError, f"{name} is not valid JSON")
    (folder / name).write_text(json.dumps("text"))
    refuse(folder, CheckpointFormatError, f"{name} is not")
