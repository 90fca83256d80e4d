"""Recipes of embedding models: each family's vectors are those of the library, or of the formula, that it is from."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize
from sentence_transformers.sentence_transformer.modules import Pooling, StaticEmbedding, WeightedLayerPooling
from tokenizers import Tokenizer
from torch import nn

from anypool import PoolerConfig, PoolingParams
from anypool.errors import (
    CheckpointFormatError,
    ConfigError,
    InvalidParameterError,
    InvalidPromptError,
    UnsupportedArchitectureError,
    WeightsError,
)
from tests.helpers import (
    HIDDEN,
    MAX_POSITIONS,
    RAGGED,
    assert_close,
    byte_tokenizer,
    copy_of,
    edit_json,
    embed,
    loaded,
    new_folder,
    reference,
    save,
    save_sentence_transformer,
    tiny_bert,
    tiny_llama,
    vectors,
    wordpiece_tokenizer,
)

SHORT = ["cat and mat and a cat", "cat", "the cat sat on a long mat"]
PROMPTS = {"query": "task: search result | query: ", "document": "title: none | text: "}


def projection(in_features: int, out_features: int) -> Dense:
    """W x, as EmbeddingGemma has two."""
    torch.manual_seed(in_features)
    return Dense(in_features, out_features, bias=False, activation_function=nn.Identity())


# Prompts that are not pooled


@pytest.mark.parametrize("mode", ["mean", "weightedmean", "max", "cls"])
@pytest.mark.parametrize(
    "engine",
    [{"max_num_batched_tokens": 16}, {"enable_prefix_caching": True, "block_size": 16, "max_num_batched_tokens": 32}],
    ids=["chunks", "prefixes"],
)
def test_a_prompt_is_left_out_of_chunked_and_cached_texts_too(mode: str, engine: dict[str, Any]) -> None:
    folder = save_sentence_transformer(tiny_llama(), Pooling(HIDDEN, mode, include_prompt=False), prompts=PROMPTS)
    expected = reference(folder, RAGGED, prompt_name="query")
    with loaded(folder, **engine) as llm:
        for _ in range(2):  # the second time prefixes come out of the cache
            assert_close(vectors(llm, RAGGED, prompt_name="query"), expected)


# EmbeddingGemma


@cache
def embedding_gemma() -> Path:
    """A Gemma 3 that attends in both directions, two projections and a norm."""
    torch.manual_seed(7)
    tokenizer = byte_tokenizer("<s> $A </s>", model_max_length=MAX_POSITIONS)
    config = hf.Gemma3TextConfig(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=8,
        intermediate_size=64,
        max_position_embeddings=MAX_POSITIONS,
        sliding_window=20,
        sliding_window_pattern=3,
        query_pre_attn_scalar=24,
        initializer_range=0.2,
        use_bidirectional_attention=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return save_sentence_transformer(
        save(hf.Gemma3TextModel(config), tokenizer, "embedding-gemma"),
        Pooling(HIDDEN, "mean"),
        projection(HIDDEN, 4 * HIDDEN),
        projection(4 * HIDDEN, HIDDEN),
        Normalize(),
        prompts=PROMPTS,
    )


@pytest.mark.parametrize("prompt_name", [None, "query", "document"])
def test_embedding_gemma_equals_sentence_transformers(prompt_name: str | None) -> None:
    folder = embedding_gemma()
    options = {} if prompt_name is None else {"prompt_name": prompt_name}
    expected = reference(folder, RAGGED, **options)
    with loaded(folder, model_impl="native") as llm:
        together = vectors(llm, RAGGED, **options)
        alone = torch.cat([vectors(llm, [text], **options) for text in RAGGED])
    assert_close(together, expected, atol=1e-6)
    assert_close(alone, together, atol=1e-6)


def test_embedding_gemma_is_cut_and_then_normalised() -> None:
    expected = reference(embedding_gemma(), RAGGED, truncate_dim=8, normalize_embeddings=True)
    assert_close(embed(embedding_gemma(), RAGGED, engine={"pooler_config": PoolerConfig(dimensions=8)}), expected)


# Qwen3-Embedding


@pytest.mark.parametrize("prompt", ["Instruct: find a cat\nQuery:", ""], ids=["query", "document"])
def test_qwen3_embedding_equals_sentence_transformers(prompt: str) -> None:
    torch.manual_seed(14)
    tokenizer = byte_tokenizer("$A </s>", model_max_length=MAX_POSITIONS, padding_side="left")
    config = hf.Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=64,
        max_position_embeddings=MAX_POSITIONS,
        initializer_range=0.2,
        tie_word_embeddings=True,
    )
    backbone = save(hf.Qwen3ForCausalLM(config), tokenizer, "qwen3-embedding")
    folder = save_sentence_transformer(backbone, Pooling(HIDDEN, "lasttoken"), Normalize())
    ours = embed(folder, RAGGED, prompt=prompt, engine={"model_impl": "native"})
    assert_close(ours, reference(folder, RAGGED, prompt=prompt))


# Tables of token vectors


UNKNOWN = "cat ☃ mat ☃ story"


def token_vectors(rows: int, size: int = HIDDEN) -> torch.Tensor:
    torch.manual_seed(8)
    return torch.randn(rows, size)


@pytest.mark.parametrize("normalized", [True, False], ids=["normalized", "raw"])
def test_static_embedding_equals_sentence_transformers(normalized: bool) -> None:
    tokenizer = wordpiece_tokenizer()
    module = StaticEmbedding(tokenizer, embedding_weights=token_vectors(len(tokenizer)))
    folder = new_folder("static")
    SentenceTransformer(modules=[module, *[Normalize()] * normalized], device="cpu", prompts=PROMPTS).save(str(folder))
    texts = [*RAGGED, UNKNOWN]
    assert_close(embed(folder, texts), reference(folder, texts), atol=1e-6)
    assert_close(embed(folder, texts, prompt_name="query"), reference(folder, texts, prompt_name="query"), atol=1e-6)


def test_static_embedding_with_a_projection_and_a_cut_equals_sentence_transformers() -> None:
    tokenizer = byte_tokenizer("<s> $A </s>")
    module = StaticEmbedding(tokenizer, embedding_weights=token_vectors(len(tokenizer)))
    folder = new_folder("static")
    SentenceTransformer(modules=[module, projection(HIDDEN, 48)], device="cpu", truncate_dim=24).save(str(folder))
    assert_close(embed(folder, RAGGED), reference(folder, RAGGED, truncate_dim=24))


def model2vec(*, rows: int | None = None, weighted: bool = False, **config: Any) -> Path:
    """A folder as model2vec writes it; with fewer `rows` than tokens, those of a vocabulary-quantised model."""
    folder = new_folder("model2vec")
    tokenizer = wordpiece_tokenizer()
    tensors = {"embeddings": token_vectors(rows or len(tokenizer))}
    if rows is not None:
        tensors["mapping"] = torch.arange(len(tokenizer)) * 7 % rows
    if weighted:
        tensors["weights"] = torch.rand(len(tokenizer)) + 0.5
    save_file(tensors, folder / "model.safetensors")
    tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(
        json.dumps({"model_type": "model2vec", "architectures": ["StaticModel"], "hidden_dim": HIDDEN, **config})
    )
    return folder


def by_formula(folder: Path, text: str) -> torch.Tensor:
    """What model2vec computes: the mean of weights[i] embeddings[mapping[i]] over the known tokens i."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    unknown = tokenizer.token_to_id("[UNK]")
    ids = [i for i in tokenizer.encode(text, add_special_tokens=False).ids if i != unknown]
    tensors = load_file(folder / "model.safetensors")
    rows = tensors["mapping"][ids] if "mapping" in tensors else ids
    weights = tensors["weights"][ids] if "weights" in tensors else torch.ones(len(ids))
    return (tensors["embeddings"][rows] * weights[:, None]).mean(dim=0)


@pytest.mark.parametrize(
    "options",
    [{}, {"weighted": True}, {"rows": 19}, {"rows": 19, "weighted": True}],
    ids=["plain", "w", "map", "map-w"],
)
def test_model2vec_equals_its_formula(options: dict[str, Any]) -> None:
    texts = [*RAGGED, UNKNOWN]
    folder = model2vec(**options)
    expected = torch.stack([by_formula(folder, text) for text in texts])
    assert_close(embed(folder, texts), expected, atol=1e-6)
    normalized = model2vec(**options, normalize=True)
    expected = torch.stack([by_formula(normalized, text) for text in texts])
    assert_close(embed(normalized, texts), nn.functional.normalize(expected, dim=-1), atol=1e-6)


def test_model2vec_with_modules_equals_sentence_transformers() -> None:
    folder = model2vec(rows=19, weighted=True, normalize=True)
    kind = "sentence_transformers.models."
    (folder / "modules.json").write_text(
        json.dumps(
            [
                {"idx": 0, "name": "0", "path": ".", "type": kind + "StaticEmbedding"},
                {"idx": 1, "name": "1", "path": "1_Normalize", "type": kind + "Normalize"},
            ]
        )
    )
    texts = [*RAGGED, UNKNOWN]
    assert_close(embed(folder, texts), reference(folder, texts), atol=1e-6)


def test_token_vectors_of_a_table_are_its_rows() -> None:
    folder = model2vec()
    with loaded(folder) as llm:
        [output] = llm.token_embed([UNKNOWN], PoolingParams(normalize=False), use_tqdm=False)
    ids = [Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id(word) for word in ("cat", "mat", "story")]
    assert_close(output.outputs.data, token_vectors(len(wordpiece_tokenizer()))[ids], atol=0)


def test_a_text_without_tokens_is_refused_where_a_table_has_no_special_ones() -> None:
    with loaded(model2vec()) as llm, pytest.raises(InvalidPromptError, match="input 1 has no tokens"):
        vectors(llm, ["cat", "☃"])


def test_a_table_that_is_none_is_refused() -> None:
    folder = model2vec()
    save_file({"vectors": torch.ones(3, 2)}, folder / "model.safetensors")
    with pytest.raises(CheckpointFormatError, match=r"a matrix 'embedding.weight' or 'embeddings'"), loaded(folder):
        pass


# Decoders whose own code attends in both directions


def unmasked(folder: Path, ids: list[int]) -> torch.Tensor:
    """`[T, D]` states of transformers' decoder without its causal mask."""
    model = hf.AutoModel.from_pretrained(folder, attn_implementation="eager")
    mask = torch.zeros(1, 1, len(ids), len(ids))
    kinds = {"full_attention": mask, "sliding_attention": mask}
    with torch.no_grad():
        hidden = model(torch.tensor([ids]), attention_mask=mask if model.config.model_type != "qwen2" else kinds)
    return hidden.last_hidden_state[0]


@cache
def tiny_mistral() -> Path:
    torch.manual_seed(9)
    tokenizer = byte_tokenizer(model_max_length=MAX_POSITIONS)
    config = hf.MistralConfig(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        max_position_embeddings=MAX_POSITIONS,
        initializer_range=0.2,
        sliding_window=8,
    )
    return save(hf.MistralForCausalLM(config), tokenizer, "tiny-mistral")


def renamed(folder: Path, architecture: str, **config: Any) -> Path:
    """A checkpoint as a family has it that is known by its architecture's name."""
    copy = copy_of(folder)
    edit_json(copy / "config.json", lambda found: found.update(architectures=[architecture], **config))
    return copy


def ids_of(folder: Path, text: str, *, special: bool = True) -> list[int]:
    return hf.AutoTokenizer.from_pretrained(folder)(text, add_special_tokens=special)["input_ids"]


GRITLM_CODE = {"AutoModelForCausalLM": "modeling_gritlm7b.MistralForCausalLM"}


@pytest.mark.parametrize(
    "marks", [("GritLM", {}), ("MistralForCausalLM", {"auto_map": GRITLM_CODE})], ids=["by-name", "by-code"]
)
@pytest.mark.parametrize("prompt", [None, "<|user|>\nfind a cat\n<|embed|>\n"], ids=["document", "query"])
def test_gritlm_is_the_mean_of_what_follows_the_instruction(marks: tuple[str, Any], prompt: str | None) -> None:
    folder = renamed(tiny_mistral(), marks[0], **marks[1])
    expected = []
    for text in SHORT:
        before = prompt or "<|embed|>\n"
        rows = unmasked(tiny_mistral(), ids_of(tiny_mistral(), before + text))[len(ids_of(tiny_mistral(), before)) :]
        expected.append(nn.functional.normalize(rows.mean(dim=0), dim=0))
    assert_close(embed(folder, SHORT, **({} if prompt is None else {"prompt": prompt})), torch.stack(expected))


@pytest.mark.parametrize("architecture", ["LlamaEncoderModel", "LlamaBiModel", "LlamaBiForMNTP"])
@pytest.mark.parametrize("prompt", ["", "find a cat: "], ids=["document", "query"])
def test_merged_llm2vec_is_the_mean_of_the_tokens_of_the_text(architecture: str, prompt: str) -> None:
    folder = renamed(tiny_llama(), architecture)
    expected = []
    for text in SHORT:
        rows = unmasked(tiny_llama(), ids_of(tiny_llama(), prompt + text))
        expected.append(rows[-len(ids_of(tiny_llama(), text, special=False)) :].mean(dim=0))
    assert_close(embed(folder, SHORT, prompt=prompt), torch.stack(expected))


def test_a_folder_with_the_settings_of_llm2vec_attends_in_both_directions() -> None:
    folder = copy_of(tiny_llama())
    (folder / "llm2vec_config.json").write_text('{"pooling_mode": "mean", "max_length": 512}')
    assert_close(embed(folder, RAGGED), embed(renamed(tiny_llama(), "LlamaBiModel"), RAGGED), atol=0)
    (folder / "llm2vec_config.json").write_text('{"pooling_mode": "eos_token"}')
    with pytest.raises(UnsupportedArchitectureError, match="pooling_mode 'eos_token'"), loaded(folder):
        pass


def test_llm2vec_of_a_chat_model_is_refused() -> None:
    folder = renamed(tiny_llama(), "LlamaBiModel", _name_or_path="meta-llama/Meta-Llama-3-8B-Instruct")
    with pytest.raises(UnsupportedArchitectureError, match="chat format LLM2Vec puts around each text"), loaded(folder):
        pass


def test_the_bidirectional_llama_of_nvidia_is_the_mean_of_all_tokens() -> None:
    folder = renamed(tiny_llama(), "LlamaBidirectionalModel", model_type="llama_bidirec")
    expected = [unmasked(tiny_llama(), ids_of(tiny_llama(), text)).mean(dim=0) for text in SHORT]
    assert_close(embed(folder, SHORT), nn.functional.normalize(torch.stack(expected), dim=-1))


LATENT = {
    "num_latents_value": 12,
    "num_cross_heads": 2,
    "hidden_dim": HIDDEN,
    "latent_dim": HIDDEN,
    "cross_dim_head": 6,
}


@cache
def nv_embed() -> Path:
    """The Mistral under the names of NV-Embed's files, with a random latent array."""
    folder = copy_of(tiny_mistral())
    torch.manual_seed(13)
    block = "latent_attention_model.cross_attend_blocks."
    shapes = {
        "latent_attention_model.latents": (12, HIDDEN),
        **{f"{block}{name}.{kind}": (HIDDEN,) for name in ("0.norm", "0.norm_context", "1.norm") for kind in NORM},
        f"{block}0.fn.to_q.weight": (12, HIDDEN),
        f"{block}0.fn.to_kv.weight": (24, HIDDEN),
        f"{block}0.fn.to_out.weight": (HIDDEN, 12),
        f"{block}1.fn.net.0.weight": (8 * HIDDEN, HIDDEN),
        f"{block}1.fn.net.0.bias": (8 * HIDDEN,),
        f"{block}1.fn.net.2.weight": (HIDDEN, 4 * HIDDEN),
        f"{block}1.fn.net.2.bias": (HIDDEN,),
    }
    stored = load_file(folder / "model.safetensors")
    decoder = {name.replace("model.", "embedding_model."): x for name, x in stored.items() if name != "lm_head.weight"}
    save_file(
        {**decoder, **{name: torch.randn(shape) * 0.3 for name, shape in shapes.items()}}, folder / "model.safetensors"
    )
    text = json.loads((folder / "config.json").read_text())
    whole = {"model_type": "nvembed", "architectures": ["NVEmbedModel"], "auto_map": {"AutoModel": "m.NVEmbedModel"}}
    more = {"text_config": {**text, "model_type": "bidir_mistral"}, "latent_attention_config": LATENT, "add_eos": True}
    edit_json(folder / "config.json", lambda _: {**whole, **more})
    return folder


NORM = ("weight", "bias")


def latent_states(hidden_TD: torch.Tensor) -> torch.Tensor:
    """The formula of NV-Embed's latent attention."""
    tensors = load_file(nv_embed() / "model.safetensors")
    block, latents = "latent_attention_model.cross_attend_blocks.", tensors["latent_attention_model.latents"]

    def normed(name: str, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.layer_norm(x, (HIDDEN,), *(tensors[f"{block}{name}.{kind}"] for kind in NORM))

    def product(name: str, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, tensors[f"{block}{name}.weight"], tensors.get(f"{block}{name}.bias"))

    q = product("0.fn.to_q", normed("0.norm", hidden_TD)).view(-1, 2, 6)
    k, v = (x.view(-1, 2, 6) for x in product("0.fn.to_kv", normed("0.norm_context", latents)).chunk(2, dim=-1))
    shares = (torch.einsum("thk,rhk->htr", q, k) / 6**0.5).softmax(dim=-1)
    hidden_TD = hidden_TD + product("0.fn.to_out", torch.einsum("htr,rhk->thk", shares, v).flatten(1))
    factor, gate = product("1.fn.net.0", normed("1.norm", hidden_TD)).chunk(2, dim=-1)
    return hidden_TD + product("1.fn.net.2", factor * nn.functional.gelu(gate))


@pytest.mark.parametrize("prompt", ["", "Instruct: find\nQuery: "], ids=["document", "query"])
def test_nv_embed_is_the_mean_of_latent_states_with_its_count_of_the_instruction(prompt: str) -> None:
    skip = len(ids_of(tiny_mistral(), prompt, special=False))
    eos = 2
    expected = []
    for text in SHORT:
        rows = latent_states(unmasked(tiny_mistral(), [*ids_of(tiny_mistral(), prompt + text), eos]))
        expected.append(nn.functional.normalize(rows[skip:].mean(dim=0), dim=0))
    assert_close(embed(nv_embed(), SHORT, prompt=prompt), torch.stack(expected))


@pytest.mark.parametrize(
    "marks",
    [("JinaForRanking", {}), ("Qwen3ForCausalLM", {"auto_map": {"AutoModel": "m.JinaForRanking"}})],
    ids=["by-name", "by-code"],
)
def test_a_listwise_reranker_over_another_backbone_is_refused(marks: tuple[str, Any]) -> None:
    with pytest.raises(UnsupportedArchitectureError, match="a JinaForRanking over model_type 'llama'"):
        embed(renamed(tiny_llama(), marks[0], **marks[1]), SHORT)


def test_an_adapter_without_its_weights_is_an_error() -> None:
    folder = copy_of(tiny_llama())
    config = {"peft_type": "LORA", "base_model_name_or_path": "some/base", "r": 2, "lora_alpha": 2}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(WeightsError, match="the adapter has neither adapter_model"), loaded(folder):
        pass


@cache
def with_own_code() -> Path:
    """A Qwen2 for embeddings that comes with code of its own, as gte-Qwen2 and stella do."""
    torch.manual_seed(10)
    tokenizer = byte_tokenizer(model_max_length=MAX_POSITIONS)
    config = hf.Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        max_position_embeddings=MAX_POSITIONS,
        initializer_range=0.2,
    )
    backbone = save(hf.Qwen2Model(config), tokenizer, "qwen2")
    folder = save_sentence_transformer(backbone, Pooling(HIDDEN, "mean"))
    edit_json(folder / "config.json", lambda found: found.update(auto_map={"AutoModel": "modeling_qwen.Qwen2Model"}))
    return folder


def test_a_decoder_whose_own_code_decides_how_it_attends_is_refused() -> None:
    with pytest.raises(UnsupportedArchitectureError, match="whether it attends in both directions"):
        embed(with_own_code(), RAGGED)


def test_the_user_may_say_how_it_attends() -> None:
    expected = [unmasked(with_own_code(), ids_of(with_own_code(), text)).mean(dim=0) for text in SHORT]
    assert_close(embed(with_own_code(), SHORT, engine={"hf_overrides": {"is_causal": False}}), torch.stack(expected))


# Nomic Embed


@cache
def nomic() -> Path:
    torch.manual_seed(11)
    tokenizer = wordpiece_tokenizer(model_max_length=MAX_POSITIONS)
    config = hf.NomicBertConfig(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=MAX_POSITIONS,
        initializer_range=0.2,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
    )
    backbone = save(hf.NomicBertModel(config), tokenizer, "nomic")
    prompts = {"query": "search_query: ", "document": "search_document: "}
    return save_sentence_transformer(backbone, Pooling(HIDDEN, "mean"), prompts=prompts)


def as_published(folder: Path, **config: Any) -> Path:
    """The checkpoint with config.json in the words of nomic-ai's."""
    copy = copy_of(folder)
    published = {
        "activation_function": "swiglu",
        "architectures": ["NomicBertModel"],
        "auto_map": {"AutoModel": "nomic-ai/nomic-bert-2048--modeling_hf_nomic_bert.NomicBertModel"},
        "causal": False,
        "layer_norm_epsilon": 1e-12,
        "model_type": "nomic_bert",
        "n_embd": HIDDEN,
        "n_head": 4,
        "n_inner": 64,
        "n_layer": 2,
        "n_positions": MAX_POSITIONS,
        "prenorm": False,
        "rotary_emb_base": 1000,
        "rotary_emb_fraction": 1.0,
        "type_vocab_size": 2,
        "vocab_size": len(wordpiece_tokenizer()),
    }
    edit_json(copy / "config.json", lambda found: {**published, **config})
    return copy


@pytest.mark.parametrize("prompt_name", ["query", "document"])
def test_nomic_equals_sentence_transformers_in_both_wordings_of_its_config(prompt_name: str) -> None:
    expected = reference(nomic(), RAGGED, prompt_name=prompt_name)
    assert_close(embed(nomic(), RAGGED, prompt_name=prompt_name), expected)
    assert_close(embed(as_published(nomic()), RAGGED, prompt_name=prompt_name), expected)


def test_a_nomic_vector_is_layer_normalised_before_it_is_cut() -> None:
    whole = reference(nomic(), RAGGED)
    cut = nn.functional.layer_norm(whole, (HIDDEN,))[:, :8]
    options = PoolingParams(dimensions=8, normalize=True)
    with loaded(nomic()) as llm:
        assert_close(vectors(llm, RAGGED, options), nn.functional.normalize(cut, dim=-1))
        full = PoolingParams(dimensions=HIDDEN, normalize=True)
        assert_close(vectors(llm, RAGGED, full), nn.functional.normalize(whole, dim=-1))


def test_a_nomic_variant_that_transformers_does_not_have_is_refused() -> None:
    with pytest.raises(UnsupportedArchitectureError, match="moe_every_n_layers=2; only 0"):
        embed(as_published(nomic(), moe_every_n_layers=2), RAGGED)


# Several layers


TINY = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": MAX_POSITIONS,
    "initializer_range": 0.2,
    "output_hidden_states": True,
}
LAYERED = {
    "bert": (hf.BertModel, hf.BertConfig, {}),
    "deberta": (hf.DebertaV2Model, hf.DebertaV2Config, {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}),
    "modernbert": (hf.ModernBertModel, hf.ModernBertConfig, {"pad_token_id": 0, "local_attention": 16}),
    "qwen3": (hf.Qwen3Model, hf.Qwen3Config, {"num_key_value_heads": 2, "head_dim": 8}),
    "gemma2": (hf.Gemma2Model, hf.Gemma2Config, {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 8}),
}


def layered(family: str, *, start: int = 1, **settings: Any) -> Path:
    """A checkpoint that pools a weighted mean of its layers."""
    torch.manual_seed(12)
    model, config, options = LAYERED[family]
    tokenizer = wordpiece_tokenizer(model_max_length=MAX_POSITIONS)
    values = {**TINY, "vocab_size": len(tokenizer), **options, **settings}
    backbone = save(model(config(**values)), tokenizer, family)
    mix = WeightedLayerPooling(HIDDEN, num_hidden_layers=3, layer_start=start)
    nn.init.uniform_(mix.layer_weights, 0.2, 2.0)
    return save_sentence_transformer(backbone, mix, Pooling(HIDDEN, "mean"))


@pytest.mark.parametrize("start", [0, 2])
@pytest.mark.parametrize("family", sorted(LAYERED))
def test_weighted_layers_equal_sentence_transformers(family: str, start: int) -> None:
    folder = layered(family, start=start)
    assert_close(embed(folder, RAGGED, engine={"model_impl": "native"}), reference(folder, RAGGED))


def test_weighted_layers_have_no_effect_without_hidden_states_as_in_sentence_transformers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = layered("bert", output_hidden_states=False)
    assert_close(embed(folder, RAGGED), reference(folder, RAGGED))
    assert "has no effect" in caplog.text


def test_weighted_layers_are_refused_where_only_the_last_is_there() -> None:
    with pytest.raises(UnsupportedArchitectureError, match="hidden states of all layers"):
        embed(layered("bert"), RAGGED, engine={"model_impl": "transformers"})


# A Dense for each size


@cache
def with_choice() -> Path:
    """A checkpoint with Dense folders for 16, 24 and 48 dimensions, of which modules.json names the second."""
    folder = save_sentence_transformer(tiny_bert(), Pooling(HIDDEN, "mean"), projection(HIDDEN, 24))
    for size in (16, 24, 48):
        torch.manual_seed(size)
        target = folder / f"2_Dense_{size}"
        target.mkdir()
        projection(HIDDEN, size).save(str(target))
    return folder


@pytest.mark.parametrize("size", [16, 48])
def test_the_dense_of_a_size_is_taken_in_place_of_a_cut(size: int) -> None:
    chosen = copy_of(with_choice())
    edit_json(chosen / "modules.json", lambda entries: entries[2].update(path=f"2_Dense_{size}"))
    ours = embed(with_choice(), RAGGED, engine={"pooler_config": PoolerConfig(dimensions=size)})
    assert_close(ours, reference(chosen, RAGGED))
    assert_close(embed(chosen, RAGGED), ours, atol=0)  # modules.json may say it too
    assert_close(embed(with_choice(), RAGGED), reference(with_choice(), RAGGED))


def test_a_size_without_a_dense_is_refused() -> None:
    with pytest.raises(ConfigError, match="it has a Dense for 16, 24, 48"):
        embed(with_choice(), RAGGED, engine={"pooler_config": PoolerConfig(dimensions=32)})
    with loaded(with_choice()) as llm, pytest.raises(InvalidParameterError, match="it supports 24"):
        vectors(llm, RAGGED, PoolingParams(dimensions=16))
