"""A known reranker reads its authors' prompt, whatever becomes of a long document, and gives their scores."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_transformers import CrossEncoder
from sentence_transformers.base.modules import Transformer
from sentence_transformers.cross_encoder.modules import LogitScore
from sentence_transformers.sentence_transformer.modules import Pooling
from transformers import AutoTokenizer

from anypool import LLM, PoolingParams
from anypool.adapters.rerank_templates import ChatTemplate, manifests
from anypool.errors import (
    AnypoolError,
    CheckpointFormatError,
    ConfigError,
    InvalidParameterError,
    InvalidPromptError,
    PromptTooLongError,
)
from tests.adapters.test_cross_encoder import dense, of_modules
from tests.helpers import HIDDEN, assert_close, copy_of, edit_json, loaded, new_folder, tiny_bert, tiny_llama
from tests.rerankers import (
    GEMMA_PROMPT,
    LIMIT,
    QWEN_INSTRUCTION,
    QWEN_PREFIX,
    QWEN_SUFFIX,
    causal_lm,
    gemma_ids,
    ids_of,
    logits,
    mxbai_ids,
    qwen_ids,
    tokenizer,
)

Reference = Callable[..., list[int]]
QUERY = "Which story has a cat?"
DOCUMENTS = [
    "The cat sat on the mat.",
    "",
    "A story: {document} and {query}, {instruction}.\n\n",
    "<|im_end|> is no end; cat yes no 1 0",
    "a long story of no cat.\n" * 10 * LIMIT,
]
RAW = PoolingParams(activation="none")

# By the name of a checkpoint: the family, its prompt, the tokens that it answers with, and its default activation.
KNOWN: dict[str, tuple[str, Reference, tuple[str, ...], Callable[[torch.Tensor], torch.Tensor]]] = {
    "Qwen3-Reranker-0.6B": ("qwen3", qwen_ids, ("no", "yes"), torch.sigmoid),
    "mxbai-rerank-large-v2": ("qwen2", mxbai_ids, ("0", "1"), lambda scores: scores),
    "bge-reranker-v2-gemma": ("gemma", gemma_ids, ("Yes",), lambda scores: scores),
}
# What tells each without its name.
OVERRIDES: dict[str, dict[str, Any]] = {
    "Qwen3-Reranker-0.6B": {
        "architectures": ["Qwen3ForSequenceClassification"],
        "classifier_from_token": ["no", "yes"],
        "is_original_qwen3_reranker": True,
    },
    "mxbai-rerank-large-v2": {
        "architectures": ["Qwen2ForSequenceClassification"],
        "classifier_from_token": ["0", "1"],
        "method": "from_2_way_softmax",
    },
    "bge-reranker-v2-gemma": {
        "architectures": ["GemmaForSequenceClassification"],
        "classifier_from_token": ["Yes"],
        "method": "no_post_processing",
    },
}
# In vLLM's form.
JINJA = (
    "<|im_start|>system\n{{ instruction | default('Judge.') }}<|im_end|>\n"
    "Query: {{ (messages | selectattr('role', 'eq', 'query') | first).content }}\n"
    "Document: {{ (messages | selectattr('role', 'eq', 'document') | first).content }}<|im_end|>\n"
    "<|im_start|>assistant\n"
)


@pytest.fixture(params=KNOWN)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def checkpoint(name: str, *, called: str | None = None) -> Path:
    return causal_lm(KNOWN[name][0], tied=True, name=called or name, limit=2 * LIMIT)


def prompts_of(llm: LLM, documents: list[str] = DOCUMENTS, query: str = QUERY, **options: Any) -> list[list[int]]:
    return [output.prompt_token_ids for output in llm.score(query, documents, use_tqdm=False, **options)]


def scores_of(llm: LLM, documents: list[str] = DOCUMENTS, query: str = QUERY, **options: Any) -> torch.Tensor:
    return torch.stack([output.outputs.data for output in llm.score(query, documents, use_tqdm=False, **options)])


def expected_ids(name: str, documents: list[str] = DOCUMENTS, query: str = QUERY, **options: Any) -> list[list[int]]:
    reference, folder = KNOWN[name][1], checkpoint(name)
    return [reference(folder, query, document, **{"limit": 2 * LIMIT, **options}) for document in documents]


def expected_scores(name: str, prompts: list[list[int]]) -> torch.Tensor:
    _, _, tokens, _ = KNOWN[name]
    columns = logits(checkpoint(name), prompts)[:, [tokenizer().convert_tokens_to_ids(token) for token in tokens]]
    return columns[:, -1] - columns[:, 0] if len(tokens) == 2 else columns[:, 0]


# Prompts and scores


def test_a_known_reranker_gives_the_scores_of_its_authors_code(name: str) -> None:
    expected = expected_ids(name)
    raw = expected_scores(name, expected)
    assert raw.std() > 1e-2
    with loaded(checkpoint(name)) as llm:
        assert prompts_of(llm) == expected
        assert_close(scores_of(llm, pooling_params=RAW), raw)
        assert_close(scores_of(llm), KNOWN[name][3](raw))
        assert llm.supported_tasks[:1] == ("embed",)


def test_rerank_orders_by_the_same_scores(name: str) -> None:
    raw = expected_scores(name, expected_ids(name))
    with loaded(checkpoint(name)) as llm:
        ranked = llm.rerank(QUERY, DOCUMENTS, pooling_params=RAW, use_tqdm=False)
    assert [result.index for result in ranked] == raw.argsort(descending=True).tolist()
    assert_close(torch.tensor([result.relevance_score for result in ranked]), raw.sort(descending=True).values)


def test_an_instruction_takes_the_place_of_the_default_one(name: str) -> None:
    asked = "Find the cat: {query}"
    with loaded(checkpoint(name)) as llm:
        assert prompts_of(llm, instruction=asked) == expected_ids(name, instruction=asked)
        assert prompts_of(llm, prompt=asked) == expected_ids(name, instruction=asked)
        assert prompts_of(llm, instruction="") == expected_ids(name)
        with pytest.raises(InvalidParameterError, match="in a template the prompt is the instruction"):
            scores_of(llm, instruction="one", prompt="other")


def test_the_default_instructions_are_those_of_the_authors() -> None:
    found = {manifest.name: manifest.instruction for manifest in manifests()}
    assert found == {
        "Qwen3-Reranker": QWEN_INSTRUCTION,
        "mxbai-rerank-v2": "",
        "bge-reranker-v2-gemma": GEMMA_PROMPT,
    }


def test_user_text_with_the_names_of_fields_is_left_as_it_is(name: str) -> None:
    query = "{document} {instruction} {query}"
    with loaded(checkpoint(name)) as llm:
        [ids] = prompts_of(llm, ["{query}"], query)
    words = AutoTokenizer.from_pretrained(checkpoint(name))
    assert query in words.decode(ids)
    assert [ids] == expected_ids(name, ["{query}"], query)


# Long documents


@pytest.mark.parametrize("limit", [LIMIT, 2 * LIMIT - 3])
@pytest.mark.parametrize("side", [None, "right", "left"])
def test_a_long_document_is_cut_on_the_side_asked_for_and_nothing_else_is(
    name: str, limit: int, side: str | None
) -> None:
    document = DOCUMENTS[-1]
    [whole] = expected_ids(name, [document], limit=10**9)
    [short] = expected_ids(name, ["story" if side == "left" else "a"], limit=10**9)
    with loaded(checkpoint(name)) as llm:
        [output] = llm.score(QUERY, document, truncate_prompt_tokens=limit, truncation_side=side, use_tqdm=False)
    ids = output.prompt_token_ids
    assert len(ids) == limit
    assert output.num_truncated_tokens == len(whole) - limit
    start = next(i for i, (one, other) in enumerate(zip(whole, short, strict=False)) if one != other)
    if side == "left":
        assert ids == short[:start] + whole[start - limit :]
        return
    assert [ids] == expected_ids(name, [document], limit=limit)
    end = limit - (len(short) - start)
    assert ids == short[:start] + whole[start:end] + short[start:]


def test_a_long_document_is_an_error_where_nothing_may_be_cut(name: str) -> None:
    with loaded(checkpoint(name)) as llm, pytest.raises(PromptTooLongError, match=r"input 4 has [\d,]+ tokens"):
        scores_of(llm, truncate_prompt_tokens=None)


def test_a_query_that_leaves_no_room_is_an_error_and_not_cut(name: str) -> None:
    [empty] = expected_ids(name, [""])
    match = rf"the template and the query alone have {len(empty)} tokens, the limit is {len(empty) - 1}: shorten the qu"
    with loaded(checkpoint(name)) as llm:
        with pytest.raises(InvalidPromptError, match=match):
            scores_of(llm, truncate_prompt_tokens=len(empty) - 1)
        assert prompts_of(llm, ["cat"], truncate_prompt_tokens=len(empty)) == expected_ids(
            name, ["cat"], limit=len(empty)
        )


# How a known reranker is told


def test_a_known_reranker_is_told_by_vllms_overrides(name: str) -> None:
    with loaded(checkpoint(name, called="some-model"), hf_overrides=OVERRIDES[name]) as llm:
        assert prompts_of(llm) == expected_ids(name)
        assert_close(scores_of(llm, pooling_params=RAW), expected_scores(name, expected_ids(name)))
        assert_close(scores_of(llm), torch.sigmoid(scores_of(llm, pooling_params=RAW)))  # as vLLM has it


def test_a_known_reranker_is_told_by_the_name_that_config_json_remembers(name: str) -> None:
    folder = copy_of(checkpoint(name, called="some-model"))
    edit_json(folder / "config.json", lambda config: config.update(_name_or_path=f"org/{name}"))
    with loaded(folder) as llm:
        assert prompts_of(llm) == expected_ids(name)


def logit_score(name: str) -> Path:
    folder = copy_of(checkpoint(name, called="some-model"))
    tokens = [tokenizer().convert_tokens_to_ids(token) for token in KNOWN[name][2]]
    (folder / "1_LogitScore").mkdir()
    files: dict[str, Any] = {
        "config_sentence_transformers.json": {"model_type": "CrossEncoder"},
        "sentence_bert_config.json": {"transformer_task": "text-generation"},
        "modules.json": [{"path": "", "type": "x.Transformer"}, {"path": "1_LogitScore", "type": "x.LogitScore"}],
        "1_LogitScore/config.json": {
            "true_token_id": tokens[-1],
            "false_token_id": tokens[0] if len(tokens) == 2 else None,
        },
    }
    for file, content in files.items():
        (folder / file).write_text(json.dumps(content))
    return folder


def test_a_known_reranker_is_told_by_the_tokens_of_its_sentence_transformers_files(name: str) -> None:
    with loaded(logit_score(name)) as llm:
        assert prompts_of(llm) == expected_ids(name)
        assert_close(scores_of(llm, pooling_params=RAW), expected_scores(name, expected_ids(name)))


def test_other_tokens_and_other_families_are_no_known_reranker() -> None:
    folder = logit_score("Qwen3-Reranker-0.6B")
    edit_json(folder / "1_LogitScore" / "config.json", lambda config: config.update(false_token_id=7))
    with loaded(folder) as llm:
        assert llm.engine.loaded.rerank_template is None
    named = tiny_llama().rename(new_folder("named") / "qwen3-reranker")
    try:
        with loaded(named) as llm:
            assert llm.engine.loaded.rerank_template is None
            assert "classify" not in llm.supported_tasks
    finally:
        named.rename(tiny_llama())


def test_an_embedding_is_had_of_a_reranker_that_is_asked_for_one() -> None:
    with loaded(checkpoint("Qwen3-Reranker-0.6B"), convert="embed") as llm:
        assert "classify" not in llm.supported_tasks
        assert -1 < scores_of(llm, ["cat"]).item() < 1


def test_a_converted_classifier_of_a_known_name_reads_the_template(name: str) -> None:
    with loaded(checkpoint(name), hf_overrides=OVERRIDES[name]) as llm:
        assert prompts_of(llm) == expected_ids(name)


def test_every_manifest_is_complete() -> None:
    for manifest in manifests():
        prompt = manifest.render("a query", "a document", "an instruction")
        text = "".join(prompt.pieces)
        assert all(part in text for part in ("a query", "a document", "an instruction"))
        start, end = prompt.document
        assert prompt.pieces[prompt.cut][start:end] == "a document"
        assert manifest.activation in ("none", "sigmoid")


# Templates of one's own


def rendered(document: str, query: str = QUERY, **variables: Any) -> str:
    """The template as transformers renders it."""
    messages = [{"role": "query", "content": query}, {"role": "document", "content": document}]
    return str(tokenizer().apply_chat_template(messages, chat_template=JINJA, tokenize=False, **variables))


@pytest.fixture(params=["engine", "call", "file"])
def with_template(request: pytest.FixtureRequest) -> tuple[dict[str, Any], dict[str, Any]]:
    if request.param == "engine":
        return {"chat_template": JINJA}, {}
    if request.param == "call":
        return {}, {"chat_template": JINJA}
    path = new_folder("template") / "score.jinja"
    path.write_text(JINJA)
    return {"chat_template": str(path)}, {}


def test_a_template_of_ones_own_is_tokenised_as_the_whole_text_that_it_gives(
    name: str, with_template: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    engine, call = with_template
    documents = DOCUMENTS[:-1]
    words = AutoTokenizer.from_pretrained(checkpoint(name))
    with loaded(checkpoint(name), **engine) as llm:
        assert prompts_of(llm, documents, **call) == [words(rendered(document))["input_ids"] for document in documents]
        assert prompts_of(llm, documents, instruction="Be kind.", **call) == [
            words(rendered(document, instruction="Be kind."))["input_ids"] for document in documents
        ]


@pytest.mark.parametrize("limit", [90, LIMIT])
def test_a_template_of_ones_own_keeps_what_stands_around_a_long_document(name: str, limit: int) -> None:
    words = AutoTokenizer.from_pretrained(checkpoint(name))
    before = words(rendered("\0").partition("\0")[0].rstrip())["input_ids"]
    after = ids_of(checkpoint(name), "<|im_end|>\n<|im_start|>assistant")
    whole = words(rendered(DOCUMENTS[-1]))["input_ids"]
    with loaded(checkpoint(name), chat_template=JINJA) as llm:
        [output] = llm.score(QUERY, DOCUMENTS[-1:], truncate_prompt_tokens=limit, use_tqdm=False)
        ids = output.prompt_token_ids
        assert len(ids) == limit
        assert output.num_truncated_tokens == len(whole) - limit
        assert ids[: len(before)] == before
        assert ids[-len(after) :] == after
        assert ids[: limit - len(after)] == whole[: limit - len(after)]
        with pytest.raises(InvalidPromptError, match="the template and the query alone have"):
            scores_of(llm, query=DOCUMENTS[-1])


@pytest.mark.parametrize("limit", [60, 61, 62, 63, 64, 150])
def test_the_files_own_template_is_cut_as_sentence_transformers_cuts_it(limit: int) -> None:
    folder = copy_of(checkpoint("Qwen3-Reranker-0.6B", called="some-model"))
    edit_json(folder / "tokenizer_config.json", lambda config: config.update(model_max_length=limit))
    (folder / "chat_template.jinja").write_text(JINJA)
    saved = of_modules(Transformer(str(folder), transformer_task="text-generation"), LogitScore(300, 301))
    pairs = [(QUERY, document) for document in (*DOCUMENTS, "cat.\n" * LIMIT, ".\n\n" * LIMIT)]
    model = CrossEncoder(str(saved), device="cpu", local_files_only=True)
    expected = [model.preprocess([pair])["input_ids"][0].tolist() for pair in pairs]
    with loaded(saved) as llm:
        assert prompts_of(llm, [document for _, document in pairs]) == expected


def test_a_document_before_the_query_is_cut_and_the_query_is_not() -> None:
    swapped = "D: {{ messages[1].content }}\nQ: {{ messages[0].content }}\nA:"
    folder = checkpoint("Qwen3-Reranker-0.6B")
    with loaded(folder, chat_template=swapped) as llm:
        [ids] = prompts_of(llm, DOCUMENTS[-1:], truncate_prompt_tokens=60)
        [short] = prompts_of(llm, ["cat"])
    after = ids_of(folder, f"\nQ: {QUERY}\nA:")
    assert len(ids) == 60
    assert ids[-len(after) :] == after
    assert short == ids_of(folder, f"D: cat\nQ: {QUERY}\nA:")


def test_special_tokens_stand_around_a_template_once() -> None:
    folder = checkpoint("bge-reranker-v2-gemma")
    for template in (JINJA, "{{ bos_token }}" + JINJA, "<bos>" + JINJA):
        with loaded(folder, chat_template=template) as llm:
            [ids] = prompts_of(llm, ["cat"])
        assert ids == [3, *ids_of(folder, rendered("cat"))]


def test_a_document_that_looks_like_a_mark_of_ours_or_that_the_template_changes_is_rendered_as_it_is() -> None:
    template = ChatTemplate("Q: {{ messages[0].content }} D: {{ messages[1].content | trim }} A")
    odd = "\ue000document\ue000"
    for query, document in ((odd, "cat"), ("cat", odd), (odd, odd), ("a", "  cat  "), ("a", "")):
        prompt = template.render(query, document)
        assert prompt.pieces == (f"Q: {query} D: {document.strip()} A",)
        start, end = prompt.document
        assert prompt.pieces[0][start:end] == document.strip()


def test_a_template_that_writes_something_else_around_a_document_is_never_cut() -> None:
    template = "Q {{ messages[0].content }}{% if messages[1].content | length < 30 %}: short{% endif %} "
    template += "{{ messages[1].content }}"
    with loaded(checkpoint("Qwen3-Reranker-0.6B"), chat_template=template) as llm:
        assert prompts_of(llm, ["cat"]) == [ids_of(checkpoint("Qwen3-Reranker-0.6B"), f"Q {QUERY}: short cat")]
        with pytest.raises(InvalidPromptError, match="the template and the query alone"):
            prompts_of(llm, DOCUMENTS[-1:])


def test_a_template_sees_what_vllm_and_sentence_transformers_give_it() -> None:
    def text(template: str, instruction: str | None = None) -> str:
        both = " {{ messages[-2].content }} {{ messages[-1].content }}"
        return ChatTemplate(template + both).bind({"eos_token": "</s>"}).render("q", "d", instruction).pieces[0]

    assert text("{{ eos_token }}") == "</s> q d"
    assert text("{{ instruction | default('none') }}") == "none q d"
    assert text("{{ instruction | default('none') }}", "do") == "do q d"
    assert text("{{ messages[0].role }} {{ messages | length }}", "do") == "system 3 q d"
    assert text("{{ messages[0].role }} {{ messages | length }}") == "query 2 q d"
    assert text("{% if tools is not none %}tools{% endif %}") == " q d"
    assert text("{% if add_generation_prompt %}more{% endif %}") == " q d"
    assert text("{% for m in messages %}{% if loop.index == 2 %}{% break %}{% endif %}x{% endfor %}") == "x q d"
    assert text("{{ 'ü<' | tojson }}") == '"ü<" q d'
    parts = "{% for m in messages %}{{ m.content[0].type }}={{ m.content[0].text }};{% endfor %}"
    assert ChatTemplate(parts).render("q", "d").pieces == ("text=q;text=d;",)


@pytest.mark.parametrize(
    ("template", "match"),
    [
        ("{{ messages", "is not a valid Jinja template"),
        ("{% bogus %}", "is not a valid Jinja template"),
        ("no-such-file.jinja", "neither a Jinja template nor a file that can be read"),
        ("x" * 9000, "neither a Jinja template nor a file"),
        ("", "neither a Jinja template nor a file"),
    ],
)
def test_what_is_no_template_is_refused_at_once(template: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        LLM(checkpoint("Qwen3-Reranker-0.6B"), device="cpu", chat_template=template)
    with loaded(checkpoint("Qwen3-Reranker-0.6B")) as llm, pytest.raises(ConfigError, match=match):
        scores_of(llm, chat_template=template)


@pytest.mark.parametrize(
    ("template", "match"),
    [
        ("{{ messages[0].content }}", "has the document 0 times; it must have it once"),
        ("{{ messages[0].content }}{{ messages[1].content }}{{ messages[1].content }}", "has the document 2 times"),
        ("{{ messages[1].content }}", "loses the query"),
        ("{{ raise_exception('only users') }}", "cannot be rendered: only users"),
        ("{{ messages[5].content }}", "cannot be rendered"),
        ("{{ 1 / 0 }}", "cannot be rendered: division by zero"),
        ("{{ messages.__class__.__mro__ }}", "cannot be rendered: .*unsafe"),
        ("{{ messages.append(1) }}", "cannot be rendered"),
    ],
)
def test_a_template_that_cannot_hold_a_pair_is_refused(template: str, match: str) -> None:
    with (
        loaded(checkpoint("Qwen3-Reranker-0.6B"), chat_template=template) as llm,
        pytest.raises(ConfigError, match=match),
    ):
        scores_of(llm)
    with loaded(checkpoint("Qwen3-Reranker-0.6B")) as llm:
        with pytest.raises(ConfigError, match=match):
            scores_of(llm, chat_template=template)
        assert len(scores_of(llm)) == len(DOCUMENTS)  # the engine is none the worse


@pytest.mark.parametrize("template", [3, b"{{ x }}", ["{{ x }}"]])
def test_a_template_that_is_no_text_is_refused(template: Any) -> None:
    with loaded(checkpoint("Qwen3-Reranker-0.6B")) as llm, pytest.raises(AnypoolError, match="chat_template"):
        scores_of(llm, chat_template=template)


def test_models_that_read_no_template_refuse_one() -> None:
    with loaded(tiny_bert()) as llm:
        for option in ({"chat_template": JINJA}, {"instruction": "do"}):
            [given] = option
            with pytest.raises(InvalidParameterError, match=f"reads each text by itself, so it takes no {given}"):
                scores_of(llm, ["cat"], **option)
    pairs = of_modules(Transformer(str(tiny_bert())), Pooling(HIDDEN, "mean"), dense())
    with loaded(pairs) as llm, pytest.raises(InvalidParameterError, match="without a template, so it takes no instr"):
        scores_of(llm, ["cat"], instruction="do")


def test_a_template_that_nothing_reads_stops_the_load() -> None:
    for folder in (tiny_bert(), tiny_llama()):
        with pytest.raises(ConfigError, match=r"chat_template has no meaning for .*no head of one label"):
            LLM(folder, device="cpu", chat_template=JINJA)
    with pytest.raises(ConfigError, match="chat_template has no meaning"):
        LLM(checkpoint("Qwen3-Reranker-0.6B"), device="cpu", chat_template=JINJA, convert="embed")


def test_an_instruction_that_is_no_text_is_refused(name: str) -> None:
    with loaded(checkpoint(name)) as llm:
        for options in ({}, {"chat_template": JINJA}):
            with pytest.raises(InvalidParameterError, match="instruction=5 is not a text"):
                scores_of(llm, ["cat"], instruction=5, **options)


def test_a_pair_as_a_prompt_is_refused_where_pairs_are_read_in_a_template(name: str) -> None:
    with loaded(checkpoint(name)) as llm, pytest.raises(InvalidPromptError, match=r"in a template: call score\(\)"):
        llm.classify({"prompt": QUERY, "text_pair": "cat"}, use_tqdm=False)


def test_a_classifier_reads_a_template_of_ones_own() -> None:
    folder = checkpoint("Qwen3-Reranker-0.6B", called="other")
    overrides = {"classifier_from_token": ["no", "1"], "method": "from_2_way_softmax"}
    with loaded(folder, hf_overrides=overrides) as llm:
        assert llm.engine.loaded.rerank_template is None
        assert prompts_of(llm, ["cat"], chat_template=JINJA) == [ids_of(folder, rendered("cat"))]


def test_the_manifest_prompts_are_those_of_the_published_templates() -> None:
    by_name = {manifest.name: manifest for manifest in manifests()}
    qwen = "".join(by_name["Qwen3-Reranker"].render("q", "d").pieces)
    assert qwen == f"{QWEN_PREFIX}<Instruct>: {QWEN_INSTRUCTION}\n<Query>: q\n<Document>: d{QWEN_SUFFIX}"
    assert "".join(by_name["bge-reranker-v2-gemma"].render("q", "d").pieces) == f"A: q\nB: d\n{GEMMA_PROMPT}"


def test_a_chat_template_in_the_tokenizers_files_must_be_a_text() -> None:
    folder = logit_score("Qwen3-Reranker-0.6B")
    edit_json(folder / "sentence_bert_config.json", lambda c: c.update(modality_config={"message": {"format": "flat"}}))
    edit_json(folder / "tokenizer_config.json", lambda config: config.update(chat_template={"x": 1}))
    with pytest.raises(CheckpointFormatError, match=r"tokenizer_config.json has chat_template \{'x': 1\}"):
        LLM(folder, device="cpu")
    several = [{"name": "talk", "template": "x"}, {"name": "default", "template": JINJA}]
    edit_json(folder / "tokenizer_config.json", lambda config: config.update(chat_template=several))
    with loaded(folder) as llm:  # the files' own template wins over the one that is known
        assert prompts_of(llm, ["cat"]) == [ids_of(folder, rendered("cat"))]


def test_the_template_and_the_query_are_computed_once_for_all_documents() -> None:
    folder = checkpoint("Qwen3-Reranker-0.6B")
    documents = ["the cat", "a long story about the mat", "none"]
    with loaded(folder, enable_prefix_caching=False) as alone, loaded(folder) as sharing:
        assert sharing.engine.config.enable_prefix_caching, "as a causal reranker with a template has it"
        expected = alone.score("a cat", documents, use_tqdm=False)
        outputs = sharing.score("a cat", documents, use_tqdm=False)
        assert_close(
            torch.tensor([output.outputs.score for output in outputs]),
            torch.tensor([output.outputs.score for output in expected]),
        )
        cached = sorted(output.num_cached_tokens for output in outputs)
        assert cached[0] == 0
        assert cached[1] == cached[2] >= 16
        assert not any(output.num_cached_tokens for output in expected)
