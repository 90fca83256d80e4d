"""What two stages send each other."""

from __future__ import annotations

import torch

from anypool.model_executor.distributed import ranks
from anypool.model_executor.faults import PeerFailedError
from anypool.model_executor.stages import StageLink


def exchange() -> list[object]:
    """Of four passes the second fails on the first stage, and the third on the last before it takes what was sent."""
    link = StageLink(ranks(), torch.device("cpu"))
    seen: list[object] = []
    for number in range(4):
        link.begin()
        if link.is_first:
            if number == 1:
                link.give_up()
            else:
                link.send(torch.full((2, 3), number, dtype=torch.bfloat16))
        elif number == 2:
            link.give_up()
        else:
            try:
                seen.append(link.receive())
            except PeerFailedError as error:
                seen.append(str(error))
                link.give_up()
    torch.distributed.barrier()  # whoever leaves takes along what is on its way
    return seen
