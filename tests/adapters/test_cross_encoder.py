"""A CrossEncoder of any of sentence-transformers' forms gives the scores that `predict` gives."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_transformers import CrossEncoder
from sentence_transformers.base.modules import Dense, Transformer
from sentence_transformers.cross_encoder.modules import LogitScore
from sentence_transformers.sentence_transformer.modules import Pooling
from tokenizers import processors
from torch import nn
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    XLMRobertaConfig,
    XLMRobertaForSequenceClassification,
)

from anypool import LLM, PoolerConfig, PoolingParams
from anypool.engine.tokenization import Tokenizer
from anypool.errors import (
    CheckpointFormatError,
    ConfigError,
    InvalidParameterError,
    InvalidPromptError,
    UnsupportedArchitectureError,
    UnsupportedTaskError,
)
from anypool.model_executor.weights.repository import Repository
from tests.helpers import (
    HIDDEN,
    MAX_POSITIONS,
    RAGGED,
    assert_close,
    byte_tokenizer,
    copy_of,
    edit_json,
    loaded,
    new_folder,
    save,
    tiny_bert,
    tiny_llama,
    wordpiece_tokenizer,
)

SIZES = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "initializer_range": 0.2,
}
# Every length with every length: some fit, in some the first text is cut, in some the second, in some both.
PAIRS = [
    *((first, second) for first in RAGGED for second in RAGGED),
    ("", "cat"),
    ("a story", ""),
    ("", ""),
    (RAGGED[1] * 3, RAGGED[1] * 2),
    (RAGGED[3] * 2, RAGGED[1] * 4),
]
# Of a template nothing but the document is cut.
SHORT_FIRST = [(first, second) for first in (RAGGED[0], RAGGED[2], "") for second in (*RAGGED, "", RAGGED[1] * 5)]
TEMPLATE = (
    "{% for m in messages if m.role == 'system' %}[{{ m.content }}]{% endfor %}"
    "Q:{{ (messages | selectattr('role', 'eq', 'query') | first).content }}\n"
    "D:{{ (messages | selectattr('role', 'eq', 'document') | first).content }}\n"
    "{% if add_generation_prompt %}{{ eos_token }}>{% endif %}\nA:"
)


@cache
def bert(labels: int = 1, *, segments: bool = True) -> Path:
    torch.manual_seed(3)
    inputs = ["input_ids", *(["token_type_ids"] if segments else []), "attention_mask"]
    tokenizer = wordpiece_tokenizer(model_max_length=MAX_POSITIONS, model_input_names=inputs)
    config = BertConfig(vocab_size=len(tokenizer), max_position_embeddings=MAX_POSITIONS, num_labels=labels, **SIZES)
    return save(BertForSequenceClassification(config), tokenizer, "bert-classifier")


@cache
def bert_without_segments() -> Path:
    return bert(segments=False)


@cache
def xlm_roberta() -> Path:
    torch.manual_seed(4)
    tokenizer = byte_tokenizer("$A", model_max_length=MAX_POSITIONS)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    config = XLMRobertaConfig(
        vocab_size=len(tokenizer),
        max_position_embeddings=MAX_POSITIONS + 2,
        type_vocab_size=1,
        pad_token_id=0,
        num_labels=1,
        **SIZES,
    )
    return save(XLMRobertaForSequenceClassification(config), tokenizer, "xlm-roberta-classifier")


def llama_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer that begins both texts of a pair, as Llama's does."""
    tokenizer = byte_tokenizer(model_max_length=MAX_POSITIONS)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", 1)]
    )
    return tokenizer


@cache
def causal_lm(*, tied: bool = False) -> Path:
    folder = copy_of(tiny_llama(tied=tied))
    llama_tokenizer().save_pretrained(folder)
    return folder


@cache
def llama() -> Path:
    torch.manual_seed(5)
    tokenizer = llama_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        max_position_embeddings=MAX_POSITIONS,
        num_key_value_heads=2,
        pad_token_id=0,
        num_labels=1,
        **SIZES,
    )
    return save(LlamaForSequenceClassification(config), tokenizer, "llama-classifier")


CLASSIFIERS = {"bert": bert, "bert-without-segments": bert_without_segments, "xlm-roberta": xlm_roberta, "llama": llama}


@pytest.fixture(params=CLASSIFIERS)
def classifier(request: pytest.FixtureRequest) -> Path:
    return CLASSIFIERS[request.param]()


def saved(model: CrossEncoder) -> Path:
    folder = new_folder("cross-encoder")
    model.save(str(folder), create_model_card=False)
    return folder


def of_modules(*modules: Any, **settings: Any) -> Path:
    return saved(CrossEncoder(modules=list(modules), device="cpu", **settings))


def dense(labels: int = 1, **settings: Any) -> Dense:
    torch.manual_seed(6)
    settings = {"activation_function": nn.Identity(), "module_output_name": "scores", **settings}
    module = Dense(settings.pop("in_features", HIDDEN), labels, **settings)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module


@cache
def with_logit_score(false_token_id: int | None = 40, *, tied: bool = False, template: str | None = None) -> Path:
    folder = causal_lm(tied=tied)
    if template is not None:
        folder = copy_of(folder)
        (folder / "chat_template.jinja").write_text(template)
    return of_modules(Transformer(str(folder), transformer_task="text-generation"), LogitScore(50, false_token_id))


@cache
def with_dense(pooling: str = "lasttoken", backbone: Callable[[], Path] = causal_lm) -> Path:
    return of_modules(Transformer(str(backbone())), Pooling(HIDDEN, pooling), dense())


def reference(folder: Path, pairs: list[tuple[str, str]] = PAIRS, **options: Any) -> torch.Tensor:
    state = tuple((file, file.read_bytes()) for file in sorted(folder.rglob("*")) if file.suffix in (".json", ".jinja"))
    return torch.from_numpy(_reference_model(folder, state).predict(pairs, show_progress_bar=False, **options))


@lru_cache(maxsize=4)
def _reference_model(folder: Path, state: object) -> CrossEncoder:
    return CrossEncoder(str(folder), device="cpu", local_files_only=True)


def scores(llm: LLM, pairs: list[tuple[str, str]] = PAIRS, **options: Any) -> torch.Tensor:
    first, second = zip(*pairs, strict=True)
    outputs = llm.score(list(first), list(second), use_tqdm=False, **options)
    return torch.tensor([output.outputs.score for output in outputs])


def assert_same(folder: Path, pairs: list[tuple[str, str]] = PAIRS, **options: Any) -> torch.Tensor:
    """Equal with the default activation and with none; returns the latter, in which scores are told apart."""
    with loaded(folder) as llm:
        assert_close(scores(llm, pairs, **options), reference(folder, pairs, **options))
        raw = scores(llm, pairs, pooling_params=PoolingParams(activation="none"), **options)
    assert_close(raw, reference(folder, pairs, activation_fn=nn.Identity(), **options))
    return raw


# Forms


def test_a_bare_classifier_gives_the_reference_scores(classifier: Path) -> None:
    assert assert_same(classifier).std() > 1e-2


def test_a_saved_cross_encoder_gives_the_reference_scores(classifier: Path) -> None:
    folder = saved(CrossEncoder(str(classifier), device="cpu"))
    assert (folder / "modules.json").is_file()
    assert_close(assert_same(folder), assert_same(classifier), atol=0)


@pytest.mark.parametrize("false_token_id", [40, None])
@pytest.mark.parametrize("tied", [False, True])
def test_the_logits_of_one_or_two_tokens_give_the_reference_scores(tied: bool, false_token_id: int | None) -> None:
    assert assert_same(with_logit_score(false_token_id, tied=tied)).std() > 1e-2


@pytest.mark.parametrize("pooling", ["lasttoken", "mean", "max"])
def test_pooling_and_dense_give_the_reference_scores(pooling: str) -> None:
    assert assert_same(with_dense(pooling)).std() > 1e-2


def test_pooling_and_dense_over_an_encoder_give_the_reference_scores() -> None:
    assert_same(with_dense("mean", tiny_bert))


def test_a_chain_before_the_scores_gives_the_reference_scores() -> None:
    hidden = dense(24, in_features=2 * HIDDEN, module_output_name=None, activation_function=nn.Tanh())
    folder = of_modules(
        Transformer(str(tiny_bert())), Pooling(HIDDEN, ("mean", "cls")), hidden, dense(1, in_features=24)
    )
    assert_same(folder)


def test_a_transformer_in_a_folder_of_its_own_gives_the_reference_scores() -> None:
    folder = copy_of(with_logit_score())
    (folder / "0_Transformer").mkdir()
    for file in folder.iterdir():
        if file.is_file() and file.name not in ("modules.json", "config_sentence_transformers.json"):
            file.rename(folder / "0_Transformer" / file.name)
    edit_json(folder / "modules.json", lambda entries: entries[0].update(path="0_Transformer"))
    assert_same(folder)


# Pair encoding


def test_segments_change_the_scores_of_bert() -> None:
    assert (assert_same(bert()) - assert_same(bert_without_segments())).abs().max() > 1e-2


@pytest.mark.parametrize(("limit", "side"), [(31, "left"), (64, "right")])
def test_pairs_over_the_limit_give_the_reference_scores(classifier: Path, limit: int, side: str) -> None:
    folder = copy_of(classifier)
    edit_json(
        folder / "tokenizer_config.json",
        lambda config: config.update(model_max_length=limit, truncation_side=side),
    )
    assert_same(folder)
    with loaded(folder) as llm:
        assert llm.engine.max_model_len == limit
        [output] = llm.score(RAGGED[1], RAGGED[1], use_tqdm=False)
    assert len(output.prompt_token_ids) == limit
    assert output.num_truncated_tokens > 100


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("checkpoint", [bert, xlm_roberta, llama])
def test_pairs_are_cut_to_any_limit_as_transformers_cuts_them(checkpoint: Callable[[], Path], side: str) -> None:
    theirs = AutoTokenizer.from_pretrained(checkpoint(), truncation_side=side)
    ours = Tokenizer.load(Repository.open(str(checkpoint())))
    # transformers takes minutes to cut long texts to a few tokens: it keeps every pair of the parts it cuts off
    texts = ["", "a", "cat mat", "a story: cat"]
    for first, second in itertools.product(texts, texts):
        ids = ours.encode([first, second], special_tokens=False)
        special = len(ours.join_pair([], [], None)[0])
        for limit in range(special, special + sum(map(len, ids)) + 1):
            [expected] = theirs([first], [second], truncation=True, max_length=limit)["input_ids"]
            assert ours.join_pair(*ids, limit, side=side)[0] == expected, (first, second, limit)
        with pytest.raises(InvalidPromptError, match=f"the special tokens alone are {special}"):
            ours.join_pair(*ids, special - 1)


def test_max_seq_length_is_honoured() -> None:
    folder = copy_of(saved(CrossEncoder(str(bert()), device="cpu")))
    edit_json(folder / "sentence_bert_config.json", lambda config: config.update(max_seq_length=20))
    with loaded(folder) as llm:
        assert llm.engine.max_model_len == 20
    assert_same(folder)


def test_token_ids_and_segments_of_a_pair_are_those_of_transformers() -> None:
    model = CrossEncoder(str(bert()), device="cpu", local_files_only=True)
    with loaded(bert()) as llm:
        for first, second in PAIRS:
            features = model.preprocess([(first, second)])
            assert llm.engine.tokenizer is not None
            texts = llm.engine.tokenizer.encode([first, second], special_tokens=False)
            ids, segments, _ = llm.engine.tokenizer.join_pair(*texts, MAX_POSITIONS)
            assert ids == features["input_ids"][0].tolist()
            assert segments == features["token_type_ids"][0].tolist()


def test_a_pair_without_a_single_token_is_refused() -> None:
    folder = save_without_special_tokens()
    with loaded(folder) as llm, pytest.raises(InvalidPromptError, match="input 1 has no tokens"):
        scores(llm, [("a", ""), ("", "")])


def save_without_special_tokens() -> Path:
    folder = copy_of(llama())
    byte_tokenizer("$A", model_max_length=MAX_POSITIONS).save_pretrained(folder)
    return folder


def test_a_prompt_stands_before_the_first_text_only() -> None:
    prompts = {"query": "the query: ", "passage": "a long passage and "}
    folder = saved(CrossEncoder(str(bert()), device="cpu", prompts=prompts, default_prompt_name="passage"))
    default = assert_same(folder)
    named = assert_same(folder, prompt_name="query")
    given = assert_same(folder, prompt="the query: ")
    bare = assert_same(folder, prompt="")
    assert_close(named, given, atol=1e-6)
    assert (default - bare).abs().max() > 1e-2
    assert_close(bare, assert_same(bert()), atol=1e-6)


def test_a_prompt_left_out_of_pooling_equals_the_reference() -> None:
    pooling = Pooling(HIDDEN, "mean", include_prompt=False)
    folder = of_modules(Transformer(str(tiny_bert())), pooling, dense(), prompts={"ask": "the long query: "})
    pairs = [pair for pair in PAIRS if "" not in pair]
    assert (assert_same(folder, pairs, prompt_name="ask") - assert_same(folder, pairs)).abs().max() > 1e-3


# Activation


def test_the_activation_is_looked_up_in_the_reference_order() -> None:
    folder = copy_of(saved(CrossEncoder(str(bert()), device="cpu", activation_fn=nn.Tanh())))
    raw = assert_same(folder)

    def default() -> torch.Tensor:
        with loaded(folder) as llm:
            ours = scores(llm)
        assert_close(ours, reference(folder))
        return ours

    old = "torch.nn.modules.linear.Identity"
    new = {"activation_fn": "torch.nn.modules.activation.ReLU"}
    edit_json(folder / "config.json", lambda config: config.update(sbert_ce_default_activation_function=old))
    edit_json(folder / "config.json", lambda config: config.update(sentence_transformers=new))
    assert_close(default(), raw.tanh())
    edit_json(folder / "config_sentence_transformers.json", lambda config: config.pop("activation_fn") and None)
    assert_close(default(), raw.relu())
    edit_json(folder / "config.json", lambda config: config.pop("sentence_transformers") and None)
    assert_close(default(), raw)
    edit_json(folder / "config.json", lambda c: c.pop("sbert_ce_default_activation_function") and None)
    assert_close(default(), raw.sigmoid())


@pytest.mark.parametrize(("activation", "name"), [(nn.Sigmoid(), "sigmoid"), (nn.Identity(), "none")])
def test_the_saved_activation_of_token_logits_is_the_default(activation: nn.Module, name: str) -> None:
    transformer = Transformer(str(causal_lm()), transformer_task="text-generation")
    folder = of_modules(transformer, LogitScore(50, 40), activation_fn=activation)
    assert_same(folder)
    with loaded(folder) as llm:
        assert llm.engine.loaded.settings["activation"].value == name


def test_an_activation_that_is_not_torchs_own_stops_the_load_unless_the_user_gives_one() -> None:
    folder = copy_of(saved(CrossEncoder(str(bert()), device="cpu")))
    edit_json(
        folder / "config_sentence_transformers.json", lambda config: config.update(activation_fn="my.module.Squash")
    )
    with pytest.raises(CheckpointFormatError, match=r"'my\.module\.Squash' of scores is not supported"):
        LLM(folder, device="cpu")
    with loaded(folder, pooler_config=PoolerConfig(activation="none")) as llm:
        assert_close(scores(llm), assert_same(bert()), atol=1e-6)


def test_several_labels_are_classified_and_not_scored() -> None:
    folder = saved(CrossEncoder(str(bert(3)), device="cpu"))
    with loaded(folder) as llm, pytest.raises(UnsupportedTaskError, match=r"has 3 labels.*call classify\(\[\{"):
        llm.score("cat", "mat")


def test_pairs_are_classified_as_the_reference_does() -> None:
    folder = saved(CrossEncoder(str(bert(3)), device="cpu"))
    prompts = [{"prompt": first, "text_pair": second} for first, second in PAIRS]
    with loaded(folder) as llm:
        outputs = llm.classify(prompts, truncate_prompt_tokens=-1, use_tqdm=False)
        mixed = llm.classify(["cat", prompts[0], {"prompt": "cat"}], use_tqdm=False)
    expected = torch.tensor(CrossEncoder(str(folder), device="cpu").predict(PAIRS))
    assert_close(torch.stack([output.outputs.data for output in outputs]), expected)
    assert_close(mixed[1].outputs.data, expected[0])
    assert_close(mixed[0].outputs.data, mixed[2].outputs.data)


def test_a_token_of_a_pair_has_no_place_in_one_text() -> None:
    with loaded(bert(3)) as llm:
        [output] = llm.token_classify({"prompt": "a cat", "text_pair": "a mat"}, use_tqdm=False)
    assert output.outputs.offsets is None
    assert len(output.outputs.data) == len(output.prompt_token_ids)


# Chat templates


PROMPTS = {"ask": "a long query"}


@pytest.fixture(params=["flat", "structured"])
def templated(request: pytest.FixtureRequest) -> Path:
    template = TEMPLATE if request.param == "flat" else TEMPLATE.replace(".content", ".content[0].text")
    folder = with_logit_score(template=template)
    config = (folder / "sentence_bert_config.json").read_text()
    assert f'"format": "{request.param}"' in config
    return folder


def test_pairs_go_through_the_chat_template_that_the_files_name(templated: Path) -> None:
    raw = assert_same(templated, SHORT_FIRST)
    assert (raw - assert_same(with_logit_score(), SHORT_FIRST)).abs().max() > 1e-2


def test_a_prompt_is_the_system_message_of_the_chat_template(templated: Path) -> None:
    folder = copy_of(templated)
    edit_json(folder / "config_sentence_transformers.json", lambda config: config.update(prompts=PROMPTS))
    named = assert_same(folder, SHORT_FIRST, prompt_name="ask")
    assert (named - assert_same(folder, SHORT_FIRST)).abs().max() > 1e-3
    with loaded(folder) as llm:
        none = PoolingParams(activation="none")
        assert_close(scores(llm, SHORT_FIRST, instruction="a long query", pooling_params=none), named, atol=0)
        with pytest.raises(InvalidParameterError, match="the prompt is the instruction"):
            scores(llm, SHORT_FIRST, instruction="a", prompt="b")
    edit_json(folder / "config_sentence_transformers.json", lambda config: config.update(default_prompt_name="ask"))
    assert_close(assert_same(folder, SHORT_FIRST), named, atol=1e-6)


def test_variables_of_the_chat_template_are_those_of_the_files(templated: Path) -> None:
    folder = copy_of(templated)
    processing = {"chat_template": {"add_generation_prompt": True}}
    edit_json(folder / "sentence_bert_config.json", lambda config: config.update(processing_kwargs=processing))
    assert (assert_same(folder, SHORT_FIRST) - assert_same(templated, SHORT_FIRST)).abs().max() > 1e-3


def test_a_chat_template_that_is_missing_or_loses_a_text_is_refused(templated: Path) -> None:
    folder = copy_of(templated)
    (folder / "chat_template.jinja").write_text("Q: {{ messages[0].content }}")
    with loaded(folder) as llm, pytest.raises(ConfigError, match="has the document 0 times"):
        scores(llm)
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(CheckpointFormatError, match="puts pairs into a chat template, and there is none"):
        LLM(folder, device="cpu")


def test_a_template_made_for_pairs_is_used_without_modules_json_and_one_for_conversations_is_not() -> None:
    for_pairs, for_talk = copy_of(llama()), copy_of(llama())
    (for_pairs / "chat_template.jinja").write_text(TEMPLATE)
    (for_talk / "chat_template.jinja").write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    assert_same(for_pairs, SHORT_FIRST)
    with loaded(for_talk) as llm:
        raw = scores(llm, pooling_params=PoolingParams(activation="none"))
    assert_close(raw, assert_same(llama()), atol=0)


# What is refused


def refuse(folder: Path, kind: type[Exception], match: str) -> None:
    with pytest.raises(kind, match=match) as caught:
        LLM(folder, device="cpu")
    assert type(caught.value) is kind


@pytest.mark.parametrize(
    ("checkpoint", "change", "match"),
    [
        (with_logit_score, lambda m: m[1].update(type="x.YesNo"), "lists Transformer, YesNo for the task 'text-gen"),
        (with_logit_score, lambda m: m.pop(1) and None, "lists Transformer for the task 'text-generation'"),
        (with_logit_score, lambda m: m.pop(0) and None, "no Transformer first"),
        (with_dense, lambda m: m.pop(2) and None, "lists Transformer, Pooling for the task 'feature-extraction'"),
        (
            with_dense,
            lambda m: m.insert(2, {"path": "3_LSTM", "type": "x.LSTM"}),
            "lists a module 'LSTM' that is not supported",
        ),
        (with_dense, lambda m: m[2].update(type="x.LogitScore"), "LogitScore for the task 'feature-extraction'"),
    ],
)
def test_modules_that_are_no_known_chain_are_named(
    checkpoint: Callable[[], Path], change: Callable[[Any], Any], match: str
) -> None:
    folder = copy_of(checkpoint())
    edit_json(folder / "modules.json", change)
    refuse(folder, CheckpointFormatError, match)


@pytest.mark.parametrize(
    ("change", "kind", "match"),
    [
        ({"true_token_id": None}, CheckpointFormatError, "true_token_id None"),
        ({"true_token_id": "yes"}, CheckpointFormatError, "true_token_id 'yes'"),
        ({"false_token_id": True}, CheckpointFormatError, "false_token_id True"),
        ({"true_token_id": 5000}, ConfigError, "has rows 0 to 258, and not 5000"),
        ({"module_input_name": "logits"}, CheckpointFormatError, "module_input_name 'logits'"),
        ({"bias": 1}, CheckpointFormatError, "unknown keys bias; known: false_token_id, module_input_name"),
    ],
)
def test_settings_of_the_tokens_that_cannot_be_followed_are_named(
    change: dict[str, Any], kind: type[Exception], match: str
) -> None:
    folder = copy_of(with_logit_score())
    edit_json(folder / "1_LogitScore" / "config.json", lambda config: config.update(change))
    refuse(folder, kind, match)
    shutil.rmtree(folder / "1_LogitScore")
    refuse(folder, CheckpointFormatError, "names 1_LogitScore/config.json, which is not there")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"transformer_task": "fill-mask"}, "transformer_task 'fill-mask'; supported: 'feature-extraction', 'sequence"),
        ({"module_output_name": "scores"}, "module_output_name 'scores'; supported: 'causal_logits'"),
        ({"processing_kwargs": {"text": {"max_length": 9}}}, "processing_kwargs .*supported: none"),
        ({"processing_kwargs": {"chat_template": {"max_length": 9}}}, "chat_template option 'max_length'"),
    ],
)
def test_transformer_settings_that_cannot_be_followed_are_named(change: dict[str, Any], match: str) -> None:
    folder = copy_of(with_logit_score())
    edit_json(folder / "sentence_bert_config.json", lambda config: config.update(change))
    refuse(folder, UnsupportedArchitectureError, f"sentence_bert_config.json has {match}")


def test_a_dense_that_does_not_give_scores_is_named() -> None:
    folder = copy_of(with_dense())
    edit_json(folder / "2_Dense" / "config.json", lambda c: c.update(module_output_name="sentence_embedding"))
    refuse(folder, CheckpointFormatError, "module_output_name 'sentence_embedding'; only 'scores' is supported")


def test_a_cross_encoder_without_anything_that_scores_is_refused() -> None:
    folder = copy_of(tiny_bert())
    (folder / "config_sentence_transformers.json").write_text('{"model_type": "CrossEncoder"}')
    refuse(folder, CheckpointFormatError, "is a CrossEncoder, and BertModel has no classification head")
    with loaded(folder, convert="embed") as llm:
        assert "classify" not in llm.supported_tasks
