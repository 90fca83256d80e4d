"""Low-rank adapters on a model that two processes hold together give peft's own numbers."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from transformers import AutoModel

from anypool import LoRARequest, PoolingParams
from tests.adapters.lora_checkpoints import adapter, base, states
from tests.adapters.test_lora import ADAPTERS, MERGED_ONLY
from tests.distributed.adapted import adapted
from tests.distributed.processes import in_processes
from tests.helpers import loaded

NAMES = ("llama", "llama-bias", "llama-table", "llama-tokens", "qwen3", "bert", "bert-lora-bias", "modernbert")
ONLY_MERGED = ("whole-layer", "dora")
TEXTS = [[5, 9, 11, 40], [7], [3, *range(20, 60)]]


@cache
def trained(name: str) -> tuple[str, str, Any]:
    """The base, the adapter that peft wrote for it, and peft's model of both."""
    family, cls, config = (ADAPTERS | MERGED_ONLY)[name]
    folder, model = adapter(base(family), cls=cls, **config)
    return str(base(family)), str(folder), model


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, dict[str, list[torch.Tensor] | str]]]:
    jobs = {name: trained(name)[:2] for name in (*NAMES, *ONLY_MERGED)}
    return in_processes(adapted, jobs, TEXTS, tp_size=2)


@pytest.mark.parametrize(
    ("name", "how"), [*((name, how) for name in NAMES for how in ("beside", "merged")), ("whole-layer", "merged")]
)
def test_both_ranks_give_what_peft_gives(
    name: str, how: str, ranks: list[dict[str, dict[str, list[torch.Tensor] | str]]]
) -> None:
    for rank in ranks:
        found = rank[name][how]
        assert not isinstance(found, str), found
        for ids, states_LD in zip(TEXTS, found, strict=True):
            expected_LD = states(trained(name)[2], ids)
            torch.testing.assert_close(
                states_LD, expected_LD, atol=1e-5 * float(expected_LD.norm(dim=-1).max()), rtol=0
            )


def test_a_dora_of_a_layer_that_is_split_by_its_input_is_refused(
    ranks: list[dict[str, dict[str, list[torch.Tensor] | str]]],
) -> None:
    assert "is a DoRA" in str(ranks[0]["dora"]["merged"])
    assert "split over processes by its input" in str(ranks[0]["dora"]["merged"])


def test_an_engine_of_two_ranks_runs_the_base_and_its_adapters_in_one_call() -> None:
    """There are more adapters than slots, so each is put there again and again."""
    names = ("llama", "llama-bias", "llama-table")
    requests = {name: LoRARequest(name, 1 + i, trained(name)[1]) for i, name in enumerate(names)}
    order = ["llama", None, "llama-bias", "llama-table", "llama", None]
    plain = AutoModel.from_pretrained(base("llama")).eval()
    with loaded(base("llama"), tensor_parallel_size=2, enable_lora=True, max_loras=2) as llm:
        for ids in TEXTS:
            outputs = llm.token_embed(
                [{"prompt_token_ids": ids}] * len(order),
                PoolingParams(normalize=False),
                lora_request=[None if name is None else requests[name] for name in order],
                use_tqdm=False,
            )
            for name, output in zip(order, outputs, strict=True):
                expected_LD = states(plain if name is None else trained(name)[2], ids)
                most = 1e-5 * float(expected_LD.norm(dim=-1).max())
                torch.testing.assert_close(output.outputs.data, expected_LD, atol=most, rtol=0)
