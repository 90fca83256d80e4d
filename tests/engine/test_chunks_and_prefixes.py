"""A prompt run in chunks, or after a cached prefix, gives the numbers of the prompt run whole and alone."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, wait
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from anypool import LLM, PoolerConfig, PoolingParams
from anypool.engine.batch import make_batch
from anypool.engine.request import Request
from anypool.errors import ConfigError, EngineError, NonFiniteResultError
from anypool.pooling.tasks import PoolingTask
from tests.adapters.test_heads import GQA, WIDE_HEADS, save_head
from tests.engine.test_engine import Gate
from tests.engine.test_five_tasks import WANTED
from tests.helpers import assert_close, loaded, new_folder, tiny_bert, tiny_llama, vectors

BUDGET, BLOCK = 16, 4
MARKER = 113
IN_PARTS = {"max_num_batched_tokens": BUDGET, "block_size": BLOCK}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, full attention": ("Llama", GQA),
    "mistral, sliding windows": ("Mistral", WIDE_HEADS),
    "qwen2, dynamic rope": ("Qwen2", {**GQA, "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}),
    "gpt2, through transformers": ("GPT2", {"vocab_size": 120, "n_embd": 32, "n_layer": 2, "n_head": 4}),
}


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest) -> Path:
    stem, values = FAMILIES[request.param]
    folder = new_folder("in-parts")
    save_head(stem, {**values, "pad_token_id": 0}, "SequenceClassification", folder)
    return folder


def random_prompts(seed: int, lengths: Sequence[int]) -> list[list[int]]:
    generator = random.Random(seed)
    return [[generator.randrange(3, 110) for _ in range(length)] for length in lengths]


@contextlib.contextmanager
def whole_and_in_parts(folder: Path, **engine_args: Any) -> Iterator[tuple[LLM, LLM]]:
    off = {"enable_chunked_prefill": False, "enable_prefix_caching": False}
    with (
        loaded(folder, **off, **engine_args) as whole,
        loaded(folder, enable_prefix_caching=True, **IN_PARTS, **engine_args) as parts,
    ):
        yield whole, parts


def answers(llm: LLM, prompts: Any, task: str, params: PoolingParams | None = None) -> list[torch.Tensor]:
    return [output.outputs.data for output in llm.encode(prompts, params, pooling_task=task, use_tqdm=False)]


@pytest.mark.parametrize("pooling", ["CLS", "LAST", "MEAN", "MAX", "WEIGHTED_MEAN", "MEAN_SQRT_LEN"])
def test_every_pooling_type_is_the_same_whole_in_chunks_and_cached(checkpoint: Path, pooling: str) -> None:
    first, *rest = random_prompts(1, [70, 1, 16, 17, 40, 12])
    prompts = [first, *rest, [*first[:30], *rest[3]], [*first[:9], 5]]
    with whole_and_in_parts(checkpoint, pooler_config=PoolerConfig(seq_pooling_type=pooling)) as (whole, parts):
        expected = vectors(whole, prompts)
        assert_close(vectors(parts, prompts), expected)
        assert parts.engine.metrics.chunks > 0
        before = parts.engine.metrics.cached_tokens
        outputs = parts.embed(prompts, use_tqdm=False)
        assert_close(torch.stack([output.outputs.data for output in outputs]), expected)
        found = [output.num_cached_tokens for output in outputs]
        assert found == [(len(prompt) - 1) // BLOCK * BLOCK for prompt in prompts], "all but the last block"
        assert parts.engine.metrics.cached_tokens - before == sum(found)


def test_concatenated_pooling_types_are_the_same_in_chunks() -> None:
    prompts = random_prompts(1, [70, 1, 16, 40])
    with whole_and_in_parts(tiny_llama(), pooler_config=PoolerConfig(pooling_type="CLS+MEAN+MAX")) as (whole, parts):
        assert_close(vectors(parts, prompts), vectors(whole, prompts))


@pytest.mark.parametrize("task", ["classify", "reward", "token_embed", "token_classify"])
def test_every_task_is_the_same_whole_in_chunks_and_cached(checkpoint: Path, task: str) -> None:
    prompts = random_prompts(2, [70, 1, 16, 40])
    prompts[0][-20:] = [0] * 20  # padding ids at the end, which classification passes over
    prompts[3][-1] = 0
    with whole_and_in_parts(checkpoint) as (whole, parts):
        expected = answers(whole, prompts, task)
        for _ in range(2):
            for actual, row in zip(answers(parts, prompts, task), expected, strict=True):
                assert_close(actual, row)


def test_steps_are_found_across_chunks_and_in_cached_prefixes(checkpoint: Path) -> None:
    [prompt] = random_prompts(3, [90])
    prompt[::11] = [7] * len(prompt[::11])
    params = PoolingParams(step_tag_id=7)
    with whole_and_in_parts(checkpoint) as (whole, parts):
        [expected] = answers(whole, [prompt], "token_classify", params)
        assert len(expected) == prompt.count(7)
        for _ in range(2):
            assert_close(answers(parts, [prompt], "token_classify", params)[0], expected)


def test_prompts_of_one_batch_share_the_prefix_that_one_of_them_computes(checkpoint: Path) -> None:
    [prefix] = random_prompts(4, [30])
    prompts = [[*prefix, *tail] for tail in random_prompts(5, [3, 9, 4, 17, 4])]
    with (
        loaded(checkpoint) as whole,
        loaded(checkpoint, enable_prefix_caching=True, block_size=BLOCK) as sharing,
    ):
        expected = vectors(whole, prompts)
        assert_close(vectors(sharing, prompts), expected)
        assert sharing.engine.metrics.batches == 1
        total, shared = sum(map(len, prompts)), 28 * (len(prompts) - 1)
        assert sharing.engine.metrics.computed_tokens == total - shared
        assert sharing.engine.metrics.cached_tokens == shared
        assert sharing.engine.metrics.cache_hit_rate == pytest.approx(shared / total)


def test_memory_of_a_long_prompt_does_not_grow_with_its_chunks(checkpoint: Path) -> None:
    [prompt] = random_prompts(6, [120])
    with loaded(checkpoint, pooler_config=PoolerConfig(seq_pooling_type="MEAN"), **IN_PARTS) as llm:
        kept: list[int] = []
        runner: Any = llm.engine._executor.runner  # type: ignore[attr-defined]
        launch_chunk = runner.launch_chunk

        def watched(batch: Any, pooling: Any, *, is_last: bool) -> Any:
            launched = launch_chunk(batch, pooling, is_last=is_last)
            kept.append(sum(tensor.numel() for one in pooling for state in one.states for tensor in _tensors(state)))
            return launched

        runner.launch_chunk = watched
        vectors(llm, [prompt])
        assert len(kept) == 8
        assert llm.engine.metrics.queue_s.count == 1
        assert set(kept) == {32}, "one row"
        assert llm.engine._cache is not None
        assert llm.engine._cache.pool.num_free == llm.engine._cache.pool.num_blocks


def _tensors(state: Any) -> list[torch.Tensor]:
    return [value for value in vars(state).values() if isinstance(value, torch.Tensor)]


def test_salts_keep_prefixes_apart(checkpoint: Path) -> None:
    [prompt] = random_prompts(7, [14])
    with loaded(checkpoint, enable_prefix_caching=True, block_size=BLOCK) as llm:
        cached = []
        for salt in (None, "a", "b", "a"):
            [request] = llm.engine.prepare([prompt], PoolingTask.EMBED)
            llm.engine.submit([request], cache_salt=salt)
            request.future.result(30)
            cached.append(request.num_cached_tokens)
        assert cached == [0, 0, 0, 12]


def test_a_small_cache_evicts_and_stays_right(checkpoint: Path) -> None:
    prompts = random_prompts(8, [40, 30, 50, 40, 20, 60]) * 3
    with whole_and_in_parts(checkpoint, max_model_len=64, kv_cache_memory_fraction=1e-9) as (whole, parts):
        assert parts.engine._cache is not None
        assert parts.engine._cache.pool.num_blocks == 64 // BLOCK
        assert_close(vectors(parts, prompts), vectors(whole, prompts))
        assert parts.engine._cache.pool.num_free == 64 // BLOCK


def test_what_was_not_finite_is_not_cached(checkpoint: Path) -> None:
    [prompt] = random_prompts(9, [14])
    with loaded(checkpoint, enable_prefix_caching=True, block_size=BLOCK) as llm:
        hook = llm.engine.loaded.model.register_forward_hook(lambda module, args, out: out * float("nan"))
        with pytest.raises(NonFiniteResultError):
            vectors(llm, [prompt])
        hook.remove()
        [output] = llm.embed([prompt], use_tqdm=False)
        assert output.num_cached_tokens == 0
        assert output.outputs.data.isfinite().all()


def test_a_long_prompt_that_fails_gives_its_blocks_back(checkpoint: Path) -> None:
    good, bad = random_prompts(10, [60, 60])
    bad[50] = MARKER
    with loaded(checkpoint, **IN_PARTS) as llm:
        expected = vectors(llm, [good])
        llm.engine.loaded.model.register_forward_pre_hook(lambda _, args: _raise_for(args[0]))
        requests = llm.engine.prepare([bad, good], PoolingTask.EMBED)
        llm.engine.submit(requests)
        with pytest.raises(EngineError, match="boom"):
            requests[0].future.result(30)
        assert_close(requests[1].future.result(30), expected[0])
        assert llm.engine._cache is not None
        assert llm.engine._cache.pool.num_free == llm.engine._cache.pool.num_blocks


def test_a_piece_has_the_segment_ids_of_its_own_tokens_and_other_ids_share_no_prefix(checkpoint: Path) -> None:
    with loaded(checkpoint, enable_prefix_caching=True, **IN_PARTS) as llm:
        cache, device = llm.engine._cache, llm.engine.loaded.device
        assert cache is not None
        [request, other, third] = llm.engine.prepare([[20] * 12, [20] * 12, [20] * 12], PoolingTask.EMBED)
        request.token_type_ids = other.token_type_ids = [0] * 9 + [1] * 3
        third.token_type_ids = [0] * 5 + [1] * 7
        pieces = cache.whole([request, other, third])
        assert [piece.start for piece in pieces] == [0, 8, 0]
        types = make_batch(pieces, device, cache=cache).token_type_ids_T
        assert types is not None
        assert types.tolist() == [*request.token_type_ids, 0, 1, 1, 1, *third.token_type_ids]


@pytest.mark.parametrize("length", [14, 60], ids=["whole", "in chunks"])
@pytest.mark.parametrize("failing", ["match", "allocate"])
def test_planning_that_fails_gives_its_blocks_back(checkpoint: Path, failing: str, length: int) -> None:
    prompts = random_prompts(13, [length, length])
    with loaded(checkpoint, enable_prefix_caching=True, **IN_PARTS) as llm:
        expected = vectors(llm, prompts)
        assert llm.engine._cache is not None
        pool = llm.engine._cache.pool
        plan, calls = getattr(pool, failing), iter(range(3))

        def short_of_memory(*args: Any) -> Any:
            if next(calls, 0) > 0:
                raise MemoryError("boom")
            return plan(*args)

        setattr(pool, failing, short_of_memory)
        for _ in range(3):
            with contextlib.suppress(EngineError):
                vectors(llm, [[*prompts[0][:9], *prompt] for prompt in prompts])
        setattr(pool, failing, plan)
        assert pool.num_free == pool.num_blocks
        assert_close(vectors(llm, prompts), expected)


def _raise_for(ids: torch.Tensor) -> None:
    if (ids == MARKER).any():
        raise RuntimeError("boom")


def test_a_long_prompt_is_dropped_between_its_chunks(checkpoint: Path) -> None:
    gone, stays = random_prompts(11, [100, 50])
    with loaded(checkpoint, **IN_PARTS) as llm:
        [expected] = vectors(llm, [stays])
        gate = Gate(llm.engine.loaded.model)
        requests = llm.engine.prepare([gone, stays], PoolingTask.EMBED)
        llm.engine.submit(requests[:1])
        assert gate.entered.wait(30)
        llm.engine.submit(requests[1:])
        chunks = llm.engine.metrics.chunks
        assert requests[0].future.cancel()
        gate.open()
        assert_close(requests[1].future.result(30), expected)
        assert llm.engine.metrics.chunks - chunks <= 1 + 50 // BUDGET
        with pytest.raises(CancelledError):
            requests[0].future.result(0)
        assert llm.engine._cache is not None
        assert llm.engine._cache.pool.num_free == llm.engine._cache.pool.num_blocks


def test_memory_that_is_short_turns_a_whole_prompt_into_chunks(checkpoint: Path) -> None:
    [prompt] = random_prompts(12, [120])
    with loaded(checkpoint, max_num_batched_tokens=128) as llm:
        expected = vectors(llm, [prompt])

        def too_large(_: Any, args: tuple[torch.Tensor, ...]) -> None:
            if len(args[0]) > 64:
                raise MemoryError("boom")

        llm.engine.loaded.model.register_forward_pre_hook(too_large)
        assert_close(vectors(llm, [prompt]), expected)
        assert llm.engine.metrics.chunks == 1


def test_a_bidirectional_model_runs_long_prompts_whole_and_refuses_to_be_told_otherwise() -> None:
    prompts = [[2, *[20] * 100, 3], [2, 20, 3]]
    with loaded(tiny_bert()) as whole, loaded(tiny_bert(), max_num_batched_tokens=16) as small:
        assert small.engine.config.enable_chunked_prefill is False
        assert_close(vectors(small, prompts), vectors(whole, prompts))
    for name in ("enable_chunked_prefill", "enable_prefix_caching"):
        with pytest.raises(ConfigError, match=f"{name}=True: .* cannot run a prompt in parts"):
            LLM(tiny_bert(), device="cpu", use_tqdm_on_load=False, **{name: True})


# Any mix


@pytest.fixture(scope="module")
def mixed() -> Iterator[tuple[LLM, LLM]]:
    folder = new_folder("mixed")
    save_head("Mistral", WIDE_HEADS, "SequenceClassification", folder)
    with whole_and_in_parts(folder) as pair:
        yield pair


@st.composite
def calls(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Calls of several prompts, some with common beginnings, some cancelled."""
    return draw(
        st.lists(
            st.fixed_dictionaries(
                {
                    "prefix": st.integers(0, 24),
                    "lengths": st.lists(st.integers(1, 6 * BUDGET), min_size=1, max_size=4),
                    "kind": st.integers(0, len(WANTED) - 2),
                    "priority": st.integers(-1, 1),
                    "cancelled": st.integers(0, 7),
                }
            ),
            min_size=1,
            max_size=5,
        )
    )


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(calls=calls(), budget=st.integers(1, 2 * BUDGET), seed=st.integers(0, 3))
def test_any_mix_gives_each_request_the_numbers_it_gets_alone(
    mixed: tuple[LLM, LLM], calls: list[dict[str, Any]], budget: int, seed: int
) -> None:
    whole, parts = mixed
    parts.engine._scheduler.max_tokens = budget
    answered = sum(parts.engine.metrics.requests.values())
    [shared] = random_prompts(seed, [24])
    submitted: list[tuple[Request, list[int], int]] = []
    for number, call in enumerate(calls):
        task, fields = WANTED[call["kind"]]
        prompts = [[*shared[: call["prefix"]], *tail] for tail in random_prompts(number, call["lengths"])]
        requests = parts.engine.prepare(prompts, task, PoolingParams(**fields))
        parts.engine.submit(requests, priority=call["priority"])
        for index, request in enumerate(requests):
            if index == call["cancelled"]:
                request.future.cancel()
        submitted += [(request, prompt, call["kind"]) for request, prompt in zip(requests, prompts, strict=True)]
    for request, prompt, kind in submitted:
        if request.future.cancelled():
            continue
        task, fields = WANTED[kind]
        [alone] = whole.engine.prepare([prompt], task, PoolingParams(**fields))
        whole.engine.submit([alone])
        expected = alone.future.result(30)
        # Raw states are not of unit length, and rounding is in proportion to the row.
        atol = 1e-5 * max(1.0, float(expected.norm(dim=-1).max()))
        assert_close(request.future.result(30), expected, atol=atol)
    assert not wait([request.future for request, _, _ in submitted], timeout=30).not_done
    assert sum(parts.engine.metrics.requests.values()) - answered == len(submitted), "one answer each"
    assert parts.engine._cache is not None
    assert parts.engine._cache.pool.num_free == parts.engine._cache.pool.num_blocks
