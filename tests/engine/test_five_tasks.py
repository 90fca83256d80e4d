"""One model serves all five tasks in one batch, and each request gets what it gets alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from anypool import LLM, PoolingParams
from anypool.engine.request import Request
from anypool.model_executor.packed_batch import common_rows
from anypool.pooling.tasks import PoolingTask
from tests.adapters.test_heads import GQA, ragged, save_head
from tests.engine.test_engine import Gate
from tests.helpers import loaded, new_folder

EMBED, CLASSIFY, REWARD = PoolingTask.EMBED, PoolingTask.CLASSIFY, PoolingTask.REWARD
TOKEN_EMBED, TOKEN_CLASSIFY = PoolingTask.TOKEN_EMBED, PoolingTask.TOKEN_CLASSIFY

WANTED: list[tuple[PoolingTask, dict[str, Any]]] = [
    (EMBED, {}),
    (CLASSIFY, {}),
    (TOKEN_EMBED, {}),
    (REWARD, {}),
    (TOKEN_CLASSIFY, {}),
    (EMBED, {"dimensions": 8}),
    (EMBED, {"dimensions": 5, "normalize": False}),
    (EMBED, {"use_activation": False}),
    (CLASSIFY, {"activation": "sigmoid"}),
    (CLASSIFY, {"use_activation": False}),
    (REWARD, {"activation": "tanh"}),
    (TOKEN_EMBED, {"normalize": False}),
    (TOKEN_CLASSIFY, {"returned_token_ids": [2, 0]}),
    (TOKEN_CLASSIFY, {"step_tag_id": 0, "activation": "none"}),
]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    folder = new_folder("five-tasks")
    save_head("Llama", GQA, "SequenceClassification", folder)
    with loaded(folder, max_num_batched_tokens=1 << 20) as llm:
        yield llm


def requests(llm: LLM) -> list[Request]:
    """Every task with every text, and texts of all lengths in between."""
    prepared = []
    for text in ragged(pads=True):
        for task, fields in WANTED:
            if "step_tag_id" not in fields or fields["step_tag_id"] in text:
                prepared += llm.engine.prepare([text], task, PoolingParams(**fields))
    return prepared


def test_each_answer_in_a_batch_of_all_tasks_equals_the_one_alone(llm: LLM) -> None:
    assert set(llm.supported_tasks) == {task.value for task in PoolingTask if task is not PoolingTask.SPARSE_EMBED}
    alone = []
    for request in requests(llm):
        llm.engine.submit([request])
        alone.append(request.future.result(30))
    sizes: list[int] = []
    hook = llm.engine.loaded.model.register_forward_pre_hook(lambda _, args: sizes.append(len(args[0])))
    gate = Gate(llm.engine.loaded.model)
    [first] = llm.engine.prepare([[9]], EMBED)
    llm.engine.submit([first])
    assert gate.entered.wait(30)
    together = requests(llm)
    llm.engine.submit(together[:40])
    llm.engine.submit(together[40:])
    gate.open()
    for request, expected in zip(together, alone, strict=True):
        # Products of another shape round otherwise, in proportion to the row: raw states are not of unit length.
        rounding = 1e-6 * expected.norm(dim=-1, keepdim=True).clamp_min(1)
        assert ((request.future.result(30) - expected).abs() <= rounding).all(), request.plan
    hook.remove()
    assert sizes == [common_rows(1), common_rows(sum(map(len, together)))], "they ran as one batch"


def test_results_have_the_shapes_that_were_asked_for(llm: LLM) -> None:
    text = ragged(pads=True)[2]
    shapes: dict[tuple[PoolingTask, int], tuple[int, ...]] = {}
    for i, (task, fields) in enumerate(WANTED):
        [request] = llm.engine.prepare([text], task, PoolingParams(**fields))
        llm.engine.submit([request])
        shapes[task, i] = tuple(request.future.result(30).shape)
    assert list(shapes.values()) == [
        (32,),
        (3,),
        (63, 32),
        (3,),
        (63, 3),
        (8,),
        (5,),
        (32,),
        (3,),
        (3,),
        (3,),
        (63, 32),
        (63, 2),
        (2, 3),
    ]
