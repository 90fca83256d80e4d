"""Parameters are resolved against the engine's settings and the model before any work is done."""

from __future__ import annotations

from typing import Any

import pytest

from anypool.errors import InvalidParameterError, UnsupportedTaskError
from anypool.pooling.params import PoolingParams
from anypool.pooling.plan import EmbeddingSize, PoolingDefaults, PoolingPlan, make_plan
from anypool.pooling.tasks import PoolingTask, encode2pooling_task, parse_task

EMBED, TOKENS = PoolingTask.EMBED, PoolingTask.TOKEN_EMBED
SIZE = EmbeddingSize(model="m", full=32)
DEFAULTS = PoolingDefaults(tasks=(EMBED, TOKENS), size=SIZE, normalize=True, dimensions=16)


def test_the_request_wins_over_the_defaults() -> None:
    assert make_plan(EMBED, PoolingParams(), DEFAULTS) == PoolingPlan(task=EMBED, normalize=True, dimensions=16)
    asked = PoolingParams(dimensions=32, normalize=False)
    assert make_plan(EMBED, asked, DEFAULTS) == PoolingPlan(task=EMBED, normalize=False, dimensions=32)
    assert make_plan(TOKENS, PoolingParams(), DEFAULTS) == PoolingPlan(task=TOKENS, normalize=True)
    assert make_plan(TOKENS, PoolingParams(normalize=False), DEFAULTS) == PoolingPlan(task=TOKENS, normalize=False)


@pytest.mark.parametrize("dimensions", [0, -1, True, 1.0, "8", [8]])
def test_dimensions_that_are_no_positive_integer_are_refused(dimensions: Any) -> None:
    with pytest.raises(InvalidParameterError, match=r"dimensions=.* is not a positive integer") as caught:
        PoolingParams(dimensions=dimensions)
    assert caught.value.param == "dimensions"


@pytest.mark.parametrize("normalize", [0, 1, "yes"])
def test_normalize_that_is_no_bool_is_refused(normalize: Any) -> None:
    with pytest.raises(InvalidParameterError, match=r"normalize=.* is not a bool"):
        PoolingParams(normalize=normalize)


def test_dimensions_that_the_model_does_not_have_are_refused_with_those_that_it_has() -> None:
    with pytest.raises(InvalidParameterError, match="dimensions=33 is not available for m: it supports 1 to 32"):
        SIZE.check(33)
    listed = EmbeddingSize(model="m", full=32, allowed=(8, 16, 64))
    assert [listed.check(size) for size in (8, 16, 32)] == [8, 16, 32]
    for wrong in (9, 64):
        with pytest.raises(
            InvalidParameterError, match=f"dimensions={wrong} is not available.*: it supports 8, 16, 32"
        ):
            listed.check(wrong)
    whole = EmbeddingSize(model="m", full=32, cuttable=False)
    assert whole.check(32) == 32
    with pytest.raises(InvalidParameterError, match=r"it supports 32$"):
        whole.check(16)


def test_a_task_that_is_not_served_is_refused_with_those_that_are() -> None:
    with pytest.raises(UnsupportedTaskError, match="'classify' is not served by m; it serves embed, token_embed"):
        make_plan(PoolingTask.CLASSIFY, PoolingParams(), DEFAULTS)
    with pytest.raises(InvalidParameterError, match="dimensions=8 has no meaning for task 'token_embed'"):
        make_plan(TOKENS, PoolingParams(dimensions=8), DEFAULTS)
    with pytest.raises(InvalidParameterError, match="pooling_task='embedding' is unknown; known: embed, classify"):
        parse_task("embedding")


def test_the_old_name_encode_is_the_first_token_level_task() -> None:
    labels = PoolingTask.TOKEN_CLASSIFY
    assert encode2pooling_task((EMBED, labels, TOKENS)) is TOKENS
    assert encode2pooling_task((EMBED, labels)) is labels
    with pytest.raises(UnsupportedTaskError, match="this model serves embed"):
        encode2pooling_task((EMBED,))
