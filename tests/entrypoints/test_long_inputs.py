"""The server and the command line with windows: an input longer than the model takes is embedded and counted."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from anypool import LLM
from anypool.config import EngineConfig
from anypool.engine.engine import Engine
from anypool.entrypoints.cli import build_parser, main
from anypool.entrypoints.cli_flags import engine_arguments
from anypool.entrypoints.serve.app import create_app
from tests.entrypoints.conftest import Client

SETTINGS = '{"enable_chunked_processing": true, "max_embed_len": 1000, "chunk_overlap": 14}'
LONG = "word " * 600


@pytest.fixture(scope="module")
def chunking(minilm: str) -> Iterator[Engine]:
    """An engine as `anypool serve` makes it of its flags."""
    flags = ["serve", minilm, "--pooler-config", SETTINGS, "--served-model-name", "minilm", "--no-use-tqdm-on-load"]
    arguments = build_parser().parse_args(flags)
    engine = Engine(EngineConfig.from_kwargs(model=arguments.model, **engine_arguments(arguments)))
    yield engine
    engine.close()


@pytest.fixture
def long_client(chunking: Engine) -> Client:
    return Client(create_app(chunking))


def test_a_long_input_is_embedded_as_offline_and_its_tokens_are_counted(
    minilm: str, long_client: Client, client: Client
) -> None:
    with LLM(minilm, pooler_config={"enable_chunked_processing": True, "chunk_overlap": 14}) as llm:
        [offline] = llm.embed(LONG, use_tqdm=False)
    assert offline.num_windows == 3  # 254 tokens, then 240 more, then the last 106 with what comes before
    answer = long_client.embed(input=["word", LONG]).json()
    np.testing.assert_allclose(answer["data"][1]["embedding"], offline.outputs.numpy(), atol=1e-6)
    short = client.embed(input="word").json()["data"][0]["embedding"]
    np.testing.assert_allclose(answer["data"][0]["embedding"], short, atol=1e-6)
    assert answer["usage"] == {"prompt_tokens": 3 + 3 * 256, "total_tokens": 3 + 3 * 256, "split_inputs": 1}


def test_short_inputs_have_the_usual_usage(long_client: Client) -> None:
    assert long_client.embed(input="word").json()["usage"] == {"prompt_tokens": 3, "total_tokens": 3}


def test_an_input_that_is_cut_first_is_not_split(long_client: Client) -> None:
    usage = long_client.embed(input=LONG, truncate_prompt_tokens=-1).json()["usage"]
    assert usage == {"prompt_tokens": 256, "total_tokens": 256, "truncated_tokens": 346}


def test_an_input_longer_than_max_embed_len_is_400(long_client: Client) -> None:
    answer = long_client.embed(input="word " * 1000)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "input")
    assert "1,002 tokens, the limit is 1,000 (max_embed_len, in windows of 256)" in error["message"]


def test_the_openai_client_reads_the_answer(chunking: Engine) -> None:
    async def ask() -> Any:
        transport = httpx.ASGITransport(app=create_app(chunking))
        http = httpx.AsyncClient(transport=transport, base_url="http://test")
        async with openai.AsyncOpenAI(base_url="http://test/v1", api_key="none", http_client=http) as client:
            return await client.embeddings.create(model="minilm", input=LONG)

    answer = asyncio.run(ask())
    assert len(answer.data[0].embedding) == 384
    assert answer.usage.prompt_tokens == 3 * 256
    assert answer.usage.split_inputs == 1


def test_the_command_line_embeds_a_long_text(minilm: str, tmp_path: Path, chunking: Engine) -> None:
    source, target = tmp_path / "texts.txt", tmp_path / "vectors.npy"
    source.write_text(LONG + "\n", encoding="utf-8")
    flags = ["--input", str(source), "--output", str(target), "--pooler-config", SETTINGS, "--no-use-tqdm-on-load"]
    assert main(["embed", minilm, *flags]) == 0
    expected = Client(create_app(chunking)).embed(input=LONG.strip()).json()["data"][0]["embedding"]
    np.testing.assert_allclose(np.load(target)[0], expected, atol=1e-6)
