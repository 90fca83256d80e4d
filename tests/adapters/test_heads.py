"""Classification heads give transformers' logits, and the activations that checkpoints, settings and requests name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from anypool import LLM, HeadLayer, HeadRecipe, PoolerConfig, PoolingParams, register_head
from anypool.config import ACTIVATIONS
from anypool.errors import (
    CheckpointFormatError,
    ConfigError,
    InvalidParameterError,
    UnsupportedArchitectureError,
    UnsupportedTaskError,
    WeightsError,
)
from anypool.pooling.methods import PoolingType
from tests.helpers import copy_of, edit_json, loaded, new_folder
from tests.models.parity import random_ids, save_random

LABELS = 3
COMMON = {
    "vocab_size": 120,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 160,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GQA = {**COMMON, "num_key_value_heads": 2}
WIDE_HEADS = {**GQA, "head_dim": 16, "sliding_window": 20}
PAD_1 = {**COMMON, "pad_token_id": 1}
GPT = {"vocab_size": 120, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 160, "pad_token_id": 0}
DISTIL = {"vocab_size": 120, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 160}
MODERN = {**COMMON, "local_attention": 24, "num_hidden_layers": 4, "cls_token_id": 1, "sep_token_id": 2}
DEBERTA = {
    **COMMON,
    "relative_attention": True,
    "position_buckets": 16,
    "share_att_key": True,
    "pos_att_type": "p2c|c2p",
    "position_biased_input": False,
}

# Stem of transformers' class names, and its configuration.
ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "albert": ("Albert", {**COMMON, "embedding_size": 16}),
    "bert": ("Bert", COMMON),
    "camembert": ("Camembert", PAD_1),
    "data2vec-text": ("Data2VecText", PAD_1),
    "deberta-v2": ("DebertaV2", DEBERTA),
    "deberta-v2-tanh": ("DebertaV2", {**DEBERTA, "pooler_hidden_act": "tanh"}),
    "distilbert": ("DistilBert", DISTIL),
    "electra": ("Electra", {**COMMON, "embedding_size": 16}),
    "ernie": ("Ernie", COMMON),
    "modernbert-cls": ("ModernBert", {**MODERN, "classifier_pooling": "cls"}),
    "modernbert-mean": (
        "ModernBert",
        {**MODERN, "classifier_pooling": "mean", "classifier_bias": True, "norm_bias": True},
    ),
    "modernbert-silu": ("ModernBert", {**MODERN, "classifier_pooling": "mean", "classifier_activation": "silu"}),
    "mpnet": ("MPNet", PAD_1),
    "roberta": ("Roberta", {**PAD_1, "type_vocab_size": 1}),
    "xlm-roberta": ("XLMRoberta", {**PAD_1, "type_vocab_size": 1}),
    # Through transformers in padded or packed batches.
    "big_bird": ("BigBird", COMMON),
    "eurobert-mean": ("EuroBert", {**GQA, "classifier_pooling": "mean"}),
    "fnet": ("FNet", COMMON),
    "megatron-bert": ("MegatronBert", COMMON),
    "roformer": ("RoFormer", {**COMMON, "embedding_size": 32}),
    "xlm": ("XLM", {"vocab_size": 120, "emb_dim": 32, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 160}),
    "xlnet": ("XLNet", {"vocab_size": 120, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48}),
}
DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma": ("Gemma", {**GQA, "head_dim": 16}),
    "gemma2": ("Gemma2", WIDE_HEADS),
    "gemma3": ("Gemma3Text", WIDE_HEADS),
    "gpt2": ("GPT2", GPT),
    "gpt-neox": ("GPTNeoX", COMMON),
    "llama": ("Llama", GQA),
    "llama-no-padding-id": ("Llama", {**GQA, "pad_token_id": None}),
    "llama-padding-is-eos": ("Llama", {**GQA, "pad_token_id": 2}),
    "mistral": ("Mistral", {**GQA, "sliding_window": 20}),
    "mixtral": ("Mixtral", {**GQA, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "opt": ("OPT", {**COMMON, "ffn_dim": 48, "word_embed_proj_dim": 32}),
    "opt-projected": ("OPT", {**COMMON, "ffn_dim": 48, "word_embed_proj_dim": 16}),
    "phi3": ("Phi3", {**GQA, "sliding_window": 20}),
    "qwen2": ("Qwen2", GQA),
    "qwen3": ("Qwen3", {**GQA, "head_dim": 16}),
    "starcoder2": ("Starcoder2", {**GQA, "sliding_window": 20}),
}
BY_TOKEN = (
    *("bert", "deberta-v2", "distilbert", "electra", "modernbert-cls", "modernbert-mean", "mpnet", "roberta"),
    *("camembert", "xlm-roberta", "gemma2", "gpt2", "gpt-neox", "llama", "mistral", "qwen3"),
)


def save_head(stem: str, values: dict[str, Any], kind: str, folder: Path, **changes: Any) -> Any:
    """A random classifier of transformers', saved, and the model itself."""
    config = getattr(hf, f"{stem}Config")(**{"num_labels": LABELS, **values, **changes})
    torch.manual_seed(0)
    model = getattr(hf, f"{stem}For{kind}")._from_config(config, attn_implementation="eager")
    save_random(model, folder)
    return model


def ragged(*, pads: bool) -> list[list[int]]:
    """Texts of 1, 7, 63 and 130 tokens; with the ids 0 and 2, which some take for padding, inside and at the end."""
    texts = random_ids(120)
    if pads:
        texts[1][-2:] = [0, 0]
        texts[2][-1], texts[2][20:23] = 2, [0, 2, 0]
        texts[3][60] = 0
        texts += [[0], [0, 0, 0], [9, 0, 2, 0], [9, 2, 0, 2]]
    return texts


@torch.inference_mode()
def logits_of(model: Any, texts: list[list[int]]) -> list[torch.Tensor]:
    """transformers' logits, each text alone."""
    return [
        model(input_ids=torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.int64)).logits[0]
        for ids in texts
    ]


def scores(llm: LLM, texts: list[list[int]], params: Any = None, *, task: str = "classify") -> list[torch.Tensor]:
    """Raw results of all texts in one batch."""
    return [output.outputs.data for output in llm.encode(texts, params, pooling_task=task, use_tqdm=False)]


RAW = PoolingParams(use_activation=False)


def assert_same(actual: list[torch.Tensor], expected: list[torch.Tensor], *, atol: float = 1e-5) -> None:
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other.float(), atol=atol, rtol=0)


@pytest.mark.parametrize("name", [*ENCODERS, *DECODERS])
def test_sequence_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    stem, values = {**ENCODERS, **DECODERS}[name]
    model = save_head(stem, values, "SequenceClassification", tmp_path)
    texts = ragged(pads=name in DECODERS)
    with loaded(tmp_path) as llm:
        assert_same(scores(llm, texts, RAW), logits_of(model, texts))


@pytest.mark.parametrize("name", BY_TOKEN)
def test_token_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    stem, values = {**ENCODERS, **DECODERS}[name]
    model = save_head(stem, values, "TokenClassification", tmp_path)
    texts = ragged(pads=name in DECODERS)
    with loaded(tmp_path) as llm:
        assert "classify" not in llm.supported_tasks
        assert_same(scores(llm, texts, RAW, task="token_classify"), logits_of(model, texts))


@pytest.mark.parametrize("name", ["gemma2", "llama", "bert", "modernbert-mean"])
def test_a_head_runs_over_transformers_backbones_alike(name: str, tmp_path: Path) -> None:
    stem, values = {**ENCODERS, **DECODERS}[name]
    model = save_head(stem, values, "SequenceClassification", tmp_path)
    texts = ragged(pads=name in DECODERS)
    with loaded(tmp_path, model_impl="transformers") as llm:
        assert_same(scores(llm, texts, RAW), logits_of(model, texts))


@pytest.mark.parametrize(("stem", "padding"), [("Gemma", 0), ("OPT", 1)])
def test_a_padding_id_that_config_json_leaves_out_is_the_familys(stem: str, padding: int, tmp_path: Path) -> None:
    values = without("pad_token_id")(GQA)
    own = {"head_dim": 16} if stem == "Gemma" else {"ffn_dim": 48, "word_embed_proj_dim": 32}
    model = save_head(stem, {**values, **own}, "SequenceClassification", tmp_path)
    assert model.config.pad_token_id == padding
    edit_json(tmp_path / "config.json", without("pad_token_id"))
    texts = [[9, 8, 7, padding], [9, padding, 7]]
    with loaded(tmp_path) as llm:
        assert_same(scores(llm, texts, RAW), logits_of(model, texts))


# One checkpoint per kind, for what does not depend on the family.


@pytest.fixture(scope="module")
def llama() -> tuple[Path, Any]:
    folder = new_folder("llama-classifier")
    model = save_head("Llama", GQA, "SequenceClassification", folder, id2label={0: "bad", 1: "fair", 2: "good"})
    return folder, model


@pytest.fixture(scope="module")
def tagger() -> tuple[Path, Any]:
    folder = new_folder("bert-tagger")
    return folder, save_head("Bert", COMMON, "TokenClassification", folder, id2label={0: "O", 1: "PER", 2: "LOC"})


@pytest.fixture(scope="module")
def llm(llama: tuple[Path, Any]) -> Iterator[LLM]:
    with loaded(llama[0]) as llm:
        yield llm


TEXTS = ragged(pads=True)

FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "none": lambda x: x,
    "sigmoid": torch.nn.Sigmoid(),
    "softmax": torch.nn.Softmax(dim=-1),
    "tanh": torch.nn.Tanh(),
    "relu": torch.nn.ReLU(),
    "gelu": torch.nn.GELU(),
    "silu": torch.nn.SiLU(),
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_each_activation_is_torchs(activation: str, llm: LLM, llama: tuple[Path, Any]) -> None:
    logits = logits_of(llama[1], TEXTS)
    expected = [FUNCTIONS[activation](row) for row in logits]
    assert_same(scores(llm, TEXTS, PoolingParams(activation=activation)), expected)
    with loaded(llama[0], pooler_config=PoolerConfig(activation=activation)) as configured:
        assert_same(scores(configured, TEXTS), expected)
        assert_same(scores(configured, TEXTS, RAW), logits)
        assert_same(scores(configured, TEXTS, task="reward"), expected)


@pytest.mark.parametrize(
    ("labels", "problem_type", "activation"),
    [
        (3, None, "softmax"),
        (3, "single_label_classification", "softmax"),
        (3, "multi_label_classification", "sigmoid"),
        (3, "regression", "none"),
        (1, None, "sigmoid"),
        (1, "regression", "none"),
    ],
)
def test_the_default_activation_follows_labels_and_problem_type(
    labels: int, problem_type: str | None, activation: str, tmp_path: Path
) -> None:
    for stem, values, kind, task in (
        ("Bert", COMMON, "SequenceClassification", "classify"),
        ("Bert", COMMON, "TokenClassification", "token_classify"),
        ("Llama", GQA, "SequenceClassification", "classify"),
    ):
        folder = tmp_path / (stem + kind)
        model = save_head(stem, values, kind, folder, num_labels=labels, problem_type=problem_type)
        expected = [FUNCTIONS[activation](row) for row in logits_of(model, random_ids(120))]
        with loaded(folder) as llm:
            assert_same(scores(llm, random_ids(120), task=task), expected)


def test_activations_differ_from_request_to_request(llm: LLM, llama: tuple[Path, Any]) -> None:
    params = [PoolingParams(activation=name) for name in ("none", "sigmoid", "softmax")] * 3
    expected = [
        FUNCTIONS[str(one.activation)](row) for one, row in zip(params, logits_of(llama[1], TEXTS), strict=True)
    ]
    assert_same(scores(llm, TEXTS, params), expected)


@pytest.mark.parametrize(
    ("keys", "activation"),
    [
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Tanh"}}, "tanh"),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, "none"),
        (
            {
                "sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"},
                "sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity",
            },
            "sigmoid",
        ),
    ],
)
def test_a_cross_encoders_activation_wins_over_the_default(
    keys: dict[str, Any], activation: str, llama: tuple[Path, Any]
) -> None:
    expected = [FUNCTIONS[activation](row) for row in logits_of(llama[1], TEXTS)]
    with loaded(llama[0], hf_overrides=keys) as llm:
        assert_same(scores(llm, TEXTS), expected)
        assert_same(scores(llm, TEXTS, PoolingParams(activation="softmax")), scores(llm, TEXTS, _named("softmax")))
    with loaded(llama[0], hf_overrides=keys, pooler_config=PoolerConfig(activation="relu")) as llm:
        assert_same(scores(llm, TEXTS), [row.relu() for row in logits_of(llama[1], TEXTS)])


def _named(activation: str) -> PoolingParams:
    return PoolingParams(activation=activation)


def test_a_cross_encoders_activation_that_is_unknown_is_refused_by_its_file(llama: tuple[Path, Any]) -> None:
    keys = {"sbert_ce_default_activation_function": "my_package.Custom"}
    with pytest.raises(CheckpointFormatError, match=r"config\.json: activation 'my_package.Custom' of scores"):
        LLM(llama[0], device="cpu", hf_overrides=keys)


def test_scores_are_calibrated_before_the_activation(llama: tuple[Path, Any]) -> None:
    config = PoolerConfig(logit_mean=0.25, logit_sigma=0.5, activation="sigmoid")
    expected = [((row - 0.25) / 0.5).sigmoid() for row in logits_of(llama[1], TEXTS)]
    with loaded(llama[0], pooler_config=config) as llm:
        assert_same(scores(llm, TEXTS), expected)
    with pytest.warns(DeprecationWarning, match=r"logit_(bias|scale)=\) is old: use logit_(mean|sigma)=") as caught:
        old = PoolerConfig(logit_bias=0.25, logit_scale=2.0, activation="sigmoid")
    assert [Path(one.filename).name for one in caught] == [Path(__file__).name] * 2
    assert old == config


def test_labels_are_those_of_config_json(llm: LLM, llama: tuple[Path, Any], tagger: tuple[Path, Any]) -> None:
    names = ["bad", "fair", "good"]
    for output, row in zip(llm.classify(TEXTS, use_tqdm=False), logits_of(llama[1], TEXTS), strict=True):
        assert output.outputs.labels == dict(enumerate(names))
        assert output.outputs.label == names[int(row.argmax())]
        assert output.outputs.num_classes == LABELS
        assert sum(output.outputs.probs) == pytest.approx(1)
    with loaded(tagger[0]) as bert:
        [output] = bert.token_classify([TEXTS[2]], use_tqdm=False)
        [rows] = logits_of(tagger[1], [TEXTS[2]])
        assert output.outputs.token_labels == [["O", "PER", "LOC"][i] for i in rows.argmax(-1)]
        assert output.outputs.offsets is None


def test_chosen_columns_keep_their_labels(tagger: tuple[Path, Any]) -> None:
    [rows] = logits_of(tagger[1], [TEXTS[2]])
    expected = rows[:, [2, 0]].softmax(-1)
    with loaded(tagger[0]) as bert:
        [output] = bert.token_classify([TEXTS[2]], PoolingParams(returned_token_ids=[2, 0]), use_tqdm=False)
    assert_same([output.outputs.data], [expected])
    assert output.outputs.labels == {0: "LOC", 1: "O"}
    with loaded(tagger[0], pooler_config={"returned_token_ids": [2, 0]}) as bert:
        [output] = bert.token_classify([TEXTS[2]], use_tqdm=False)
        assert_same([output.outputs.data], [expected])
        assert output.outputs.labels == {0: "LOC", 1: "O"}


def test_labels_without_names_are_numbered(llama: tuple[Path, Any]) -> None:
    folder = copy_of(llama[0])
    edit_json(folder / "config.json", without("id2label"))
    with loaded(folder) as llm:
        [output] = llm.classify([[5, 6]], use_tqdm=False)
        assert list(output.outputs.labels.values()) == ["LABEL_0", "LABEL_1", "LABEL_2"]


def test_a_sequence_head_scores_each_token_too(llm: LLM, llama: tuple[Path, Any]) -> None:
    model = llama[1]
    with torch.inference_mode():
        expected = [model.score(model.model(torch.tensor([ids])).last_hidden_state[0]) for ids in TEXTS]
    assert_same(scores(llm, TEXTS, RAW, task="token_classify"), expected)
    assert_same(scores(llm, TEXTS, task="token_classify"), [rows.softmax(-1) for rows in expected])
    kept = scores(llm, TEXTS[2:3], PoolingParams(step_tag_id=0), task="token_classify")
    assert_same(kept, [expected[2][[20, 22]].softmax(-1)])


def test_a_head_scores_the_pooled_row_that_the_user_asks_for(llama: tuple[Path, Any]) -> None:
    model = llama[1]
    with torch.inference_mode():
        states = [model.model(torch.tensor([ids])).last_hidden_state[0] for ids in TEXTS]
        expected = {
            "MEAN": [model.score(rows.mean(0)) for rows in states],
            "LAST": [model.score(r[-1]) for r in states],
        }
    for pooling_type, rows in expected.items():
        with loaded(llama[0], pooler_config={"pooling_type": pooling_type}) as llm:
            assert_same(scores(llm, TEXTS, RAW), rows)


def test_a_checkpoint_with_a_head_still_embeds(llama: tuple[Path, Any]) -> None:
    with torch.inference_mode():
        expected = [llama[1].model(torch.tensor([ids])).last_hidden_state[0, -1] for ids in TEXTS]
    unit = [torch.nn.functional.normalize(row, dim=-1) for row in expected]
    for convert in ("auto", "embed"):
        with loaded(llama[0], convert=convert) as llm:
            assert ("classify" in llm.supported_tasks) == (convert == "auto")
            assert_same(scores(llm, TEXTS, task="embed"), unit)


@pytest.mark.parametrize("kind", ["SequenceClassification", "TokenClassification"])
@pytest.mark.parametrize(("stem", "values"), [("Llama", GQA), ("DistilBert", DISTIL)])
def test_heads_run_in_float32_over_a_bfloat16_backbone(
    stem: str, values: dict[str, Any], kind: str, tmp_path: Path
) -> None:
    model = save_head(stem, values, kind, tmp_path).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    model = model.float()  # of the rounded weights
    texts = ragged(pads=stem == "Llama")
    task = "classify" if kind == "SequenceClassification" else "token_classify"
    with loaded(tmp_path, dtype="bfloat16") as llm:
        assert llm.engine.loaded.dtype == torch.bfloat16
        raw = PoolingParams(normalize=False)
        states = scores(llm, texts, raw, task="token_embed")
        assert all(torch.equal(rows, rows.bfloat16().float()) for rows in states)
        actual = scores(llm, texts, RAW, task=task)

    def head(rows: torch.Tensor, ids: list[int]) -> torch.Tensor:
        if stem == "Llama":
            rows = rows if task == "token_classify" else rows[max((i for i, t in enumerate(ids) if t != 0), default=0)]
            return model.score(rows)
        return model.classifier(rows if task == "token_classify" else model.pre_classifier(rows[0]).relu())

    with torch.inference_mode():
        assert_same(actual, [head(rows, ids) for rows, ids in zip(states, texts, strict=True)], atol=1e-6)


# Heads of one's own


def test_a_registered_head_is_read_from_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from anypool.adapters import heads

    monkeypatch.setattr(heads, "_REGISTERED", {})
    model = save_head("Llama", GQA, "SequenceClassification", tmp_path, num_labels=2)
    torch.manual_seed(1)
    norm, up, down = torch.nn.LayerNorm(32), torch.nn.Linear(32, 20), torch.nn.Linear(20, 2, bias=False)
    torch.nn.init.normal_(norm.weight)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["score.weight"]
    for name, module in {"top.norm": norm, "top.up": up, "top.down": down}.items():
        tensors |= {f"{name}.{part}": tensor.detach() for part, tensor in module.named_parameters()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    edit_json(tmp_path / "config.json", lambda config: config.update(architectures=["LlamaForRewardModel"]))
    layers = (
        HeadLayer(tensor="top.norm", norm=True),
        HeadLayer(tensor="top.up", activation="silu"),
        HeadLayer(tensor="top.down"),
    )
    register_head("LlamaForRewardModel", HeadRecipe(layers=layers, reported_column=1))
    norm.eps = 1e-6  # a Llama's
    with torch.inference_mode():
        states = [model.model(torch.tensor([ids])).last_hidden_state[0] for ids in TEXTS]
        last = [max((i for i, t in enumerate(ids) if t != 0), default=0) for ids in TEXTS]
        expected = [down(torch.nn.functional.silu(up(norm(rows[i])))) for rows, i in zip(states, last, strict=True)]
    with loaded(tmp_path) as llm:
        assert_same(scores(llm, TEXTS), [row.softmax(-1) for row in expected])
        assert_same(scores(llm, TEXTS, task="reward"), [row.softmax(-1)[1:] for row in expected])
    for recipe, kind, match in (
        (HeadRecipe(layers=layers, reported_column=2), ConfigError, "column 2 of its head, .* columns 0 to 1"),
        (HeadRecipe(layers=(layers[2],)), WeightsError, r"'top.down.weight' has shape \[2, 20\], .* gives rows of 32"),
        (HeadRecipe(layers=(HeadLayer(tensor="top.norm"),)), WeightsError, r"'top.norm.weight' has shape \[32\]"),
        (HeadRecipe(layers=(HeadLayer(tensor="top.up", activation="sine"),)), CheckpointFormatError, "'sine' in the h"),
        (HeadRecipe(layers=(HeadLayer(tensor="top.down", bias=True),)), WeightsError, "a tensor 'top.down.bias'"),
    ):
        register_head("LlamaForRewardModel", recipe)
        with pytest.raises(kind, match=match):
            LLM(tmp_path, device="cpu", use_tqdm_on_load=False)


@pytest.mark.parametrize("recipe", [None, HeadRecipe(layers=()), {"layers": ()}])
def test_a_recipe_without_layers_is_refused(recipe: Any) -> None:
    with pytest.raises(ConfigError, match="is not a HeadRecipe with at least one layer"):
        register_head("LlamaForRewardModel", recipe)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"layers": "classifier"}, "layers='classifier' is not a tuple of HeadLayer"),
        ({"layers": ("classifier",)}, r"layers=\('classifier',\) is not a tuple of HeadLayer"),
        ({"pooling": "median"}, "pooling='median' is unknown; known: CLS, LAST, MEAN"),
        ({"pooling": PoolingType.ALL}, "pooling=.*ALL.* is unknown; known: CLS"),
        ({"step_tag_id": "x"}, "step_tag_id='x' is not a number"),
        ({"reported_column": 1.0}, "reported_column=1.0 is not a number"),
    ],
    ids=str,
)
def test_a_recipe_with_wrong_values_is_refused(fields: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        HeadRecipe(**{"layers": (HeadLayer(tensor="score"),), **fields})
    with pytest.raises(ConfigError, match="tensor=3 is not a name"):
        HeadLayer(tensor=3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="architecture=None is not a name"):
        register_head(None, HeadRecipe(layers=(HeadLayer(tensor="score"),)))  # type: ignore[arg-type]


def test_a_bias_that_a_recipe_leaves_out_is_not_left_out_in_silence(tagger: tuple[Path, Any]) -> None:
    register_head(
        "TaggingBertForTokenClassification",
        HeadRecipe(layers=(HeadLayer(tensor="classifier", bias=False),), token_level=True),
    )
    with pytest.raises(WeightsError, match=r"'classifier\.bias' is there, and the head of this layer has bias=False"):
        open_broken(tagger[0], hf_overrides={"architectures": ["TaggingBertForTokenClassification"]})


# Errors


def without(key: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda config: {name: value for name, value in config.items() if name != key}


def open_broken(folder: Path, **options: Any) -> LLM:
    return LLM(folder, device="cpu", use_tqdm_on_load=False, **options)


@pytest.mark.parametrize(
    ("stem", "values", "tensor"),
    [
        ("Llama", GQA, "score.weight"),
        ("Bert", COMMON, "classifier.weight"),
        ("Bert", COMMON, "classifier.bias"),
        ("Bert", COMMON, "pooler.dense.weight"),
        ("Roberta", PAD_1, "classifier.out_proj.weight"),
        ("Roberta", PAD_1, "classifier.dense.bias"),
        ("DistilBert", DISTIL, "pre_classifier.weight"),
        ("ModernBert", MODERN, "head.norm.weight"),
    ],
)
def test_a_missing_tensor_of_the_head_is_named(stem: str, values: dict[str, Any], tensor: str, tmp_path: Path) -> None:
    save_head(stem, values, "SequenceClassification", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    [stored] = [name for name in tensors if name.endswith(tensor)]
    del tensors[stored]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(WeightsError, match=f"{stem}ForSequenceClassification needs a tensor '{tensor}', which is mis"):
        open_broken(tmp_path)


def test_a_count_of_labels_that_is_not_the_heads_is_refused(llama: tuple[Path, Any]) -> None:
    for keys in ({"num_labels": 5}, {"id2label": dict.fromkeys("01234", "x")}):
        with pytest.raises(WeightsError, match=r"config\.json has 5 labels, the head's tensor 3 rows"):
            open_broken(llama[0], hf_overrides=keys)


def test_a_head_over_another_backbone_is_refused(llama: tuple[Path, Any]) -> None:
    folder = copy_of(llama[0])
    tensors = load_file(folder / "model.safetensors")
    tensors["score.weight"] = torch.zeros(LABELS, 31)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        WeightsError, match=r"'score.weight' has shape \[3, 31\], and what comes before gives rows of 3"
    ):
        open_broken(folder)


def test_a_head_activation_that_is_unknown_is_refused(tmp_path: Path) -> None:
    save_head("ModernBert", {**MODERN, "classifier_activation": "relu"}, "SequenceClassification", tmp_path)
    with pytest.raises(
        CheckpointFormatError, match="unknown activation 'gelu_fast' in the head; known: None, tanh, re"
    ):
        open_broken(tmp_path, hf_overrides={"classifier_activation": "gelu_fast"})


def test_an_unknown_head_names_what_is_known(llama: tuple[Path, Any]) -> None:
    with pytest.raises(UnsupportedArchitectureError, match=r"'LlamaForDancing' is not known.*ForSequenceClass"):
        open_broken(llama[0], hf_overrides={"architectures": ["LlamaForDancing"]})


def test_classify_without_a_head_says_how_to_get_one(tmp_path: Path) -> None:
    hf.LlamaForCausalLM(hf.LlamaConfig(**GQA)).save_pretrained(tmp_path)
    how = r"\.\.\.ForSequenceClassification or \.\.\.ForTokenClassification, .*'classifier_from_token'"
    with loaded(tmp_path) as llm:
        for task in ("classify", "token_classify"):
            with pytest.raises(UnsupportedTaskError, match=f"task '{task}' is not served by .*{how}"):
                scores(llm, [[5]], task=task)
    with pytest.raises(ConfigError, match=f"convert='classify': .* has no classification head.*{how}"):
        open_broken(tmp_path, convert="classify")


def test_a_token_head_does_not_classify_texts(tagger: tuple[Path, Any]) -> None:
    with (
        loaded(tagger[0]) as llm,
        pytest.raises(UnsupportedTaskError, match=r"it serves .*token_classify.* needs a hea"),
    ):
        llm.classify([[5]], use_tqdm=False)


@pytest.mark.parametrize(
    ("task", "field", "value"),
    [
        ("embed", "activation", "softmax"),
        ("embed", "step_tag_id", 5),
        ("embed", "returned_token_ids", [0]),
        ("token_embed", "activation", "none"),
        ("token_embed", "dimensions", 8),
        ("token_embed", "step_tag_id", 5),
        ("classify", "dimensions", 8),
        ("classify", "normalize", True),
        ("classify", "step_tag_id", 5),
        ("classify", "returned_token_ids", [0]),
        ("reward", "dimensions", 8),
        ("reward", "normalize", False),
        ("reward", "step_tag_id", 5),
        ("token_classify", "dimensions", 8),
        ("token_classify", "normalize", True),
    ],
)
def test_a_field_that_a_task_cannot_use_is_refused(task: str, field: str, value: Any, llm: LLM) -> None:
    with pytest.raises(InvalidParameterError, match=f"{field}=.* has no meaning for task '{task}'") as caught:
        scores(llm, [[5]], PoolingParams(**{field: value}), task=task)
    assert caught.value.param == field


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"activation": "softmax"}, "activation='softmax' has no meaning for a model without a head"),
        ({"logit_mean": 0.5}, "logit_mean=0.5 has no meaning"),
        ({"logit_sigma": 0.5}, "logit_sigma=0.5 has no meaning"),
        ({"step_tag_id": 5}, "step_tag_id=5 has no meaning"),
        ({"pooling_type": "STEP"}, "pooling_type='STEP' has no meaning"),
    ],
    ids=str,
)
def test_settings_of_scores_are_refused_without_scores(settings: dict[str, Any], match: str, tmp_path: Path) -> None:
    hf.LlamaForCausalLM(hf.LlamaConfig(**GQA)).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=match):
        open_broken(tmp_path, pooler_config=settings)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"pooling_type": "STEP"}, "pooling_type='STEP' needs step_tag_id"),
        ({"tok_pooling_type": "STEP"}, "pooling_type='STEP' needs step_tag_id"),
        ({"step_tag_id": 120}, "step_tag_id=120 is not a token of .*: its ids are 0 to 119"),
        ({"step_tag_id": -1}, "step_tag_id=-1 is not a token"),
        ({"returned_token_ids": [3]}, "returned_token_ids has 3; the head has the columns 0 to 2"),
        ({"returned_token_ids": [1]}, "'token_classify' would be the softmax of a single score, which is always 1"),
        ({"pooling_type": "MEAN+LAST"}, r"'MEAN\+LAST' gives rows of 64; the head of .* takes 32"),
    ],
    ids=str,
)
def test_settings_that_contradict_the_head_are_refused(
    settings: dict[str, Any], match: str, llama: tuple[Path, Any]
) -> None:
    with pytest.raises(ConfigError, match=match):
        open_broken(llama[0], pooler_config=settings)


def test_columns_that_the_head_does_not_have_are_refused(llm: LLM) -> None:
    for wrong in ([3], [-1], [0, 7]):
        with pytest.raises(InvalidParameterError, match=r"returned_token_ids has .*; the head has the columns 0 to 2"):
            scores(llm, [[5]], PoolingParams(returned_token_ids=wrong), task="token_classify")


def test_a_softmax_over_one_column_is_refused(llm: LLM, llama: tuple[Path, Any]) -> None:
    one = PoolingParams(returned_token_ids=[1])
    with pytest.raises(InvalidParameterError, match="'softmax' of a single score is always 1"):
        scores(llm, [[5]], one, task="token_classify")
    raw = scores(llm, TEXTS, PoolingParams(returned_token_ids=[1], activation="sigmoid"), task="token_classify")
    expected = scores(llm, TEXTS, PoolingParams(activation="sigmoid"), task="token_classify")
    assert_same(raw, [rows[:, 1:2] for rows in expected])


# Old spellings


def test_the_old_softmax_parameter_warns_and_works(llm: LLM) -> None:
    for old, activation in ((True, "softmax"), (False, "none")):
        with pytest.warns(DeprecationWarning, match=f"softmax=. is old: use activation='{activation}'") as caught:
            params = PoolingParams(softmax=old)
        assert Path(caught[0].filename).name == Path(__file__).name
        assert params == PoolingParams(activation=activation)
        assert_same(scores(llm, TEXTS, params), scores(llm, TEXTS, PoolingParams(activation=activation)), atol=0)


def test_the_old_engine_arguments_warn_and_work(llama: tuple[Path, Any]) -> None:
    with (
        pytest.warns(DeprecationWarning, match="task='embed' is old: use convert='embed'"),
        loaded(llama[0], task="embed") as llm,
    ):
        assert "classify" not in llm.supported_tasks
    with (
        pytest.warns(DeprecationWarning, match="override_pooler_config= is old: use pooler_config="),
        loaded(llama[0], override_pooler_config={"activation": "tanh"}) as llm,
    ):
        assert_same(scores(llm, TEXTS), [row.tanh() for row in logits_of(llama[1], TEXTS)])


def test_encode_without_a_task_warns_and_gives_token_vectors(llm: LLM) -> None:
    with pytest.warns(DeprecationWarning, match="means pooling_task='token_embed'"):
        outputs = llm.encode(TEXTS, use_tqdm=False)
    assert_same([o.outputs.data for o in outputs], scores(llm, TEXTS, task="token_embed"), atol=0)


def test_a_head_whose_row_no_pooling_gives_is_refused(tmp_path: Path) -> None:
    save_head("EuroBert", GQA, "SequenceClassification", tmp_path, classifier_pooling="late")
    with (
        pytest.raises(UnsupportedArchitectureError, match=r"classifier_pooling='late'; .* may be: bos, mean"),
        loaded(tmp_path),
    ):
        pass


def test_a_head_on_the_decoder_of_an_encoder_decoder_is_refused(tmp_path: Path) -> None:
    sizes = {"vocab_size": 120, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 48}
    save_head("Bart", {**sizes, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "decoder_ffn_dim": 48},
              "SequenceClassification", tmp_path)  # fmt: skip
    with pytest.raises(UnsupportedArchitectureError, match="reads the decoder's states"), loaded(tmp_path):
        pass
