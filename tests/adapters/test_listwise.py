"""jina-reranker-v3: scores of a whole list, against its published algorithm over transformers' own Qwen3."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, Qwen3Config, Qwen3Model

from anypool import LLM, PoolerConfig, PoolingParams
from anypool.config import EngineConfig
from anypool.engine.engine import Engine
from anypool.entrypoints.serve.app import create_app
from anypool.errors import (
    CheckpointFormatError,
    ConfigError,
    InvalidParameterError,
    InvalidPromptError,
    UnsupportedArchitectureError,
)
from tests.entrypoints.conftest import Client
from tests.helpers import HIDDEN, assert_close, byte_tokenizer, copy_of, edit_json, loaded, save

DOCUMENT, QUERY = "<|embed_token|>", "<|rerank_token|>"
WINDOW = 5000
DOCUMENTS = [
    "a cat sat on a mat",
    "the story",
    "a long query: the mat " * 9,
    "the story",
    "cats",
    "a passage, and none",
]
ASKED = "who sat on the mat?"


@cache
def checkpoint() -> Path:
    torch.manual_seed(7)
    tokenizer = byte_tokenizer("$A", model_max_length=WINDOW)
    tokenizer.add_special_tokens(
        {"additional_special_tokens": ["<|im_start|>", "<|im_end|>", "<|score_token|>", DOCUMENT, QUERY]}
    )
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=64,
        max_position_embeddings=WINDOW,
        initializer_range=0.2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    folder = save(Qwen3Model(config), tokenizer, "jina-reranker")
    tensors = {f"model.{name}": tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    tensors |= {"projector.0.weight": torch.randn(16, HIDDEN), "projector.2.weight": torch.randn(12, 16)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    edit_json(
        folder / "config.json",
        lambda config: (
            config | {"architectures": ["JinaForRanking"], "auto_map": {"AutoModel": "modeling.JinaForRanking"}}
        ),
    )
    return folder


class Reference:
    """The algorithm that its authors publish, over transformers."""

    def __init__(self, window: int = WINDOW) -> None:
        self.window, self.tokenizer = window, AutoTokenizer.from_pretrained(checkpoint())
        tensors = load_file(checkpoint() / "model.safetensors")
        self.first, self.second = tensors.pop("projector.0.weight"), tensors.pop("projector.2.weight")
        folder = copy_of(checkpoint())
        save_file({k.removeprefix("model."): v for k, v in tensors.items()}, folder / "model.safetensors")
        self.model: Any = Qwen3Model.from_pretrained(folder).eval()
        self.sizes: list[int] = []

    def prompt(self, query: str, documents: list[str], instruction: str | None) -> str:
        query = query.replace(QUERY, "").replace(DOCUMENT, "")
        documents = [one.replace(QUERY, "").replace(DOCUMENT, "") for one in documents]
        text = (
            "<|im_start|>system\nYou are a search relevance expert who can determine a ranking of the passages based "
            "on how relevant they are to the query. If the query is a question, how relevant a passage is depends on "
            "how well it answers the question. If not, try to analyze the intent of the query and assess how well "
            "each passage satisfies the intent. If an instruction is provided, you should follow the instruction when "
            "determining the ranking.<|im_end|>\n<|im_start|>user\n"
        )
        text += f"I will provide you with {len(documents)} passages, each indicated by a numerical identifier. "
        text += f"Rank the passages based on their relevance to query: {query}\n"
        if instruction:
            text += f"<instruct>\n{instruction}\n</instruct>\n"
        passages = [f'<passage id="{i}">\n{one}{DOCUMENT}\n</passage>' for i, one in enumerate(documents)]
        text += "\n".join(passages) + f"\n<query>\n{query}{QUERY}\n</query>"
        return text + "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"

    @torch.no_grad()
    def block(self, query: str, documents: list[str], instruction: str | None) -> tuple[np.ndarray, np.ndarray]:
        ids = self.tokenizer(self.prompt(query, documents, instruction), return_tensors="pt")["input_ids"]
        states = self.model(input_ids=ids).last_hidden_state[0]
        vectors = torch.relu(states @ self.first.T) @ self.second.T
        of = {token: vectors[ids[0] == self.tokenizer.convert_tokens_to_ids(token)] for token in (DOCUMENT, QUERY)}
        self.sizes.append(len(documents))
        return of[DOCUMENT].numpy(), of[QUERY].numpy()

    def scores(self, query: str, documents: list[str], instruction: str | None = None) -> torch.Tensor:
        cut, lengths = [], []
        for text, limit in [(query, 512), *((one, 2048) for one in documents)]:
            ids = self.tokenizer(text, truncation=True, max_length=limit)["input_ids"]
            cut.append(self.tokenizer.decode(ids) if len(ids) >= limit else text)
            lengths.append(len(ids))
        [query, *documents], [query_length, *lengths] = cut, lengths
        vectors, queries, weights, block = [], [], [], []
        room = self.window - 2 * query_length
        for i, one in enumerate(documents):
            block.append(one)
            room -= lengths[i]
            if len(block) >= 125 or room <= 2048 or i + 1 == len(documents):
                own, asked = self.block(query, block, instruction)
                vectors.extend(own)
                queries.append(asked[0])
                fits = F.cosine_similarity(torch.from_numpy(own), torch.from_numpy(asked), dim=-1).numpy()
                weights.append(((1.0 + fits) / 2.0).max())
                block, room = [], self.window - 2 * query_length
        mean = torch.from_numpy(np.average(queries, axis=0, weights=weights))
        return F.cosine_similarity(torch.from_numpy(np.array(vectors)), mean[None], dim=-1)


def scores(llm: LLM, query: str, documents: list[str], **options: Any) -> torch.Tensor:
    outputs = llm.score(query, documents, use_tqdm=False, **options)
    return torch.tensor([output.outputs.score for output in outputs])


@pytest.mark.parametrize("count", [1, 2, 6])
def test_a_list_in_one_prompt(count: int) -> None:
    with loaded(checkpoint()) as llm:
        assert_close(scores(llm, ASKED, DOCUMENTS[:count]), Reference().scores(ASKED, DOCUMENTS[:count]))


def test_it_is_known_by_its_code_as_well() -> None:
    with loaded(checkpoint(), hf_overrides={"architectures": ["Qwen3ForCausalLM"]}) as llm:
        assert_close(scores(llm, ASKED, DOCUMENTS), Reference().scores(ASKED, DOCUMENTS))


def test_a_score_depends_on_the_list() -> None:
    with loaded(checkpoint()) as llm:
        alone, among = (scores(llm, ASKED, DOCUMENTS[:n]) for n in (2, 6))
    assert (alone - among[:2]).abs().max() > 1e-4


def test_lists_that_need_several_prompts() -> None:
    reference = Reference()
    documents = [f"{one} {n} " * (3 + n) for n, one in enumerate(DOCUMENTS * 4)]
    with loaded(checkpoint()) as llm:
        assert_close(scores(llm, ASKED, documents), reference.scores(ASKED, documents))
    assert len(reference.sizes) > 2


def test_a_prompt_holds_125_documents() -> None:
    reference, documents = Reference(), [f"d{n}" for n in range(130)]
    reference.window = 8 * WINDOW
    with loaded(checkpoint(), hf_overrides={"max_position_embeddings": 8 * WINDOW}, max_model_len=8 * WINDOW) as llm:
        assert_close(scores(llm, "q", documents), reference.scores("q", documents))
    assert reference.sizes == [125, 5]


def test_long_texts_are_cut_to_their_length() -> None:
    documents, query = ["a story " * 300, "cat", "b" * 2048], "the mat " * 90
    with loaded(checkpoint()) as llm:
        assert_close(scores(llm, query, documents), Reference().scores(query, documents))
        [first, second, third] = llm.score(query, documents, use_tqdm=False)
        assert [one.num_truncated_tokens for one in (first, second, third)] == [208 + 352, 208, 208]
        with pytest.raises(InvalidPromptError, match=r"document 0 has 2,400 tokens, the limit is 2,048"):
            llm.score("cat", documents, truncate_prompt_tokens=None, use_tqdm=False)
        left = scores(llm, query, documents, truncation_side="left")
    assert_close(left, Reference().scores(query[-512:], [documents[0][-2048:], *documents[1:]]))


def test_the_tokens_it_reads_are_taken_out_of_texts() -> None:
    spoiled = [f"a cat{DOCUMENT} sat on{QUERY} a mat", *DOCUMENTS[1:]]
    with loaded(checkpoint()) as llm:
        assert_close(scores(llm, ASKED + QUERY, spoiled), Reference().scores(ASKED + QUERY, spoiled))
        nested = DOCUMENT[:4] + QUERY[:5] + DOCUMENT + QUERY[5:] + DOCUMENT[4:]
        assert_close(scores(llm, ASKED, [DOCUMENTS[0], "x" + nested]), Reference().scores(ASKED, [DOCUMENTS[0], "x"]))


def test_an_instruction_stands_in_the_prompt() -> None:
    with loaded(checkpoint()) as llm:
        expected = Reference().scores(ASKED, DOCUMENTS, "find cats")
        assert_close(scores(llm, ASKED, DOCUMENTS, instruction="find cats"), expected)
        assert_close(scores(llm, ASKED, DOCUMENTS, prompt="find cats"), expected)


def test_each_query_of_pairs_has_a_list_of_its_own() -> None:
    queries = ["a?", "b?", "a?", "b?", "a?", "c?"]
    with loaded(checkpoint()) as llm:
        found = torch.tensor([one.outputs.score for one in llm.score(queries, DOCUMENTS, use_tqdm=False)])
    for query in set(queries):
        places = [i for i, one in enumerate(queries) if one == query]
        assert_close(found[places], Reference().scores(query, [DOCUMENTS[i] for i in places]))


def test_rerank_orders_the_list() -> None:
    expected = Reference().scores(ASKED, DOCUMENTS)
    with loaded(checkpoint()) as llm:
        results = llm.rerank(ASKED, DOCUMENTS, top_n=4, use_tqdm=False)
        assert llm.rerank(ASKED, [], use_tqdm=False) == []
    assert [one.index for one in results] == expected.argsort(descending=True, stable=True)[:4].tolist()
    assert_close(torch.tensor([one.relevance_score for one in results]), expected[[one.index for one in results]])


@pytest.mark.parametrize(
    "engine",
    [
        {"max_num_batched_tokens": 64},
        {"enable_prefix_caching": True},
        {"pipeline_parallel_size": 2},
    ],
    ids=["chunks", "prefixes", "stages"],
)
def test_in_chunks_and_over_processes(engine: dict[str, Any]) -> None:
    reference = Reference()
    with loaded(checkpoint(), **engine) as llm:
        for _ in range(2):
            assert_close(scores(llm, ASKED, DOCUMENTS), reference.scores(ASKED, DOCUMENTS))


def test_rerank_over_http() -> None:
    expected = Reference().scores(ASKED, DOCUMENTS)
    engine = Engine(EngineConfig(model=str(checkpoint()), served_model_name="j", device="cpu", use_tqdm_on_load=False))
    try:
        client = Client(create_app([engine]))
        for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
            body = client.post(path, query=ASKED, documents=DOCUMENTS, top_n=3).json()
            assert [one["index"] for one in body["results"]] == expected.argsort(descending=True, stable=True)[
                :3
            ].tolist()
            values = torch.tensor([one["relevance_score"] for one in body["results"]])
            assert_close(values, expected.sort(descending=True, stable=True).values[:3])
        texts = client.post("/rerank", query=ASKED, texts=DOCUMENTS).json()
        assert_close(torch.tensor([one["score"] for one in texts]), expected[[one["index"] for one in texts]])
        data = client.post("/score", text_1=ASKED, text_2=DOCUMENTS).json()["data"]
        assert_close(torch.tensor([one["score"] for one in data]), expected)
        long = client.post("/rerank", query=ASKED, documents=["a" * 3000, "b"], truncate_prompt_tokens=-1)
        assert long.json()["usage"]["prompt_tokens"] > 2048
        assert client.post("/rerank", query=ASKED, documents=DOCUMENTS, chat_template="{{ 1 }}").status_code >= 400
        assert client.get("/info").status_code == 200
    finally:
        engine.close()


def test_what_has_no_meaning_for_a_list_is_refused() -> None:
    with loaded(checkpoint()) as llm:
        for options, said in (
            ({"pooling_params": PoolingParams(activation="sigmoid")}, "are cosines and take none"),
            ({"chat_template": "{{ messages }}"}, "takes no chat_template"),
            ({"fuse": True}, "takes no fuse"),
            ({"truncate_prompt_tokens": 20}, "several documents in a prompt"),
            ({"instruction": "a", "prompt": "b"}, "the prompt is the instruction"),
        ):
            with pytest.raises(InvalidParameterError, match=said):
                llm.score(ASKED, DOCUMENTS, use_tqdm=False, **options)
        with pytest.raises(InvalidPromptError, match="has no vectors"):
            llm.token_embed("no list", use_tqdm=False)
    with pytest.raises(ConfigError, match="reads a list in one prompt"):
        LLM(checkpoint(), device="cpu", pooler_config=PoolerConfig(enable_chunked_processing=True))


def test_a_later_version_is_refused() -> None:
    layers = {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
    with pytest.raises(UnsupportedArchitectureError, match="later one than jina-reranker-v3"):
        LLM(checkpoint(), device="cpu", hf_overrides=layers)


@pytest.mark.parametrize("shape", [None, (12, 15), (16,)])
def test_a_projector_of_another_shape_is_refused(shape: tuple[int, ...] | None) -> None:
    folder = copy_of(checkpoint())
    tensors = load_file(folder / "model.safetensors")
    del tensors["projector.2.weight"]
    if shape is not None:
        tensors["projector.2.weight"] = torch.randn(shape)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointFormatError, match=r"projector.2.weight have the shapes"):
        LLM(folder, device="cpu")


def test_a_tokenizer_without_its_tokens_is_refused() -> None:
    folder = copy_of(checkpoint())
    byte_tokenizer("$A", model_max_length=WINDOW).save_pretrained(folder)
    with pytest.raises(CheckpointFormatError, match=r"has no <\|embed_token\|>, <\|rerank_token\|>"):
        LLM(folder, device="cpu")
