"""Sparse vectors equal those of sentence-transformers' SparseEncoder, over repositories that it wrote itself."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from sentence_transformers import SparseEncoder
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling
from sentence_transformers.sparse_encoder.modules import SparseAutoEncoder, SpladePooling
from torch.utils._python_dispatch import TorchDispatchMode

from anypool import LLM, PoolerConfig, PoolingParams
from anypool.errors import (
    CheckpointFormatError,
    ConfigError,
    PromptTooLongError,
    UnsupportedArchitectureError,
    UnsupportedTaskError,
    WeightsError,
)
from anypool.pooling import sparse
from anypool.pooling.tasks import PoolingTask
from tests.helpers import (
    HIDDEN,
    MAX_POSITIONS,
    RAGGED,
    assert_close,
    copy_of,
    edit_json,
    loaded,
    new_folder,
    save,
    tiny_bert,
    wordpiece_tokenizer,
)

SMALL: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": MAX_POSITIONS,
    "initializer_range": 0.2,
}
DISTIL: dict[str, Any] = {"dim": HIDDEN, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, "activation": "relu"}
# Model type -> the configuration's fields; None stands for their defaults.
FAMILIES: dict[str, dict[str, Any]] = {
    "albert": {**SMALL, "embedding_size": 16, "hidden_act": "gelu_new"},
    "bert": {**SMALL, "hidden_act": "relu"},
    "camembert": SMALL,
    "deberta-v2": {**SMALL, "relative_attention": True, "position_buckets": 8, "pos_att_type": ["p2c", "c2p"]},
    "deberta-v2 new": {**SMALL, "legacy": False, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    "distilbert": {**DISTIL, "max_position_embeddings": MAX_POSITIONS, "initializer_range": 0.2},
    "electra": {**SMALL, "embedding_size": 16, "hidden_act": "relu"},
    "modernbert": {**SMALL, "classifier_activation": "silu", "classifier_bias": True, "decoder_bias": False},
    "mpnet": SMALL,
    "roberta": {**SMALL, "hidden_act": "relu"},
    "xlm-roberta": SMALL,
}


@cache
def masked_lm(family: str = "bert", *, tied: bool = True, further_words: int = 3) -> Path:
    """A tiny masked language model. It has a few words more than its tokenizer, as padded vocabularies do."""
    torch.manual_seed(5)
    tokenizer = wordpiece_tokenizer(model_max_length=MAX_POSITIONS - 2)
    ids = {"vocab_size": len(tokenizer) + further_words, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
    if family == "modernbert":
        ids |= {"cls_token_id": 2, "sep_token_id": 3}
    config = transformers.AutoConfig.for_model(
        family.split()[0], **ids, **FAMILIES[family], **({} if tied else {"tie_word_embeddings": False})
    )
    model = transformers.AutoModelForMaskedLM.from_config(config, attn_implementation="eager")
    return save(model, tokenizer, f"masked-{family.split()[0]}")


def save_sparse(*modules: Any, **settings: Any) -> Path:
    folder = new_folder("sparse-encoder")
    SparseEncoder(modules=list(modules), device="cpu", **settings).save_pretrained(str(folder), create_model_card=False)
    return folder


@cache
def splade(strategy: str = "max", activation: str = "relu") -> Path:
    transformer = Transformer(str(masked_lm()), transformer_task="fill-mask")
    return save_sparse(transformer, SpladePooling(strategy, activation_function=activation))


@cache
def auto_encoder(*, normalize: bool = False) -> Path:
    torch.manual_seed(6)
    encoder = SparseAutoEncoder(16, 64, k=12, k_aux=16, normalize=normalize)
    with torch.no_grad():
        encoder.pre_bias.normal_()
        encoder.latent_bias.normal_()
    return save_sparse(Transformer(str(tiny_bert())), Pooling(HIDDEN, "cls"), Dense(HIDDEN, 16), encoder)


def expected(folder: Path, texts: Sequence[str] = RAGGED, **options: Any) -> torch.Tensor:
    """`SparseEncoder.encode`, `[N, V]`."""
    model = SparseEncoder(str(folder), device="cpu", local_files_only=True)
    return model.encode(
        list(texts), convert_to_tensor=True, convert_to_sparse_tensor=False, show_progress_bar=False, **options
    )


def sparse_vectors(llm: LLM, texts: Any = RAGGED, *params: Any, **options: Any) -> torch.Tensor:
    """`[N, V]`, of all texts in one call."""
    outputs = llm.sparse_embed(texts, *params, use_tqdm=False, truncate_prompt_tokens=-1, **options)
    return torch.stack([output.outputs.to_dense() for output in outputs])


@pytest.mark.parametrize("activation", ["relu", "log1p_relu"])
@pytest.mark.parametrize("strategy", ["max", "sum"])
def test_splade_equals_sentence_transformers(strategy: str, activation: str) -> None:
    folder = splade(strategy, activation)
    with loaded(folder) as llm:
        assert llm.supported_tasks == ("token_embed", "sparse_embed")
        together_NV = sparse_vectors(llm)
        assert_close(together_NV, expected(folder), atol=1e-5 if strategy == "max" else 1e-4)  # a sum of 130 terms
        for text, row_V in zip(RAGGED, together_NV, strict=True):
            scale = 1e-6 * row_V.max().clamp_min(1)
            assert ((sparse_vectors(llm, [text])[0] - row_V).abs() <= scale).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_head_of_every_family_is_read(family: str) -> None:
    folder = masked_lm(family)
    with loaded(folder, convert="sparse") as llm:
        assert_close(sparse_vectors(llm), expected(folder))


def test_decoder_that_is_not_the_input_embedding() -> None:
    folder = masked_lm(tied=False)
    with loaded(folder, convert="sparse") as llm:
        assert_close(sparse_vectors(llm), expected(folder))
        decoder_VD = llm.engine.loaded.model.pooler[PoolingTask.SPARSE_EMBED].decoder_VD
        assert decoder_VD is not llm.engine.loaded.model.embeddings.word_embeddings.weight


def test_decoder_that_is_the_input_embedding_takes_no_memory() -> None:
    with loaded(masked_lm(), convert="sparse") as llm:
        model = llm.engine.loaded.model
        assert model.pooler[PoolingTask.SPARSE_EMBED].decoder_VD is model.embeddings.word_embeddings.weight


def test_masked_lm_in_another_folder_dialect_loads() -> None:
    """The class of its own that the transformer had before version 5.4."""
    folder = copy_of(splade())
    edit_json(
        folder / "modules.json",
        lambda modules: modules[0].update(type="sentence_transformers.sparse_encoder.models.MLMTransformer"),
    )
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 64, "do_lower_case": False}))
    with loaded(folder) as llm:
        assert_close(sparse_vectors(llm, RAGGED[2:3]), expected(splade(), RAGGED[2:3]))


@pytest.mark.parametrize("normalize", [False, True])
def test_auto_encoder_equals_sentence_transformers(normalize: bool) -> None:
    folder = auto_encoder(normalize=normalize)
    with loaded(folder) as llm:
        assert llm.supported_tasks == ("embed", "token_embed", "sparse_embed")
        assert_close(sparse_vectors(llm), expected(folder))
        more = PoolingParams(max_active_dims=40)  # takes the place of the module's own 12
        assert_close(sparse_vectors(llm, RAGGED, more), expected(folder, max_active_dims=40))


def test_auto_encoder_after_normalize() -> None:
    torch.manual_seed(7)
    encoder = SparseAutoEncoder(HIDDEN, 64, k=12, k_aux=16)
    folder = save_sparse(Transformer(str(tiny_bert())), Pooling(HIDDEN, "mean"), Normalize(), encoder)
    with loaded(folder) as llm:
        assert_close(sparse_vectors(llm), expected(folder))


def test_largest_weights_are_kept() -> None:
    folder = splade()
    with loaded(folder) as llm:
        assert_close(sparse_vectors(llm, RAGGED, PoolingParams(max_active_dims=7)), expected(folder, max_active_dims=7))
        params = [PoolingParams(max_active_dims=n) for n in (1, 4, 9, 2)]
        rows = sparse_vectors(llm, RAGGED, params)
    assert [int((row != 0).sum()) for row in rows] == [1, 4, 9, 2]


def test_checkpoint_says_how_many_weights_are_kept() -> None:
    folder = copy_of(splade())
    edit_json(folder / "config_sentence_transformers.json", lambda config: config.update(max_active_dims=6))
    with loaded(folder) as llm:
        assert_close(sparse_vectors(llm), expected(folder))


def test_equal_weights_keep_the_lower_index() -> None:
    rows = sparse.pack_weights(torch.tensor([1, 4, 6, 9]), torch.tensor([0.5, 2.0, 0.5, 0.5]))
    assert sparse.prune(rows, 3)[:, 0].tolist() == [1, 4, 6]


def test_output_holds_indices_and_values() -> None:
    with loaded(splade()) as llm:
        [output] = llm.sparse_embed("cat", use_tqdm=False)
    vector = output.outputs
    assert (vector.indices.dtype, vector.values.dtype) == (torch.int32, torch.float32)
    assert vector.indices.tolist() == sorted(vector.weights)
    assert (vector.values > 0).all()
    assert vector.to_sparse().shape == (vector.size,) == (llm.engine.loaded.config.vocab_size,)
    assert vector.numpy().tolist() == list(vector.weights.values())
    assert len(output.prompt_token_ids) == 3


class LargestTensor(TorchDispatchMode):
    """How many elements the largest tensor has that an operation makes."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for one in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(one, torch.Tensor):
                self.elements = max(self.elements, one.numel())
        return result


@pytest.mark.parametrize("strategy", ["max", "sum"])
def test_logits_of_all_tokens_for_all_words_are_never_in_memory(monkeypatch: pytest.MonkeyPatch, strategy: str) -> None:
    monkeypatch.setattr(sparse, "_BLOCK_TOKENS", 16)
    monkeypatch.setattr(sparse, "_BLOCK_WORDS", 8)
    folder = splade(strategy)
    with loaded(folder) as llm:
        assert_close(sparse_vectors(llm), expected(folder), atol=1e-5 if strategy == "max" else 1e-4)
        pooler = llm.engine.loaded.model.pooler[PoolingTask.SPARSE_EMBED]
    hidden_TD = torch.randn(500, HIDDEN)
    lengths = (1, 7, 63, 130, 299)
    segments = sparse.Segments(lengths, (0,) * 5, torch.device("cpu"))
    with torch.inference_mode(), LargestTensor() as largest:
        states_TD = pooler.transform(hidden_TD)
        largest.elements = 0
        for first in range(0, pooler.decoder_VD.shape[0], 8):
            pooler._block(states_TD, segments, first)
    assert largest.elements <= 16 * HIDDEN  # a view of a block of states; of all tokens and words there are 500 * 70


def test_weights_are_right_whatever_the_blocks_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse, "_BLOCK_TOKENS", 5)
    monkeypatch.setattr(sparse, "_BLOCK_WORDS", 7)
    for strategy in ("max", "sum"):
        folder = splade(strategy)
        with loaded(folder) as llm:
            assert_close(sparse_vectors(llm), expected(folder), atol=1e-5 if strategy == "max" else 1e-4)


def test_windows_have_the_largest_weights_of_all() -> None:
    long = " ".join(RAGGED)
    config = PoolerConfig(enable_chunked_processing=True, chunk_overlap=0)
    with loaded(splade(), max_model_len=40, pooler_config=config) as llm:
        [output] = llm.sparse_embed(long, use_tqdm=False)
        ids = output.prompt_token_ids
        body, size = ids[1:-1], 38
        count = -(-len(body) // size)
        starts = [min(i * size, len(body) - size) for i in range(count)]
        parts = [[ids[0], *body[start : start + size], ids[-1]] for start in starts]
        rows = sparse_vectors(llm, parts)
        [few] = llm.sparse_embed(long, PoolingParams(max_active_dims=5), use_tqdm=False)
    assert output.num_windows == count > 3
    assert_close(output.outputs.to_dense(), rows.amax(dim=0), atol=1e-6)
    assert few.outputs.values.tolist() == pytest.approx(
        output.outputs.values[output.outputs.values.argsort(descending=True)[:5].sort().values].tolist()
    )


@pytest.mark.parametrize("folder", [splade("sum"), auto_encoder()], ids=["sum", "auto-encoder"])
def test_what_is_no_maximum_over_tokens_is_not_run_in_windows(folder: Path) -> None:
    config = PoolerConfig(enable_chunked_processing=True)
    with (
        loaded(folder, max_model_len=40, pooler_config=config) as llm,
        pytest.raises(PromptTooLongError, match="a sparse vector of this model is about a whole text"),
    ):
        llm.sparse_embed(" ".join(RAGGED), use_tqdm=False)


def test_not_a_number_is_an_error() -> None:
    with loaded(splade()) as llm:
        llm.engine.loaded.model.pooler[PoolingTask.SPARSE_EMBED].bias_V.data[3] = float("nan")
        with pytest.raises(RuntimeError, match="NaN"):
            llm.sparse_embed("cat", use_tqdm=False)


def test_masked_lm_is_dense_unless_sparse_is_asked_for() -> None:
    with loaded(masked_lm(), pooler_config=PoolerConfig(pooling_type="MEAN")) as llm:
        assert llm.supported_tasks == ("embed", "token_embed")
        with pytest.raises(UnsupportedTaskError, match="convert='sparse'"):
            llm.sparse_embed("cat", use_tqdm=False)


def test_splade_embeds_where_the_user_says_how() -> None:
    with loaded(splade(), pooler_config=PoolerConfig(pooling_type="MEAN")) as llm:
        assert llm.supported_tasks == ("embed", "token_embed", "sparse_embed")


def test_convert_sparse_needs_the_head_of_a_masked_lm() -> None:
    with pytest.raises(ConfigError, match=r"BertModel and has no head of a masked language model"):
        LLM(tiny_bert(), convert="sparse", device="cpu")


def test_missing_head_is_named() -> None:
    folder = copy_of(tiny_bert())
    edit_json(folder / "config.json", lambda config: config.update(architectures=["BertForMaskedLM"]))
    with pytest.raises(WeightsError, match=r"cls\.predictions\.transform\.dense\.weight"):
        LLM(folder, convert="sparse", device="cpu")


def test_family_whose_head_is_not_known_is_refused() -> None:
    torch.manual_seed(5)
    tokenizer = wordpiece_tokenizer(model_max_length=MAX_POSITIONS)
    config = transformers.ErnieConfig(vocab_size=len(tokenizer), **SMALL)
    folder = save(transformers.ErnieForMaskedLM(config), tokenizer, "ernie")
    with pytest.raises(UnsupportedArchitectureError, match="SPLADE is supported for the model types albert, bert"):
        LLM(folder, convert="sparse", device="cpu")


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("1_SpladePooling/config.json", {"pooling_strategy": "mean"}, "pooling_strategy 'mean'; known: max, sum"),
        ("1_SpladePooling/config.json", {"activation_function": "gelu"}, "activation_function 'gelu'"),
        ("1_SpladePooling/config.json", {"tau": 1}, "unknown keys tau"),
        ("config_sentence_transformers.json", {"max_active_dims": 0}, "max_active_dims 0, not a positive integer"),
    ],
    ids=["strategy", "activation", "key", "max_active_dims"],
)
def test_what_is_not_understood_is_refused(file: str, change: dict[str, Any], message: str) -> None:
    folder = copy_of(splade())
    edit_json(folder / file, lambda config: config.update(change))
    with pytest.raises(CheckpointFormatError, match=message):
        LLM(folder, device="cpu")
