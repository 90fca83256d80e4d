"""What goes between the front and its replicas arrives as it was, and weights do not go."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from anypool import PoolingParams
from anypool.adapters.facts import Elsewhere
from anypool.engine.metrics import EngineMetrics
from anypool.engine.preparation import Preparation
from anypool.engine.prompt_options import PromptOptions
from anypool.engine.prompts import TextPair
from anypool.engine.replicas.wire import (
    SENT_FIELDS,
    Channel,
    Ended,
    Ready,
    pack_error,
    pack_request,
    pack_results,
    unpack_error,
    unpack_request,
    unpack_results,
)
from anypool.engine.request import Request
from anypool.entrypoints.cli_info import describe
from anypool.errors import InvalidParameterError, NonFiniteResultError, OverloadedError
from anypool.model_executor.images import ImageInputs
from anypool.pooling.plan import PoolingPlan
from anypool.pooling.tasks import PoolingTask
from tests.helpers import RAGGED, loaded, tiny_bert, tiny_llama
from tests.named_checkpoints import colbert, cross_encoder, named_entities, process_reward_model, qwen3_reranker

# Fields of a request that do not go to a replica: what the queue decides is sent as its turn, what `also` gets as its
# plan, and the rest comes to be where the request runs, or stays with whoever waits for it.
STAY = {
    *("priority", "deadline", "cache_salt", "also"),
    *("num_cached_tokens", "tag", "arrival", "submitted", "started", "finished"),
    *("ran_out_of_memory", "has_killed", "settled", "future", "parts", "combine", "is_answered"),
}


def sent_through_a_pipe(message: object, content: Any = ()) -> tuple[Any, bytearray]:
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb") as reading, os.fdopen(writer, "wb") as writing:
        Channel(reading, writing).send(message, content)
        return Channel(reading, writing).receive()


def test_every_field_of_a_request_goes_or_is_known_to_stay() -> None:
    assert {field.name for field in dataclasses.fields(Request)} == STAY | set(SENT_FIELDS)
    assert not STAY & set(SENT_FIELDS)


def test_a_request_arrives_as_it_was() -> None:
    plan = PoolingPlan(task=PoolingTask.EMBED, dimensions=7)
    other = PoolingPlan(task=PoolingTask.TOKEN_EMBED)
    images = ImageInputs({"pixel_values": torch.rand(1, 3, 4, 4)})
    request = Request(
        request_id="5",
        token_ids=[1, 2, 3],
        plan=plan,
        token_type_ids=[0, 0, 1],
        images=images,
        skip=1,
        num_keys=2,
        num_truncated_tokens=4,
        priority=-3,
        deadline=17.5,
        cache_salt="salt",
        also=(Request(request_id="5", token_ids=[1, 2, 3], plan=other),),
    )
    sent, _ = sent_through_a_pipe(pack_request(9, request))
    found = unpack_request(sent)
    assert (sent.number, sent.turn) == (9, (-3, 17.5, "salt"))
    for name in SENT_FIELDS:
        if name != "images":
            assert getattr(found, name) == getattr(request, name), name
    assert found.images is not None
    assert found.images.digest == images.digest
    assert [one.plan for one in found.also] == [other]


def test_results_of_any_shape_and_dtype_arrive_in_memory_of_their_own() -> None:
    several = [
        [torch.rand(5)],
        [torch.rand(3, 4), torch.rand(2, 3, dtype=torch.float64)],
        [torch.rand(0, 4)],
        [torch.rand(4, 3).t(), torch.tensor(2.5)],
        [torch.rand(3).bfloat16(), torch.tensor([1, 2**40])],
    ]
    ended = [Ended(7, 0.0, 0, tuple((tuple(one.shape), one.dtype) for one in results)) for results in several]
    ended.insert(2, Ended(8, 0.0, 0))
    message, content = sent_through_a_pipe(ended, pack_results(one for results in several for one in results))
    found = list(unpack_results(message, content))
    for results, expected in zip(found, several, strict=True):
        assert all(map(torch.equal, results, expected))
        assert [one.dtype for one in results] == [one.dtype for one in expected]
        assert all(one.untyped_storage().nbytes() == one.nbytes for one in results)


def test_errors_arrive_with_what_they_hold() -> None:
    found = unpack_error(pack_error(InvalidParameterError("wrong", param="dimensions")))
    assert isinstance(found, InvalidParameterError)
    assert (str(found), found.param) == ("wrong", "dimensions")
    waits = unpack_error(pack_error(OverloadedError("full", retry_after_s=7)))
    assert isinstance(waits, OverloadedError)
    assert waits.retry_after_s == 7


def test_a_cause_that_cannot_be_pickled_is_told() -> None:
    class OddError(Exception):
        pass

    error = NonFiniteResultError("odd")
    error.__cause__ = OddError("here")
    found = unpack_error(pack_error(error))
    assert str(found) == "odd"
    assert "OddError('here')" in str(found.__cause__)


def test_counts_of_replicas_add_up() -> None:
    first, total = EngineMetrics(), EngineMetrics()
    first.batches, first.computed_tokens = 2, 30
    first.forward_s.observe(0.02)
    total.forward_s.observe(0.5)
    total.prompt_tokens = 4
    for _ in range(2):
        total.add_run_counts(first.run_counts())
    assert (total.batches, total.computed_tokens, total.prompt_tokens) == (4, 60, 4)
    assert (total.forward_s.count, total.forward_s.sum) == (3, pytest.approx(0.54))
    assert sum(total.forward_s.buckets) == 3


@pytest.mark.parametrize(
    ("make", "task"),
    [
        (tiny_llama, PoolingTask.EMBED),
        (tiny_bert, PoolingTask.TOKEN_EMBED),
        (named_entities, PoolingTask.TOKEN_CLASSIFY),
        (cross_encoder, PoolingTask.CLASSIFY),
        (process_reward_model, PoolingTask.REWARD),
        (colbert, PoolingTask.TOKEN_EMBED),
        (qwen3_reranker, PoolingTask.CLASSIFY),
    ],
    ids=lambda one: getattr(one, "__name__", str(one)),
)
def test_prompts_are_prepared_and_models_described_without_weights(make: Callable[[], Path], task: PoolingTask) -> None:
    texts: list[Any] = RAGGED
    if make is cross_encoder:
        texts = [TextPair("a cat", text) for text in RAGGED]
    elif make is process_reward_model:
        texts = ["1 + 1 = 2<extra_0>so<extra_0>"]
    with loaded(make()) as llm:
        engine = llm.engine
        ready, _ = sent_through_a_pipe(Ready(config=engine.config, loaded=engine.loaded, tokenizer=engine.tokenizer))
        assert isinstance(ready.loaded.model, Elsewhere)
        elsewhere = Preparation(ready.loaded, ready.tokenizer, engine.max_model_len)
        options = PromptOptions(truncate_prompt_tokens=-1)
        params = PoolingParams(is_query=True) if make is colbert else PoolingParams()
        found = elsewhere.prepare(texts, task, params, options)
        for one, expected in zip(found, engine.prepare(texts, task, params, options), strict=True):
            assert one.token_ids == expected.token_ids
            assert one.plan == expected.plan
            assert (one.num_keys, one.skip) == (expected.num_keys, expected.skip)
        facts = describe(engine)
        engine.loaded, loaded_here = ready.loaded, engine.loaded
        assert describe(engine) == facts
        engine.loaded = loaded_here
