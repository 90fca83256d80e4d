"""Models that two or four processes hold together answer as one process and as transformers do."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file

from tests.adapters.test_heads import GQA, save_head
from tests.adapters.test_recipes import nv_embed
from tests.adapters.test_sparse import masked_lm
from tests.distributed.jobs import Answers, Job, answers
from tests.distributed.processes import in_processes
from tests.helpers import assert_close, copy_of, new_folder
from tests.models.parity import LENGTHS, random_ids, reference_states, save_random
from tests.models.test_native_parity import DECODER, DECODERS, ENCODER, ENCODERS
from tests.models.test_transformers_backend import CASES
from tests.rerankers import causal_lm, logits, tokenizer

SIZES = (2, 4)
ODD = {"vocab_size": 121}  # which neither 2 nor 4 divide; the heads of keys are fewer than 4
# Groups of queries that the boundaries between processes cut.
CUT = {"hidden_size": 48, "num_attention_heads": 12, "num_key_value_heads": 3, "head_dim": 8}
BACKBONES = {
    "llama": ODD,
    "llama-bias": {},
    "llama-mha-tied": {},
    "llama-cut": CUT,
    "mistral-sliding": {},
    "qwen2-bidirectional": {},
    "qwen3": ODD,
    "qwen3-bias": CUT,
    "gemma2": {},
    "gemma3-softcap": ODD,
    "bert": ODD,
    "xlm-roberta": {},
    "distilbert": {},
    "mpnet": ODD,
    "modernbert": ODD,
    "modernbert-biases": {},
    "deberta-v3": ODD,
    "deberta-v2-own-projections": {},
    "deberta-v2-conv": {},
}
WITH_A_PLAN = ("eurobert", "granite", "mixtral", "olmo2", "qwen3_moe", "smollm3", "starcoder2")
WITHOUT_A_PLAN = ("gpt2", "phi3")
STATES = {"normalize": False}
TASKS: list[tuple[str, dict[str, Any]]] = [
    ("embed", {}),
    ("embed", {"dimensions": 8}),
    ("token_embed", {}),
    ("classify", {}),
    ("classify", {"activation": "none"}),
    ("token_classify", {}),
    ("reward", {}),
]
CHUNKED = {"max_num_batched_tokens": 32}
RERANKER = {"hf_overrides": {"classifier_from_token": ["No", "1"], "method": "from_2_way_softmax"}}


@cache
def backbone(name: str) -> tuple[Any, str]:
    """transformers' model and the folder that it saved."""
    model_cls, config_cls, settings = {**DECODERS, **ENCODERS}[name.replace("-cut", "")]
    sizes = DECODER if name.replace("-cut", "") in DECODERS else ENCODER
    config = config_cls(**{**sizes, **settings, **BACKBONES[name]})
    model = model_cls._from_config(config, attn_implementation="eager")
    folder = new_folder(name)
    save_random(model, folder)
    return model, str(folder)


@cache
def classifier() -> str:
    folder = new_folder("classifier")
    save_head("Llama", GQA, "SequenceClassification", folder)
    return str(folder)


@cache
def llama(**sizes: int) -> str:
    folder = new_folder("llama")
    save_random(hf.LlamaForCausalLM(hf.LlamaConfig(**{**DECODER, **sizes})), folder)
    return str(folder)


@cache
def through_transformers(name: str) -> tuple[Any, str]:
    """The model and the folder of a family without a native class."""
    architecture, config, values = CASES[name]
    if "moe_intermediate_size" in values:  # torch multiplies by many experts at once in rows of 16 bytes
        values = {**values, "moe_intermediate_size": 32}
    torch.manual_seed(3)
    model = getattr(hf, architecture)._from_config(getattr(hf, config)(**values), attn_implementation="eager")
    folder = new_folder(name)
    save_random(model, folder)
    return model, str(folder)


@cache
def clip() -> str:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = {**sizes, "vocab_size": 120, "max_position_embeddings": 160}
    folder = new_folder("clip")
    save_random(hf.CLIPModel(hf.CLIPConfig(text_config=text, vision_config=sizes, projection_dim=32)), folder)
    return str(folder)


@cache
def jobs() -> dict[str, Job]:
    """Everything that is asked, since a process takes seconds to start."""
    texts = random_ids(120)
    states = [("token_embed", [text], STATES) for text in texts]
    tasks = [(task, texts, fields) for task, fields in TASKS]
    tasks_alone = [(task, [text], fields) for text in texts for task, fields in TASKS]
    wide = llama(hidden_size=256, intermediate_size=512, num_key_value_heads=4)
    embed = [("embed", texts, {})]
    score = [("classify", texts, {"activation": "none"})]
    return {
        **{name: Job(backbone(name)[1], [("token_embed", texts, STATES)]) for name in BACKBONES},
        **{
            name: Job(through_transformers(name)[1], [("token_embed", texts, STATES)])
            for name in (*WITH_A_PLAN, *WITHOUT_A_PLAN)
        },
        "chunks": Job(backbone("qwen3")[1], states, CHUNKED),
        "prefixes": Job(backbone("llama")[1], [*states, *states], {"enable_prefix_caching": True}),
        "tasks": Job(classifier(), tasks),
        "tasks-in-chunks": Job(classifier(), tasks_alone, CHUNKED),
        "splade": Job(str(masked_lm("bert")), [("sparse_embed", texts, {})], {"convert": "sparse"}),
        "reranker": Job(str(causal_lm("qwen3")), score, RERANKER),
        "reranker-tied": Job(str(causal_lm("qwen3", tied=True)), score, RERANKER),
        "pickled": Job(str(pickled()), embed),
        "nv-embed": Job(str(nv_embed()), embed),
        "int8": Job(wide, embed, {"quantization": "int8"}),
        "bfloat16": Job(wide, embed, {"dtype": "bfloat16"}),
        "float32": Job(wide, embed),
        "plain": Job(backbone("llama")[1], embed),
        "three-heads": Job(llama(hidden_size=48, num_attention_heads=3, num_key_value_heads=3), embed),
        "clip": Job(clip(), embed, {"skip_tokenizer_init": True}),
    }


@cache
def pickled() -> Path:
    """The weights of "llama" in a pytorch_model.bin."""
    folder = copy_of(Path(backbone("llama")[1]))
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    return folder


@pytest.fixture(scope="module")
def alone() -> Answers:
    """The answers of one process."""
    return answers(jobs())


@pytest.fixture(scope="module", params=SIZES)
def ranks(request: pytest.FixtureRequest) -> list[Answers]:
    """The answers of each of several processes."""
    return in_processes(answers, jobs(), tp_size=request.param)


@pytest.mark.parametrize("name", BACKBONES)
def test_hidden_states_equal_transformers(name: str, ranks: list[Answers]) -> None:
    expected_TD = reference_states(backbone(name)[0], random_ids(120))
    assert_close(torch.cat(rows(ranks[0], name)), expected_TD)


@pytest.mark.parametrize("name", WITH_A_PLAN)
def test_hidden_states_through_transformers_equal_its_own(name: str, ranks: list[Answers]) -> None:
    expected_TD = reference_states(through_transformers(name)[0], random_ids(120))
    assert_close(torch.cat(rows(ranks[0], name)), expected_TD)


@pytest.mark.parametrize("name", ["chunks", "prefixes"])
def test_prompts_in_parts_equal_transformers(name: str, ranks: list[Answers]) -> None:
    model = backbone("qwen3" if name == "chunks" else "llama")[0]
    expected = reference_states(model, random_ids(120)).split(LENGTHS)
    found = rows(ranks[0], name)
    assert len(found) in (len(LENGTHS), 2 * len(LENGTHS))
    for i, found_LD in enumerate(found):
        assert_close(found_LD, expected[i % len(LENGTHS)])


@pytest.mark.parametrize("name", ["tasks", "tasks-in-chunks", "splade", "pickled", "nv-embed"])
def test_every_task_equals_one_process(name: str, alone: Answers, ranks: list[Answers]) -> None:
    for found, expected in zip(rows(ranks[0], name), rows(alone, name), strict=True):
        assert expected.abs().max() > 1e-3
        assert_close(found, expected)


@pytest.mark.parametrize("name", ["reranker", "reranker-tied"])
def test_rerankers_by_rows_of_the_lm_head_equal_transformers(name: str, ranks: list[Answers]) -> None:
    logits_NV = logits(causal_lm("qwen3", tied=name == "reranker-tied"), random_ids(120))
    false, true = tokenizer().convert_tokens_to_ids(["No", "1"])
    assert_close(torch.cat(rows(ranks[0], name)), logits_NV[:, true] - logits_NV[:, false])


@pytest.mark.parametrize(("name", "least"), [("int8", 0.99), ("bfloat16", 0.999)])
def test_rounded_products_of_shares_stay_as_close_as_those_of_one_process(
    name: str, least: float, alone: Answers, ranks: list[Answers]
) -> None:
    exact_NE, one_NE, found_NE = (
        torch.stack(rows(found, job)) for found, job in ((alone, "float32"), (alone, name), (ranks[0], name))
    )
    assert not torch.equal(found_NE, exact_NE)
    cosine, cosine_alone = (torch.cosine_similarity(other, exact_NE).min() for other in (found_NE, one_NE))
    assert cosine > max(least, 1 - 2 * (1 - cosine_alone))


def test_all_ranks_have_the_same_rows_to_the_bit(ranks: list[Answers]) -> None:
    for name in jobs():
        for other in ranks[1:]:
            assert type(other[name]) is type(ranks[0][name])
            if not isinstance(other[name], str):
                assert all(map(torch.equal, rows(other, name), rows(ranks[0], name))), name


def test_a_degree_that_does_not_divide_the_heads_is_refused(ranks: list[Answers]) -> None:
    message = str(ranks[0]["three-heads"])
    assert f"tensor_parallel_size={len(ranks)}" in message
    assert "3 attention heads" in message
    assert "it can be 1, 3" in message


@pytest.mark.parametrize("name", WITHOUT_A_PLAN)
def test_a_family_of_transformers_without_a_plan_is_refused(name: str, ranks: list[Answers]) -> None:
    message = str(ranks[0][name])
    assert f"({name}) runs through transformers and cannot be split" in message
    assert "transformers has no plan that splits its layers" in message


def test_a_model_whose_layers_cannot_be_split_is_refused(ranks: list[Answers]) -> None:
    message = str(ranks[0]["clip"])
    assert "CLIPModel, whose layers cannot be split" in message
    assert "docs/parallelism.md" in message


def rows(found: Answers, name: str) -> list[torch.Tensor]:
    """Those of a job that was not refused."""
    answer = found[name]
    assert not isinstance(answer, str), answer
    return answer
