"""Whatever a user passes by mistake is one clear typed error, raised before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from anypool import LLM, EngineConfig, PoolerConfig, PoolingParams
from anypool.errors import (
    AnypoolError,
    CheckpointFormatError,
    ConfigError,
    InvalidParameterError,
    InvalidPromptError,
    ModelLoadError,
    ModelNotFoundError,
    PromptTooLongError,
    UnsupportedArchitectureError,
    UnsupportedTaskError,
)
from tests.helpers import (
    MAX_POSITIONS,
    assert_close,
    byte_tokenizer,
    copy_of,
    edit_json,
    embed,
    loaded,
    tiny_bert,
    tiny_llama,
    vectors,
)

VOCAB = 157


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with loaded(tiny_bert()) as llm:
        yield llm


@pytest.fixture(autouse=True)
def submitted(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Requests that reached the engine's queue."""
    seen: list[Any] = []
    submit = llm.engine.submit

    def spy(requests: Any, **options: Any) -> None:
        seen.extend(requests)
        submit(requests, **options)

    monkeypatch.setattr(llm.engine, "submit", spy)
    return seen


def refuse(call: Callable[[], Any], kind: type[Exception], match: str) -> None:
    with pytest.raises(kind, match=match) as caught:
        call()
    assert type(caught.value) is kind
    assert isinstance(caught.value, AnypoolError)
    assert isinstance(caught.value, ValueError)


# Prompts


def test_no_prompts_give_no_outputs(llm: LLM) -> None:
    assert llm.embed([], use_tqdm=False) == []
    assert llm.encode([], pooling_task="token_embed", use_tqdm=False) == []
    assert llm.embed((), use_tqdm=False) == []
    assert llm.embed([], [], use_tqdm=False) == []


def test_an_empty_text_is_its_special_tokens(llm: LLM) -> None:
    [output] = llm.embed("", use_tqdm=False)
    assert output.prompt_token_ids == [2, 3]
    assert_close(vectors(llm, [""]), vectors(llm, [[2, 3]]), atol=1e-6)


def test_an_empty_text_without_special_tokens_is_refused() -> None:
    with loaded(tiny_llama(template="$A")) as llm:
        refuse(
            lambda: vectors(llm, ["a", ""]), InvalidPromptError, "input 1 has no tokens: it is empty, and this model"
        )
        assert vectors(llm, ["a"]).isfinite().all()


BAD_PROMPTS: list[tuple[Any, str]] = [
    (None, "prompts of type NoneType are not understood; give a text, a list of token ids"),
    (3, "prompts of type int"),
    (1.5, "prompts of type float"),
    (True, "prompts of type bool"),
    (b"bytes", "prompts of type bytes"),
    (bytearray(b"bytes"), "prompts of type bytearray"),
    (memoryview(b"bytes"), "prompts of type memoryview"),
    ({1, 2}, "prompts of type set"),
    (["cat", None], r"input 1 is None \(NoneType\)"),
    (["cat", 3], r"input 1 is 3 \(int\)"),
    ([1.5], r"input 0 is 1.5 \(float\)"),
    ([True, False], r"input 0 is True \(bool\)"),
    ([b"cat"], r"input 0 is b'cat' \(bytes\)"),
    ([memoryview(b"cat")], r"input 0 is <memory"),
    ([[1, 2.0]], r"input 0 is a list that holds 2.0 \(float\)"),
    ([[1, True]], r"input 0 is a list that holds True \(bool\)"),
    ([["cat"]], "input 0 is a list of texts, where one prompt is expected"),
    ([("cat", "mat")], r"are \{'prompt': first, 'text_pair': second\} for classify\(\), or given to score"),
    ([[[1, 2]]], r"input 0 is a list that holds \[1, 2\] \(list\)"),
    ([[]], "input 0 is an empty list of token ids"),
    (numpy.array([1.5, 2.0]), r"input 0 is 1.5 \(float\)"),
    (numpy.array(3), "prompts of type int"),
    (torch.tensor([[1.0]]), "input 0 is a list that holds 1.0"),
    ({}, r"input 0 has the keys \[\]"),
    ({"text": "cat"}, r"input 0 has the keys \['text'\]"),
    ({"prompt": "cat", "prompt_token_ids": [1]}, r"input 0 has the keys \['prompt', 'prompt_token_ids'\]"),
    ({1: "cat"}, r"input 0 has the keys \['1'\]"),
    ({"prompt": None}, "input 0: 'prompt' holds a NoneType"),
    ({"text_pair": "cat"}, r"input 0 has the keys \['text_pair'\]"),
    ({"prompt": "cat", "text_pair": None}, "input 0: 'text_pair' holds a NoneType"),
    ({"prompt": "cat", "text_pair": "\ud800"}, "input 0: 'text_pair' is not valid Unicode"),
    ({"prompt": [1, 2]}, "input 0: 'prompt' holds a list"),
    ({"prompt_token_ids": "cat"}, "input 0: 'prompt_token_ids' holds a str"),
    ({"prompt_token_ids": None}, "input 0 is None"),
    ({"prompt_token_ids": [[1]]}, "input 0 is a list that holds"),
    ({"prompt_token_ids": {"prompt": "cat"}}, "input 0 is {'prompt': 'cat'}"),
    (["cat", "\ud800x"], r"input 1 is not valid Unicode: it has the lone surrogate U\+D800 at position 0"),
    ("ok\udfff", r"input 0 is not valid Unicode: it has the lone surrogate U\+DFFF at position 2"),
    ([5, -1], f"input 0 has the token id -1; this model's ids are 0 to {VOCAB - 1}"),
    (["cat", [5, VOCAB]], f"input 1 has the token id {VOCAB}"),
    ([[5], [10**30]], f"input 1 has the token id {10**30}"),
]


@pytest.mark.parametrize(("prompts", "match"), BAD_PROMPTS, ids=lambda value: ascii(value)[:40].partition(" at 0x")[0])
def test_prompts_of_no_known_form_are_refused(llm: LLM, submitted: list[Any], prompts: Any, match: str) -> None:
    refuse(lambda: llm.embed(prompts, use_tqdm=False), InvalidPromptError, match)
    assert not submitted


def test_one_bad_prompt_among_many_runs_none(llm: LLM, submitted: list[Any]) -> None:
    refuse(lambda: llm.embed(["cat"] * 50 + [None], use_tqdm=False), InvalidPromptError, "input 50 is None")  # type: ignore[list-item]
    assert not submitted


def test_fields_of_pooling_params_as_arguments_are_shown_the_way(llm: LLM) -> None:
    with pytest.raises(TypeError, match=r"'dimensions'; give PoolingParams\(dimensions=\.\.\.\)"):
        llm.embed("cat", dimensions=8)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"'batch_size'; known: prompt_name, "):
        llm.embed("cat", batch_size=8)  # type: ignore[call-arg]


def test_columns_of_tables_are_lists_of_prompts(llm: LLM) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    texts = ["cat", "a cat", "the mat"]
    assert_close(vectors(llm, pyarrow.chunked_array([texts[:1], texts[1:]])), vectors(llm, texts), atol=0)

    class Series:  # polars has this method alone
        def to_list(self) -> list[str]:
            return texts

    assert_close(vectors(llm, Series()), vectors(llm, texts), atol=0)  # type: ignore[arg-type]


# Length

LONG = "the cat " * 200


def test_a_text_that_is_too_long_is_refused_with_all_that_one_needs_to_know(llm: LLM, submitted: list[Any]) -> None:
    refuse(
        lambda: llm.embed(["cat", LONG], use_tqdm=False),
        PromptTooLongError,
        f"input 1 has 402 tokens, the limit is {MAX_POSITIONS}: pass truncate_prompt_tokens=-1, or split the text",
    )
    refuse(lambda: llm.embed([[5] * 1234], use_tqdm=False), PromptTooLongError, "input 0 has 1,234 tokens")
    assert not submitted
    [output] = llm.embed([LONG], truncate_prompt_tokens=-1, use_tqdm=False)
    assert (len(output.prompt_token_ids), output.num_truncated_tokens) == (MAX_POSITIONS, 402 - MAX_POSITIONS)


@pytest.mark.parametrize("as_ids", [False, True], ids=["text", "ids"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_truncation_keeps_the_special_tokens_on_either_side(llm: LLM, side: str, as_ids: bool) -> None:
    [whole] = llm.embed("a cat sat on the mat", use_tqdm=False)
    ids = whole.prompt_token_ids
    prompt: Any = ids if as_ids else "a cat sat on the mat"
    [output] = llm.embed(prompt, truncate_prompt_tokens=5, truncation_side=side, use_tqdm=False)
    assert output.prompt_token_ids == [2, *(ids[1:4] if side == "right" else ids[-4:-1]), 3]
    options = {"truncate_prompt_tokens": 5, "truncation_side": side}
    [same] = llm.embed(prompt, tokenization_kwargs=options, use_tqdm=False)
    assert same.prompt_token_ids == output.prompt_token_ids


def test_settings_of_the_tokenizer_are_a_dictionary(llm: LLM, submitted: list[Any]) -> None:
    refuse(
        lambda: llm.embed("cat", tokenization_kwargs="truncation_side", use_tqdm=False),  # type: ignore[arg-type]
        InvalidParameterError,
        "tokenization_kwargs='truncation_side' is not a dictionary; known keys: truncate_prompt_tokens, trunc",
    )
    assert not submitted


@pytest.mark.parametrize("limit", [0, -2, 1.5, "5", True])
def test_a_truncation_limit_that_is_none_is_refused(llm: LLM, submitted: list[Any], limit: Any) -> None:
    refuse(
        lambda: llm.embed("cat", truncate_prompt_tokens=limit, use_tqdm=False),
        InvalidParameterError,
        "truncate_prompt_tokens=.* is neither a positive number nor -1",
    )
    assert not submitted


def test_truncation_settings_out_of_range_are_refused(llm: LLM, submitted: list[Any]) -> None:
    for options, kind, match in (
        ({"truncate_prompt_tokens": 161}, InvalidParameterError, "161 is more than the model takes, 160"),
        ({"truncate_prompt_tokens": 1}, InvalidPromptError, "leaves no room: the special tokens alone are 2"),
        ({"truncation_side": "middle"}, InvalidParameterError, "'middle' is neither 'left' nor 'right'"),
        ({"tokenization_kwargs": {"truncation": True}}, InvalidParameterError, "has 'truncation'; known: truncate_"),
    ):
        refuse(lambda o=options: llm.embed("cat", use_tqdm=False, **o), kind, match)  # type: ignore[misc]
    assert not submitted


# Parameters


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"prompt_name": "nope"}, "prompt_name='nope' is unknown; this model has: 'query', 'document'"),
        ({"prompt_name": 3}, "prompt_name=3 is not a text"),
        ({"prompt_name": ["query"]}, r"prompt_name=\['query'\] is not a text"),
        ({"prompt": 3}, "prompt=3 is not a text"),
        ({"prompt": [1, 2]}, r"prompt=\[1, 2\] is not a text"),
        ({"prompt": "a", "prompt_name": "query"}, "two ways to say the same: give one"),
    ],
)
def test_prompt_settings_that_are_wrong_are_refused(
    llm: LLM, submitted: list[Any], options: dict[str, Any], match: str
) -> None:
    refuse(lambda: llm.embed("cat", use_tqdm=False, **options), InvalidParameterError, match)
    assert not submitted


def test_a_prompt_that_is_not_unicode_is_refused(llm: LLM) -> None:
    refuse(lambda: llm.embed("cat", prompt="\ud800", use_tqdm=False), InvalidPromptError, "prompt is not valid Unicode")


@pytest.mark.parametrize("dimensions", [0, -1, True, "8", 1.0])
def test_dimensions_that_are_no_number_are_refused(dimensions: Any) -> None:
    refuse(lambda: PoolingParams(dimensions=dimensions), InvalidParameterError, "is not a positive integer")


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"use_activation": 1}, "use_activation=1 is not a bool"),
        ({"softmax": 1}, "softmax=1 is not a bool"),
        ({"activation": "sine"}, "activation='sine' is unknown; known: none, sigmoid, softmax"),
        ({"activation": 3}, "activation=3 is unknown"),
        ({"activation": "softmax", "use_activation": False}, "use_activation=False contradicts activation='softmax'"),
        ({"activation": "none", "use_activation": True}, "use_activation=True contradicts activation='none'"),
        ({"activation": "none", "softmax": True}, "are the same setting: give activation"),
        ({"step_tag_id": "x"}, "step_tag_id='x' is not a token id"),
        ({"step_tag_id": True}, "step_tag_id=True is not a token id"),
        ({"returned_token_ids": 5}, "returned_token_ids=5 is not a list of column numbers"),
        ({"returned_token_ids": []}, r"returned_token_ids=\[\] is not a list of column numbers"),
        ({"returned_token_ids": "12"}, "returned_token_ids='12' is not a list of column numbers"),
    ],
    ids=str,
)
def test_parameters_of_scores_that_are_wrong_are_refused(fields: dict[str, Any], match: str) -> None:
    refuse(lambda: PoolingParams(**fields), InvalidParameterError, match)


def test_normalize_and_use_activation_must_agree(llm: LLM) -> None:
    params = PoolingParams(normalize=True, use_activation=False)
    refuse(lambda: llm.embed("cat", params, use_tqdm=False), InvalidParameterError, "contradict each other")


def test_old_arguments_that_contradict_new_ones_are_refused() -> None:
    for arguments, match in (
        ({"task": "embed", "convert": "reward"}, "task='embed' contradicts convert='reward': give convert"),
        ({"pooler_config": {}, "override_pooler_config": {}}, "are the same setting: give pooler_config"),
    ):
        with pytest.warns(DeprecationWarning, match="is old"):
            refuse(lambda a=arguments: LLM(tiny_bert(), device="cpu", **a), ConfigError, match)  # type: ignore[misc]


def test_dimensions_that_the_model_does_not_have_are_refused(llm: LLM, submitted: list[Any]) -> None:
    params = PoolingParams(dimensions=33)
    refuse(lambda: llm.embed("cat", params, use_tqdm=False), InvalidParameterError, "it supports 1 to 32")
    refuse(
        lambda: llm.embed(["cat", "mat"], [PoolingParams(), params], use_tqdm=False),
        InvalidParameterError,
        "dimensions=33 is not available",
    )
    assert not submitted
    with loaded(tiny_bert(), hf_overrides={"matryoshka_dimensions": [8, 16]}) as listed:
        assert vectors(listed, ["cat"], PoolingParams(dimensions=16)).shape == (1, 16)
        refuse(
            lambda: vectors(listed, ["cat"], PoolingParams(dimensions=9)),
            InvalidParameterError,
            "dimensions=9 is not available for .*: it supports 8, 16, 32",
        )


@pytest.mark.parametrize(
    ("params", "match"),
    [
        ("normalize", "pooling_params='normalize' is not a PoolingParams, nor a list of them"),
        ({"dimensions": 8}, "is not a PoolingParams"),
        (3, "pooling_params=3 is not a PoolingParams"),
        ([PoolingParams()], "1 pooling_params were given for 2 prompts"),
        ([PoolingParams()] * 3, "3 pooling_params were given for 2 prompts"),
        ([], "0 pooling_params were given for 2 prompts"),
        ([PoolingParams(), None], "pooling_params has None, which is not a PoolingParams"),
        ([PoolingParams(), {"dimensions": 8}], "pooling_params has {'dimensions': 8}"),
    ],
    ids=str,
)
def test_pooling_params_of_a_wrong_type_or_count_are_refused(
    llm: LLM, submitted: list[Any], params: Any, match: str
) -> None:
    refuse(lambda: llm.embed(["cat", "mat"], params, use_tqdm=False), InvalidParameterError, match)
    assert not submitted


# Tasks


def test_encode_without_a_task_warns_and_gives_token_vectors(llm: LLM) -> None:
    [expected] = llm.encode("the cat", pooling_task="token_embed", use_tqdm=False)
    for task in (None, "encode"):
        with pytest.warns(DeprecationWarning, match="encode\\(\\) without a task means pooling_task='token_embed'"):
            [output] = llm.encode("the cat", pooling_task=task, use_tqdm=False)
        assert_close(output.outputs.data, expected.outputs.data, atol=1e-6)
    assert expected.outputs.data.shape == (4, 32)


def test_tasks_that_are_unknown_or_not_served_are_refused(llm: LLM, submitted: list[Any]) -> None:
    def encode(task: Any) -> Any:
        return llm.encode("cat", pooling_task=task, use_tqdm=False)

    refuse(lambda: encode("sing"), InvalidParameterError, "pooling_task='sing' is unknown; known: embed, classify")
    refuse(lambda: encode(3), InvalidParameterError, "pooling_task=3 is unknown")
    refuse(lambda: encode("classify"), UnsupportedTaskError, "is not served by .*; it serves embed, token_embed")
    assert not submitted


# The engine's arguments


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"max_model_length": 8}, "unknown argument 'max_model_length'; did you mean 'max_model_len'"),
        ({"pooler": None}, "unknown argument 'pooler'; did you mean"),
        ({"zzz": 1}, "unknown argument 'zzz'; known: model, tokenizer"),
        ({"dtype": "float64"}, "dtype='float64' is unknown; known: auto, float32, bfloat16, float16"),
        ({"dtype": 32}, "dtype='32' is unknown"),
        ({"device": "tpu"}, "device='tpu' is unknown; known: auto, cpu, cuda"),
        ({"convert": "rank"}, "convert='rank' is unknown; known: auto, none, embed, classify, reward"),
        ({"convert": "classify"}, "has no classification head. Load a checkpoint saved as"),
        ({"convert": "none"}, "convert='none': BertModel is not a pooling model"),
        ({"task": "sing"}, "task='sing' is unknown, and old: use convert= one of auto, none, embed, classify, reward"),
        ({"task": ["embed"]}, r"task=\['embed'\] is unknown"),
        ({"skip_tokenizer_init": "no"}, "skip_tokenizer_init='no' is not a bool"),
        ({"tokenizer": 5}, "tokenizer=5 is not a str"),
        ({"device": "cpu:abc"}, "device='cpu:abc' is unknown"),
        ({"runner": "generate"}, "runner='generate': this engine pools and does not generate text"),
        ({"model_impl": "vllm"}, "model_impl='vllm' is unknown"),
        ({"max_model_len": 0}, "max_model_len=0 is not a positive integer"),
        ({"max_model_len": "8"}, "max_model_len='8' is not a positive integer"),
        ({"data_parallel_size": 0}, "data_parallel_size=0 is not a positive integer"),
        ({"max_num_seqs": -1}, "max_num_seqs=-1 is not a positive integer"),
        ({"max_num_batched_tokens": True}, "max_num_batched_tokens=True is not a positive integer"),
        ({"max_model_len": 161}, "max_model_len=161 is more than .* has positions for, 160"),
        ({"pooler_config": "MEAN"}, "pooler_config='MEAN' is not a PoolerConfig"),
        (
            {"pooler_config": {"pooling": "MEAN"}},
            "pooler_config: unknown argument 'pooling'; did you mean 'pooling_type'",
        ),
        ({"pooler_config": {"pooling_type": "MEDIAN"}}, "unknown pooling_type 'MEDIAN'; known: CLS, LAST, MEAN"),
        ({"pooler_config": {"dimensions": 64}}, "dimensions=64 is not available .* it supports 1 to 32"),
        ({"hf_overrides": "x"}, "hf_overrides='x' is not a mapping"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size=0 is not a positive integer"),
        ({"pipeline_parallel_size": "2"}, "pipeline_parallel_size='2' is not a positive integer"),
        ({"quantization": "int4"}, "quantization='int4' is not supported; known: int8, or None"),
    ],
    ids=str,
)
def test_arguments_that_are_wrong_are_refused(arguments: dict[str, Any], match: str) -> None:
    refuse(lambda: LLM(tiny_bert(), **{"device": "cpu", **arguments}), ConfigError, match)


@pytest.mark.parametrize("model", [None, "", 3, b"model"])
def test_a_model_that_is_no_path_is_refused(model: Any) -> None:
    refuse(lambda: LLM(model), ConfigError, "model=.* is not a path or a hub id")


def test_paths_are_taken_as_they_are_or_as_text(tmp_path: Path) -> None:
    given = EngineConfig(model=tmp_path, tokenizer=tmp_path, download_dir=tmp_path)  # type: ignore[arg-type]
    assert given == EngineConfig(model=str(tmp_path), tokenizer=str(tmp_path), download_dir=str(tmp_path))


def test_a_model_that_is_not_there_is_refused(tmp_path: Path) -> None:
    refuse(lambda: LLM(tmp_path / "none"), ModelNotFoundError, "none: no such folder or .gguf file")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused() -> None:
    refuse(
        lambda: LLM(tiny_bert(), device="cuda"), ConfigError, "device='cuda': torch sees no GPU here; use device='cpu'"
    )


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"pooling_type": "SOME"}, "unknown pooling_type 'SOME'; known: CLS, .*, ALL, STEP"),
        ({"seq_pooling_type": "ALL"}, "unknown seq_pooling_type 'ALL'; known: CLS, LAST, MEAN"),
        ({"tok_pooling_type": "MEAN"}, "unknown tok_pooling_type 'MEAN'; known: ALL, STEP"),
        ({"pooling_type": "MEAN+ALL"}, r"pooling_type='MEAN\+ALL': ALL and STEP cannot be concatenated"),
        ({"tok_pooling_type": "ALL+STEP"}, "ALL and STEP cannot be concatenated"),
        ({"pooling_type": "ALL", "tok_pooling_type": "STEP"}, "are the same setting: give one of them"),
        ({"pooling_type": 3}, "pooling_type=3 is not a string"),
        ({"pooling_type": "MEAN+"}, "unknown pooling_type ''"),
        ({"pooling_type": "MEAN", "seq_pooling_type": "CLS"}, "are the same setting: give one of them"),
        ({"seq_pooling_type": 3}, "seq_pooling_type=3 is not a string"),
        ({"normalize": 1}, "normalize=1 is not a bool"),
        ({"use_activation": "no"}, "use_activation='no' is not a bool"),
        ({"dimensions": 0}, "dimensions=0 is not a positive integer"),
        ({"activation": "sine"}, "unknown activation 'sine'; known: none, sigmoid, softmax"),
        ({"activation": ["softmax"]}, r"unknown activation \['softmax'\]"),
        ({"activation": "softmax", "use_activation": False}, "use_activation=False contradicts activation='softmax'"),
        ({"activation": "none", "use_activation": True}, "use_activation=True contradicts activation='none'"),
        ({"logit_mean": "0"}, "logit_mean='0' is not a finite number"),
        ({"logit_mean": float("nan")}, "logit_mean=nan is not a finite number"),
        ({"logit_sigma": True}, "logit_sigma=True is not a finite number"),
        pytest.param({"logit_sigma": 10**400}, "logit_sigma=10+ is not a finite number", id="more than a float"),
        ({"logit_sigma": 0}, "logit_sigma=0 would divide by zero"),
        ({"logit_bias": 1.0, "logit_mean": 1.0}, "logit_bias and logit_mean are the same setting: give logit_mean"),
        ({"logit_scale": 1.0, "logit_sigma": 1.0}, "logit_scale and logit_sigma are the same setting"),
        ({"logit_scale": 0}, "logit_scale=0 would make every score the same"),
        ({"logit_scale": "2"}, "logit_scale='2' is not a finite number"),
        ({"step_tag_id": "x"}, "step_tag_id='x' is not a token id"),
        ({"returned_token_ids": 5}, "returned_token_ids=5 is not a list of numbers"),
        ({"returned_token_ids": []}, r"returned_token_ids=\[\] is not a list of numbers"),
        ({"returned_token_ids": ["a"]}, r"returned_token_ids=\['a'\] is not a list of numbers"),
    ],
    ids=str,
)
def test_pooler_settings_that_are_wrong_are_refused(settings: dict[str, Any], match: str) -> None:
    refuse(lambda: PoolerConfig(**settings), ConfigError, match)


def test_an_engine_config_refuses_the_same_as_the_llm() -> None:
    refuse(lambda: EngineConfig.from_kwargs(model="m", dtpye="float32"), ConfigError, "did you mean 'dtype'")


@pytest.mark.parametrize(
    ("changes", "kind", "match"),
    [
        ({"architectures": ["NopeForSinging"]}, UnsupportedArchitectureError, "'NopeForSinging'.*Native: .*BertModel"),
        ({"model_type": "nope"}, UnsupportedArchitectureError, "does not know the model type 'nope'"),
        ({"hidden_act": "nope"}, ModelLoadError, "nope"),
        ({"quantization_config": {"quant_method": "gptq"}}, UnsupportedArchitectureError, "quantized \\(gptq\\)"),
        ({"problem_type": "ranking"}, CheckpointFormatError, "problem_type='ranking'; known: regression, single_label"),
        ({"id2label": {"bad": "x"}}, CheckpointFormatError, "id2label with the key 'bad'; its keys are the numbers"),
        ({"dtype": "int8"}, ConfigError, "dtype 'int8'; pass dtype= one of float32, bfloat16, float16"),
    ],
    ids=str,
)
def test_configurations_that_cannot_run_are_refused(changes: dict[str, Any], kind: type[Exception], match: str) -> None:
    folder = copy_of(tiny_bert())
    edit_json(folder / "config.json", lambda config: config.update(changes))
    with pytest.raises(kind, match=match):
        LLM(folder, device="cpu")


# Tokenizers


def test_without_a_tokenizer_prompts_are_token_ids() -> None:
    ids = [2, 20, 21, 3]
    with loaded(tiny_bert(), skip_tokenizer_init=True) as llm:
        refuse(
            lambda: vectors(llm, ["cat"], truncate_prompt_tokens=None), InvalidPromptError, "give token ids, or pass"
        )
        bare = vectors(llm, [ids])
    folder = copy_of(tiny_bert())
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with loaded(folder) as llm:
        refuse(lambda: vectors(llm, ["cat"]), InvalidPromptError, "was loaded without a tokenizer")
        assert_close(vectors(llm, [ids]), bare, atol=1e-6)
    with loaded(folder, tokenizer=str(tiny_bert())) as llm:
        assert_close(vectors(llm, ["cat"]), embed(tiny_bert(), ["cat"]), atol=1e-6)


def test_a_tokenizer_with_more_tokens_than_the_model_is_found_out() -> None:
    folder = copy_of(tiny_bert())
    for file in folder.glob("tokenizer*"):
        file.unlink()
    byte_tokenizer().save_pretrained(folder)
    with loaded(folder) as llm:
        refuse(lambda: vectors(llm, ["a b"]), InvalidPromptError, r"input 0 has the token id \d+; this model's ids")


def test_a_damaged_tokenizer_is_refused_when_the_model_loads() -> None:
    folder = copy_of(tiny_bert())
    (folder / "tokenizer.json").write_text("{")
    refuse(lambda: LLM(folder, device="cpu"), CheckpointFormatError, "tokenizer.json cannot be read")
