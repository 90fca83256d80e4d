"""LoRA adapters request by request through replicas: the numbers of peft, whichever replica runs a request."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from anypool import LLM, LoRARequest
from anypool.engine.known_adapters import KnownAdapter
from anypool.engine.replicas import Replicas
from anypool.engine.replicas.adapters import ReplicaAdapters
from anypool.entrypoints.serve.app import create_app
from anypool.entrypoints.server_options import ServerOptions
from anypool.errors import (
    ConfigError,
    EngineError,
    InvalidParameterError,
    InvalidRequestError,
    ModelNotFoundError,
    WeightsError,
)
from anypool.pooling.tasks import PoolingTask
from tests.adapters.lora_checkpoints import TEXTS, adapter, base, request, states
from tests.entrypoints.conftest import Client
from tests.helpers import loaded
from tests.replicas.test_replicas import wait_for

TARGETS = ["q_proj", "v_proj", "gate_proj", "embed_tokens"]


@pytest.fixture(scope="module")
def made() -> dict[LoRARequest | None, Any]:
    """The base and three adapters: peft's model of each."""
    cls = AutoModelForCausalLM
    found: dict[LoRARequest | None, Any] = {None: cls.from_pretrained(base("llama")).eval()}
    for n in range(1, 4):
        folder, trained = adapter(base("llama"), cls=cls, seed=n, target_modules=TARGETS[n % 2 :], r=1 + n)
        found[request(folder, n)] = trained
    return found


@pytest.fixture(scope="module")
def llm(made: dict[LoRARequest | None, Any]) -> Iterator[LLM]:
    """Two replicas with fewer slots than there are adapters, batches of a few texts, and cached prefixes."""
    settings = {"max_num_batched_tokens": 40, "enable_prefix_caching": True, "max_model_len": 40}
    _, first, *_ = made
    assert first is not None
    modules = {first.lora_name: first.lora_path}
    with loaded(
        base("llama"), data_parallel_size=2, enable_lora=True, max_loras=2, lora_modules=modules, **settings
    ) as llm:
        yield llm


def replicas_of(llm: LLM) -> Replicas:
    assert isinstance(llm.engine, Replicas)
    return llm.engine


def assert_mixed_is_as_peft(llm: LLM, made: dict[LoRARequest | None, Any], rounds: int = 4) -> None:
    cases = [(text, one) for text in TEXTS for one in made] * rounds
    outputs = llm.token_embed(
        [text for text, _ in cases], lora_request=[one for _, one in cases], truncate_prompt_tokens=-1, use_tqdm=False
    )
    for (_, one), output in zip(cases, outputs, strict=True):
        expected = F.normalize(states(made[one], output.prompt_token_ids), dim=-1)
        torch.testing.assert_close(output.outputs.data, expected, atol=1e-5, rtol=0)


def test_the_base_and_three_adapters_in_one_call_are_as_peft(llm: LLM, made: dict[LoRARequest | None, Any]) -> None:
    assert_mixed_is_as_peft(llm, made)
    assert llm.engine.metrics.adapter_loads >= 3


def test_an_adapter_of_lora_modules_goes_by_its_name(llm: LLM, made: dict[LoRARequest | None, Any]) -> None:
    _, first, *_ = made
    [output] = llm.token_embed(TEXTS[0], lora_request="adapter-1", truncate_prompt_tokens=-1, use_tqdm=False)
    expected = F.normalize(states(made[first], output.prompt_token_ids), dim=-1)
    torch.testing.assert_close(output.outputs.data, expected, atol=1e-5, rtol=0)
    with pytest.raises(InvalidParameterError, match="lora_request='other' is neither"):
        llm.embed("cat", lora_request="other", use_tqdm=False)


def test_an_adapter_that_does_not_fit_is_its_callers_error(llm: LLM, made: dict[LoRARequest | None, Any]) -> None:
    folder, _ = adapter(base("bert"), target_modules=["query"])
    with pytest.raises(WeightsError, match="has no place in the model"):
        llm.embed("cat", lora_request=request(folder, 9), use_tqdm=False)
    with pytest.raises(ModelNotFoundError, match="/nowhere"):
        llm.embed("cat", lora_request=LoRARequest("a", 9, "/nowhere"), use_tqdm=False)
    assert_mixed_is_as_peft(llm, made, rounds=1)


def test_an_adapter_whose_files_change_is_read_again(llm: LLM) -> None:
    folder, _ = adapter(base("llama"), cls=AutoModelForCausalLM, seed=7, target_modules=["q_proj"])

    def vectors() -> torch.Tensor:
        outputs = llm.embed(TEXTS * 4, lora_request=request(folder, 10), use_tqdm=False)
        return torch.stack([output.outputs.data for output in outputs])

    before = vectors()
    torch.testing.assert_close(vectors(), before, atol=1e-5, rtol=0)
    file = folder / "adapter_model.safetensors"
    tensors = {name: 2 * tensor for name, tensor in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    os.utime(file, ns=(1, 1))
    assert (vectors() - before).abs().amax(dim=1).min() > 1e-3
    shutil.rmtree(folder)
    with pytest.raises(ModelNotFoundError):
        vectors()


def test_a_server_of_replicas_loads_and_unloads_adapters(
    llm: LLM, made: dict[LoRARequest | None, Any], tmp_path: Path
) -> None:
    *_, third = made
    assert third is not None
    shutil.copytree(third.lora_path, tmp_path / "mine")
    shutil.copytree(adapter(base("bert"), target_modules=["query"])[0], tmp_path / "bert")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "adapter_config.json").symlink_to("/proc/self/mem")  # whose first page is not there
    client = Client(create_app(llm.engine, ServerOptions(lora_dir=(str(tmp_path),))))
    for name, path, status, said in (
        ("mine", "mine", 200, '"id":"mine"'),
        ("other", "bert", 400, "has no place in the model"),
        ("other", "broken", 400, "the adapter cannot be read: Input/output error"),
    ):
        response = client.post("/v1/load_lora_adapter", lora_name=name, lora_path=path)
        assert response.status_code == status, response.text
        assert said in response.text
    ids = llm.engine.prepare(["the cat sat"], PoolingTask.EMBED)[0].token_ids
    for row in client.embed(input=["the cat sat"] * 8, model="mine").json()["data"]:
        expected = F.normalize(states(made[third], ids)[-1], dim=-1)
        torch.testing.assert_close(torch.tensor(row["embedding"]), expected, atol=1e-5, rtol=0)
    assert client.post("/v1/unload_lora_adapter", lora_name="mine").status_code == 200
    assert [client.embed(input="a", model=name).status_code for name in ("mine", "other")] == [404, 404]


def test_a_replica_that_is_started_again_has_the_same_adapters(llm: LLM, made: dict[LoRARequest | None, Any]) -> None:
    engine = replicas_of(llm)
    os.kill(engine._replicas[0].pid, signal.SIGKILL)
    wait_for(lambda: engine.health().replicas < 2)
    wait_for(lambda: engine.health().replicas == 2)
    assert_mixed_is_as_peft(llm, made)


def test_a_replica_that_dies_while_it_reads_is_an_error(llm: LLM, made: dict[LoRARequest | None, Any]) -> None:
    engine = replicas_of(llm)
    wait_for(lambda: engine.health().replicas == 2)
    folder, _ = adapter(base("llama"), cls=AutoModelForCausalLM, seed=8, target_modules=["q_proj"])
    replica = engine._replicas[0]
    os.kill(replica.pid, signal.SIGSTOP)
    with engine._changed:
        asked = replica.ask(KnownAdapter(request(folder, 11), 1000, ()))
    os.kill(replica.pid, signal.SIGKILL)
    with pytest.raises(EngineError, match="was killed by SIGKILL while it was to read an adapter: try again"):
        asked.result(60)
    wait_for(lambda: engine.health().replicas == 2)


def test_settings_of_adapters_that_cannot_be_read_end_the_start() -> None:
    with pytest.raises(ModelNotFoundError, match="/nowhere"):
        loaded(base("llama"), data_parallel_size=2, enable_lora=True, lora_modules={"a": "/nowhere"}).__enter__()
    with pytest.raises(ConfigError, match="has no effect without enable_lora=True"):
        loaded(base("llama"), data_parallel_size=2, lora_modules={"a": "/nowhere"}).__enter__()


def test_a_replica_refuses_files_that_are_not_those_that_the_front_has_seen() -> None:
    folder, _ = adapter(base("llama"), cls=AutoModelForCausalLM, target_modules=["q_proj"])
    with loaded(base("llama"), enable_lora=True) as llm:
        adapters = ReplicaAdapters(llm.engine.lora)
        with pytest.raises(InvalidRequestError, match=r"were changed while a request waited for it: send it again"):
            adapters.read(KnownAdapter(request(folder), 5, ()))
        assert llm.engine.lora is not None
        assert llm.engine.lora.requests == ()


def test_a_replica_forgets_the_adapter_that_was_not_used_for_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anypool.engine.replicas.adapters._MOST", 2)
    folders = [adapter(base("llama"), cls=AutoModelForCausalLM, seed=n, target_modules=["q_proj"])[0] for n in range(3)]
    with loaded(base("llama"), enable_lora=True) as llm:
        manager = llm.engine.lora
        assert manager is not None
        first, second, third = [manager.add(request(folder, n)) for n, folder in enumerate(folders, start=1)]
        for known in (first, second, third):
            manager.remove(known.request.lora_int_id)
        adapters = ReplicaAdapters(manager)
        own = adapters.read(first)
        adapters.read(second)
        assert adapters.read(first) is own
        adapters.read(third)
        assert adapters.read(first) is own
        assert [one.lora_name for one in manager.requests] == ["adapter-1", "adapter-3"]
