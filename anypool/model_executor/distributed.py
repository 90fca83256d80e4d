"""Where this process stands among those that run one model together.

Tensor parallelism splits every layer over `tp_size` processes, pipeline parallelism the layers over `pp_size` stages of
such processes. Rank r is tensor-parallel rank r % tp_size of stage r // tp_size. A process has one set of ranks, as
torch.distributed has one default group; alone, it is rank 0 of 1 by 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from anypool.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """A process among its peers.

    Attributes:
        tp_rank, tp_size: Its share of each layer, and how many there are.
        pp_rank, pp_size: Its stage, and how many there are.
        tp_group: The processes of its stage; None where it is the only one.
        pp_group: The processes with its share, one per stage; None where there is one stage.
    """

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    tp_group: dist.ProcessGroup | None = None
    pp_group: dist.ProcessGroup | None = None

    @property
    def rank(self) -> int:
        return self.pp_rank * self.tp_size + self.tp_rank

    @property
    def size(self) -> int:
        return self.pp_size * self.tp_size

    @property
    def is_first_stage(self) -> bool:
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pp_size - 1


_ALONE = Ranks()
_ranks = _ALONE


def ranks() -> Ranks:
    """Where this process stands. A model that is built afterwards holds its share."""
    return _ranks


def start(
    rank: int,
    *,
    tp_size: int = 1,
    pp_size: int = 1,
    address: str,
    backend: str = "gloo",
    timeout_s: float = 600.0,
) -> Ranks:
    """Joins the other processes, and returns when all of them are there.

    Args:
        rank: Of this process, from 0 to tp_size * pp_size - 1.
        tp_size, pp_size: As all of them say.
        address: Where they meet: "tcp://host:port" of rank 0, or "file:///path" of a file that does not exist yet.
        backend: What torch.distributed talks through: "gloo" on CPUs, "nccl" on GPUs.
        timeout_s: Seconds after which a process that waits for another in a collective raises.

    Raises:
        ConfigError: The sizes are no sizes, the rank is none of them, or this process has started already.
    """
    global _ranks
    if min(tp_size, pp_size) < 1 or not 0 <= rank < tp_size * pp_size:
        raise ConfigError(
            f"rank={rank} is none of tp_size={tp_size} times pp_size={pp_size}: ranks are 0 to tp_size * pp_size - 1"
        )
    if _ranks is not _ALONE:
        raise ConfigError(f"this process is rank {_ranks.rank} of {_ranks.size} already: stop() first")
    dist.init_process_group(
        backend,
        init_method=address,
        rank=rank,
        world_size=tp_size * pp_size,
        timeout=timedelta(seconds=timeout_s),
    )
    stages = [list(range(first, first + tp_size)) for first in range(0, tp_size * pp_size, tp_size)]
    shares = [list(range(first, tp_size * pp_size, tp_size)) for first in range(tp_size)]
    _ranks = Ranks(
        tp_rank=rank % tp_size,
        tp_size=tp_size,
        pp_rank=rank // tp_size,
        pp_size=pp_size,
        tp_group=_own_group(stages, rank) if tp_size > 1 else None,
        pp_group=_own_group(shares, rank) if pp_size > 1 else None,
    )
    return _ranks


def stop() -> None:
    """Leaves the other processes; nothing happens where there are none."""
    global _ranks
    if _ranks is not _ALONE:
        _ranks = _ALONE
        dist.destroy_process_group()


def _own_group(groups: list[list[int]], rank: int) -> dist.ProcessGroup:
    """Makes all groups, as every process has to, and returns the one of `rank`."""
    made: list[dist.ProcessGroup] = [dist.new_group(group) for group in groups]
    return next(one for one, group in zip(made, groups, strict=True) if rank in group)


def sum_over_ranks(x: torch.Tensor) -> torch.Tensor:
    """The sum of what the processes of a stage give, in place and equal to the bit on all of them."""
    group = _ranks.tp_group
    if group is not None:
        dist.all_reduce(x, group=group)
    return x
