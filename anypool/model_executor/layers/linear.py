"""Linear layers: what a product is made of is theirs, how it is computed and how it is split is exchangeable."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from torch import nn

from anypool.kernels.dispatch import uses_triton
from anypool.kernels.gated import gated
from anypool.model_executor.distributed import ranks, sum_over_ranks
from anypool.model_executor.layers.activation import Activation
from anypool.model_executor.layers.products import MakeProduct, Product
from anypool.model_executor.layers.split import Share, Split, all_of, even_share

if TYPE_CHECKING:
    from anypool.model_executor.layers.lora import LinearLoRA


class Linear(nn.Module):
    """y = x W^T + b, and what follows it: an activation, or another tensor that is added.

    A fused layer stacks several checkpoint tensors along the output: `parts` maps each part's name in the checkpoint
    to its output size, in order, so that loading, LoRA and splitting agree on them. The part stands beside the layer:
    a layer `self_attn.qkv_proj` with the part `q_proj` reads `self_attn.q_proj.weight`.

    It is computed by `F.linear` until `pack` puts another way in place.

    Where several processes hold the model, each has some rows of the weight ("column") or some columns ("row") of a
    layer that is split. Split by rows, it is given a part of the input and sums the products of all processes, before
    bias, activation and what is added. `in_features` and `out_features` are then what this process multiplies, while
    `in_size`, `out_size` and `parts` are the checkpoint's.

    Args:
        in_features: Size of the input.
        out_features: Size of the output, or the parts.
        bias: Whether there is a bias.
        split: How it is split; None for a layer that every process holds.
        rows: Of a layer split by columns, the rows of each part that this process has, or of the whole under "" where
            there are no parts; by default an equal share.

    Attributes:
        products: The ways that `pack` has put in place.
        lora: What low-rank adapters add to W x + b; None where none has anything for this layer.
    """

    # How many products the weight is cut into when it is packed.
    pieces = 1
    # Whether the checkpoint has the weight the other way round, as GPT-2's do.
    is_stored_turned = False
    lora: LinearLoRA | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int | Mapping[str, int],
        *,
        bias: bool = False,
        split: Split | None = None,
        rows: Mapping[str, Share] | None = None,
    ) -> None:
        super().__init__()
        self.parts: dict[str, int] = dict(out_features) if isinstance(out_features, Mapping) else {}
        sizes = out_features if isinstance(out_features, Mapping) else {"": out_features}
        self.in_size, self.out_size = in_features, sum(sizes.values())
        self.split = split if ranks().tp_size > 1 else None
        self.columns = even_share(in_features)[0] if self.split == "row" else range(in_features)
        self.rows = {part: all_of(size) for part, size in sizes.items()}
        if self.split == "column":
            self.rows = dict(rows) if rows else {part: self._equal_share(size) for part, size in sizes.items()}
        self.in_features = len(self.columns)
        self.out_features = sum(len(part) for share in self.rows.values() for part in share)
        self.weight = nn.Parameter(torch.empty(self.out_features, self.in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(self.out_features), requires_grad=False) if bias else None
        self.products: tuple[Product, ...] = ()

    def _equal_share(self, size: int) -> Share:
        return even_share(size)

    def forward(
        self, x: torch.Tensor, *, act: Activation | None = None, add: torch.Tensor | None = None
    ) -> torch.Tensor:
        """act(x W^T + b), or x W^T + b + add."""
        assert act is None or add is None
        lora = self.lora if self.lora is not None and self.lora.is_active else None
        if self.split == "row":
            y = self._product(x)
            y = sum_over_ranks(y if lora is None else lora.add_to(y, x))
            if self.bias is not None:
                y += self.bias
            return _followed(y, act, add)
        if lora is None:
            return self._product(x, act=act, add=add)
        return _followed(lora.add_to(self._product(x, add=add), x), act, None)

    def _product(
        self, x: torch.Tensor, *, act: Activation | None = None, add: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Of a layer split by rows, what this process adds to the sum."""
        if self.products:
            return self.products[0](x, act=act, add=add)
        return _followed(F.linear(x, self.weight, None if self.split == "row" else self.bias), act, add)

    def pack(self, make: MakeProduct) -> None:
        """Hands the weight to another way of computing the product.

        What stays of `weight` has its shape, dtype and device, and one NaN that all its elements share: whoever
        computes with it by mistake cannot miss it.
        """
        bias = None if self.split == "row" else self.bias  # which adds it to the sum
        biases = [None] * self.pieces if bias is None else bias.detach().chunk(self.pieces)
        self.products = tuple(map(make, self.weight.detach().chunk(self.pieces), biases))
        nothing = self.weight.new_full((1, 1), float("nan")).expand_as(self.weight)
        self.weight = nn.Parameter(nothing, requires_grad=False)

    def unpack(self) -> None:
        """Undoes `pack`; what was rounded stays rounded."""
        plain = torch.cat([product.plain_weight() for product in self.products])
        self.weight = nn.Parameter(plain, requires_grad=False)
        self.products = ()

    def extra_repr(self) -> str:
        parts = f", parts={self.parts}" if self.parts else ""
        ways = f", {type(self.products[0]).__name__}" if self.products else ""
        split = f", split={self.split}" if self.split else ""
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}{parts}{split}{ways}"


def _followed(y: torch.Tensor, act: Activation | None, add: torch.Tensor | None) -> torch.Tensor:
    if act is not None:
        return act(y)
    return y if add is None else y + add


class GatedLinear(Linear):
    """act(x G^T) * (x U^T): the first and the second half of the weight's rows.

    Args:
        in_features: Size of the input.
        out_features: Size of both halves together, or the parts.
        act: On the first half.
        bias: Whether there is a bias.
        split: "column" for a part of each half, or None.
    """

    # Two products that end with the activation and the factor beat one larger product and two passes over its result.
    pieces = 2

    def __init__(
        self,
        in_features: int,
        out_features: int | Mapping[str, int],
        *,
        act: Activation,
        bias: bool = False,
        split: Literal["column"] | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias=bias, split=split)
        self.act = act

    def _equal_share(self, size: int) -> Share:
        return even_share(size, blocks=1 if self.parts else self.pieces)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        lora = self.lora if self.lora is not None and self.lora.is_active else None
        if self.products:
            gate, up = self.products
            if lora is None:
                return gate.gated(x, up, self.act)
            half = self.out_features // 2
            return self.act(lora.add_to(gate(x), x)) * lora.add_to(up(x), x, start=half)
        both = F.linear(x, self.weight, self.bias)
        if lora is not None:
            lora.add_to(both, x)
        if both.dim() == 2 and self.act.kernel is not None and uses_triton(both):
            return gated(both, self.act.kernel)
        gated_TF, y = both.chunk(2, dim=-1)
        return self.act(gated_TF) * y
