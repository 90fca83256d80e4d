"""Pipeline stages: which layers a process has, and how hidden states go from one stage to the next.

A stage keeps the whole model's structure, with a stand-in for each module that another stage has. So names of tensors
and the way through the model are what they are without stages.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from anypool.errors import ConfigError
from anypool.model_executor.distributed import Ranks
from anypool.model_executor.faults import PeerFailedError
from anypool.model_executor.model_config import ModelConfig
from anypool.model_executor.weights.loading import slots_of

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# A header: whether the stage before has failed, and rows, size and dtype of what follows it.
_HEADER, _STATES = 0, 1


@dataclass(frozen=True)
class Stages:
    """How a class may be cut into stages.

    Attributes:
        layers: Where its layers are.
        first: Modules before the layers.
        last: Modules after them.
    """

    layers: str
    first: tuple[str, ...]
    last: tuple[str, ...] = ()


class Elsewhere(nn.Module):
    """Stands for a module that another stage has: what comes in goes on.

    Args:
        module: That module, on the meta device: its layers and their shapes are known in every stage.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._module = (module,)  # no part of this one

    @property
    def module(self) -> nn.Module:
        """What it stands for."""
        return self._module[0]

    def forward(self, x_TD: torch.Tensor, *_: Any) -> torch.Tensor:
        return x_TD


def require_stages(model_cls: type[nn.Module], config: ModelConfig, size: int) -> None:
    """Refuses a number of stages that a model cannot have.

    Raises:
        ConfigError: The class does not say how it is cut, or there are fewer layers than stages.
    """
    if size == 1:
        return
    if getattr(model_cls, "stages", None) is None:
        raise ConfigError(
            f"pipeline_parallel_size={size}: {config.name} is run by {model_cls.__name__}, which cannot be cut into "
            "stages; the native decoders and encoders can be (docs/parallelism.md). Leave it at 1"
        )
    if size > config.num_layers:
        raise ConfigError(
            f"pipeline_parallel_size={size} is more than {config.name} has layers, which are {config.num_layers}"
        )


def own_layers(count: int, ranks: Ranks) -> range:
    """The layers of a process's stage, as even as they can be."""
    return range(count * ranks.pp_rank // ranks.pp_size, count * (ranks.pp_rank + 1) // ranks.pp_size)


def keep_stage(model: Any, ranks: Ranks, *, keep_first: bool = False) -> frozenset[str]:
    """Puts stand-ins for what other stages have into a model on the meta device.

    Args:
        model: The whole model, of a class that has `stages`.
        ranks: Where this process stands.
        keep_first: Whether every stage keeps what is before the layers.

    Returns:
        Checkpoint names that belong to other stages.
    """
    if ranks.pp_size == 1:
        return frozenset()
    stages: Stages = model.stages
    names = set(slots_of(model))
    layers = model.get_submodule(stages.layers)
    assert isinstance(layers, nn.ModuleList)
    own = own_layers(len(layers), ranks)
    for index in range(len(layers)):
        if index not in own:
            layers[index] = Elsewhere(layers[index])
    if not (ranks.is_first_stage or keep_first):
        _replace(model, stages.first)
    if not ranks.is_last_stage:
        _replace(model, stages.last)
    return frozenset(names - set(slots_of(model)))


def _replace(model: nn.Module, names: tuple[str, ...]) -> None:
    for name in names:
        parent, _, own = name.rpartition(".")
        module = getattr(model.get_submodule(parent), own)
        if module is not None:  # some have it only in some checkpoints
            setattr(model.get_submodule(parent), own, Elsewhere(module))


class StageLink:
    """Takes hidden states from the stage before, and sends them to the one behind.

    What is sent is on its way while the next batch is computed.

    Args:
        ranks: Where this process stands. Processes of the same share talk to each other.
        device: Where the hidden states are.
    """

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        self.is_first, self.is_last = ranks.is_first_stage, ranks.is_last_stage
        self._before, self._behind = ranks.rank - ranks.tp_size, ranks.rank + ranks.tp_size
        self._device = device
        self._sent: deque[tuple[Any, torch.Tensor]] = deque()
        self._is_owed = False

    def begin(self) -> None:
        """A forward pass begins."""
        self._is_owed = not self.is_first

    def receive(self) -> torch.Tensor:
        """`[T, D]` hidden states of the stage before.

        Raises:
            PeerFailedError: It has failed with this batch.
        """
        self._is_owed = False
        header = torch.empty(4, dtype=torch.int64)
        dist.recv(header, src=self._before, tag=_HEADER)
        failed, rows, size, dtype = header.tolist()
        if failed:
            raise PeerFailedError("the stage before has failed")
        x_TD = torch.empty(rows, size, dtype=_DTYPES[dtype], device=self._device)
        dist.recv(x_TD, src=self._before, tag=_STATES)
        return x_TD

    def send(self, x_TD: torch.Tensor) -> None:
        """Sends `[T, D]` hidden states on."""
        self._send(torch.tensor([0, *x_TD.shape, _DTYPES.index(x_TD.dtype)]), _HEADER)
        self._send(x_TD.contiguous(), _STATES)

    def give_up(self) -> None:
        """After an error: takes what the stage before sends all the same, and has the one behind give the batch up."""
        if self._is_owed:
            with suppress(PeerFailedError):
                self.receive()
        if not self.is_last:
            self._send(torch.tensor([1, 0, 0, 0]), _HEADER)

    def forget(self) -> None:
        """Lets go of what was sent, received or not, and with it of the connections."""
        self._sent.clear()

    def _send(self, tensor: torch.Tensor, tag: int) -> None:
        while self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()
        self._sent.append((dist.isend(tensor, dst=self._behind, tag=tag), tensor))
