"""Keys, values and hidden states of tokens that later forward passes attend to and pool."""

from __future__ import annotations

import torch


class KVStore:
    """Rows of cached tokens, in blocks. Slot `block * block_size + i` is the i-th token of a block.

    A layer is the i-th call of attention in a forward pass, so nothing about a model's layers is known beforehand.
    Tensors are allocated at their first write with the sizes and dtype of what is written, and are not filled: on a
    CPU a page that was never touched costs no memory.

    Args:
        num_blocks: Blocks of the store.
        block_size: Tokens per block.
        device: Where the tensors are.
    """

    def __init__(self, num_blocks: int, block_size: int, device: torch.device) -> None:
        assert num_blocks > 0 and block_size > 0
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.device = device
        self._layers: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._hidden: torch.Tensor | None = None
        self._complete = False

    @property
    def num_layers(self) -> int:
        """Layers that were written so far."""
        return len(self._layers)

    @property
    def is_complete(self) -> bool:
        """Whether a forward pass has ended, after which there are no further layers."""
        return self._complete

    def complete(self) -> None:
        """Says that a whole forward pass was written."""
        self._complete = True

    @torch.no_grad()
    def write(self, layer: int, slots_S: torch.Tensor, k_SGK: torch.Tensor, v_SGV: torch.Tensor) -> None:
        """Stores keys and values.

        Args:
            layer: At most one more than were written before.
            slots_S: `[S]` int64, no slot twice.
            k_SGK: `[S, G, K]` keys.
            v_SGV: `[S, G, V]` values.
        """
        if layer == len(self._layers):
            assert not self._complete, f"a forward pass has {layer} calls of attention, and one more was made"
            self._layers.append((self._allocate(k_SGK), self._allocate(v_SGV)))
        keys, values = self._layers[layer]
        keys.index_copy_(0, slots_S, k_SGK)
        values.index_copy_(0, slots_S, v_SGV)

    def slots(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """`[S, G, K]` keys and `[S, G, V]` values of all slots of a layer that was written."""
        return self._layers[layer]

    @torch.no_grad()
    def read_blocks(self, layer: int, blocks_B: torch.Tensor, k_SGK: torch.Tensor, v_SGV: torch.Tensor) -> None:
        """Copies whole blocks into contiguous `[B * block_size, G, ...]` tensors of the caller's.

        Args:
            layer: One that was written.
            blocks_B: `[B]` int64 blocks, in the order wanted.
            k_SGK: Where the keys go.
            v_SGV: Where the values go.
        """
        for stored, out in zip(self._layers[layer], (k_SGK, v_SGV), strict=True):
            stored_BX = stored.view(self.num_blocks, -1)
            torch.index_select(stored_BX, 0, blocks_B, out=out.view(len(blocks_B), stored_BX.shape[1]))

    @torch.no_grad()
    def write_hidden(self, slots_S: torch.Tensor, rows_SD: torch.Tensor) -> None:
        """Stores final hidden states `[S, D]`."""
        if self._hidden is None:
            self._hidden = self._allocate(rows_SD)
        self._hidden.index_copy_(0, slots_S, rows_SD)

    @torch.no_grad()
    def read_hidden(self, slots_S: torch.Tensor) -> torch.Tensor:
        """`[S, D]` final hidden states of slots that were written."""
        assert self._hidden is not None, "no hidden states were written"
        return self._hidden.index_select(0, slots_S)

    def _allocate(self, rows: torch.Tensor) -> torch.Tensor:
        # An inference tensor could never be written again outside of inference mode.
        with torch.inference_mode(False):
            return torch.empty(self.num_blocks * self.block_size, *rows.shape[1:], dtype=rows.dtype, device=self.device)
