"""Low-rank adapters on a model that several processes hold together give peft's own numbers."""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM

from anypool import LLM, LoRARequest, PoolingParams
from anypool.errors import WeightsError
from tests.adapters.lora_checkpoints import adapter, base, states
from tests.adapters.test_lora import ADAPTERS, MERGED_ONLY
from tests.adapters.test_lora_heads import assert_scores, classifier
from tests.adapters.test_lora_heads import trained as with_head
from tests.distributed.adapted import adapted
from tests.distributed.processes import in_processes
from tests.helpers import loaded, new_folder

NAMES = ("llama", "llama-bias", "llama-table", "llama-tokens", "qwen3", "bert", "bert-lora-bias", "modernbert")
ONLY_MERGED = ("whole-layer", "dora")
STAGES = {"pipeline_parallel_size": 2}
SHARES_OF_STAGES = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
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


def assert_mixed_is_as_peft(llm: LLM, family: str, names: tuple[str, ...]) -> None:
    """The base and adapters in one call, each put into a slot again and again where there are more than slots."""
    requests: dict[str | None, LoRARequest | None] = {None: None}
    requests |= {name: LoRARequest(name, 1 + i, trained(name)[1]) for i, name in enumerate(names)}
    order = [names[0], None, *names[1:], names[0], None]
    plain = AutoModel.from_pretrained(base(family)).eval()
    for ids in TEXTS:
        outputs = llm.token_embed(
            [{"prompt_token_ids": ids}] * len(order),
            PoolingParams(normalize=False),
            lora_request=[requests[name] for name in order],
            use_tqdm=False,
        )
        for name, output in zip(order, outputs, strict=True):
            assert_is(output.outputs.data, states(plain if name is None else trained(name)[2], ids))


def assert_is(actual_LD: torch.Tensor, expected_LD: torch.Tensor) -> None:
    most = 1e-5 * float(expected_LD.norm(dim=-1).max())
    torch.testing.assert_close(actual_LD, expected_LD, atol=most, rtol=0)


@pytest.mark.parametrize(
    ("family", "names", "sizes"),
    [
        ("llama", ("llama", "llama-bias", "llama-table"), {"tensor_parallel_size": 2}),
        ("llama", ("llama", "llama-one-layer", "llama-table"), STAGES),
        ("llama", ("llama", "llama-one-layer", "llama-tokens"), SHARES_OF_STAGES),
        ("bert", ("bert", "bert-lora-bias", "bert-table"), SHARES_OF_STAGES),
    ],
)
def test_an_engine_of_ranks_runs_the_base_and_its_adapters_in_one_call(
    family: str, names: tuple[str, ...], sizes: dict[str, int]
) -> None:
    with loaded(base(family), enable_lora=True, max_loras=2, **sizes) as llm:
        assert_mixed_is_as_peft(llm, family, names)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("norms", STAGES),
        ("dora", STAGES),
        ("llama-one-layer", SHARES_OF_STAGES),
        ("bert-lora-bias", SHARES_OF_STAGES),
    ],
)
def test_an_adapter_is_merged_into_the_layers_of_each_stage(name: str, sizes: dict[str, int]) -> None:
    folder, lora, model = trained(name)
    with loaded(Path(folder), lora=lora, **sizes) as llm:
        for ids in TEXTS:
            [output] = llm.token_embed({"prompt_token_ids": ids}, PoolingParams(normalize=False), use_tqdm=False)
            assert_is(output.outputs.data, states(model, ids))


def test_what_fits_no_layer_of_any_stage_is_the_callers_error() -> None:
    folder = Path(shutil.copytree(trained("llama-one-layer")[1], new_folder("adapter"), dirs_exist_ok=True))
    file = folder / "adapter_model.safetensors"
    tensors = {name: tensor[:, :-1] if "lora_A" in name else tensor for name, tensor in load_file(file).items()}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file, metadata={"format": "pt"})
    with loaded(base("llama"), pipeline_parallel_size=2, enable_lora=True) as llm:
        with pytest.raises(WeightsError, match=r"layers\.1\.self_attn\.v_proj.* has shape"):
            llm.embed("cat", lora_request=LoRARequest("bad", 1, str(folder)), use_tqdm=False)
        folder, _ = adapter(base("llama"), cls=AutoModelForCausalLM, target_modules=["lm_head"])
        with pytest.raises(WeightsError, match="changes nothing that this model runs"):
            llm.embed("cat", lora_request=LoRARequest("idle", 1, str(folder)), use_tqdm=False)
        assert_mixed_is_as_peft(llm, "llama", ("llama", "llama-one-layer"))


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_stages_before_an_adapters_own_head_let_it_through(family: str) -> None:
    folder, model = with_head(family, 0)
    with loaded(classifier(family), pipeline_parallel_size=2, enable_lora=True) as llm:
        assert_scores(llm, [(LoRARequest("own-head", 1, str(folder)), model)])
