"""Linear layers: what a product is made of is theirs, how it is computed is exchangeable."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from anypool.kernels.dispatch import uses_triton
from anypool.kernels.gated import gated
from anypool.model_executor.layers.activation import Activation
from anypool.model_executor.layers.products import MakeProduct, Product

if TYPE_CHECKING:
    from anypool.model_executor.layers.lora import LinearLoRA


class Linear(nn.Module):
    """y = x W^T + b, and what follows it: an activation, or another tensor that is added.

    A fused layer stacks several checkpoint tensors along the output: `parts` maps each part's name in the checkpoint
    to its output size, in order, so that loading, LoRA and splitting agree on them. The part stands beside the layer:
    a layer `self_attn.qkv_proj` with the part `q_proj` reads `self_attn.q_proj.weight`.

    It is computed by `F.linear` until `pack` puts another way in place.

    Args:
        in_features: Size of the input.
        out_features: Size of the output, or the parts.
        bias: Whether there is a bias.

    Attributes:
        products: The ways that `pack` has put in place.
        lora: What low-rank adapters add to W x + b; None where none has anything for this layer.
    """

    # How many products the weight is cut into when it is packed.
    pieces = 1
    # Whether the checkpoint has the weight the other way round, as GPT-2's do.
    is_stored_turned = False
    lora: LinearLoRA | None = None

    def __init__(self, in_features: int, out_features: int | Mapping[str, int], *, bias: bool = False) -> None:
        super().__init__()
        self.parts: dict[str, int] = dict(out_features) if isinstance(out_features, Mapping) else {}
        self.in_features = in_features
        self.out_features = sum(self.parts.values()) if isinstance(out_features, Mapping) else out_features
        self.weight = nn.Parameter(torch.empty(self.out_features, in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(self.out_features), requires_grad=False) if bias else None
        self.products: tuple[Product, ...] = ()

    def forward(
        self, x: torch.Tensor, *, act: Activation | None = None, add: torch.Tensor | None = None
    ) -> torch.Tensor:
        """act(x W^T + b), or x W^T + b + add."""
        assert act is None or add is None
        if self.lora is not None and self.lora.is_active:
            y = self.lora.add_to(self._product(x, add=add), x)
            return y if act is None else act(y)
        return self._product(x, act=act, add=add)

    def _product(
        self, x: torch.Tensor, *, act: Activation | None = None, add: torch.Tensor | None = None
    ) -> torch.Tensor:
        if self.products:
            return self.products[0](x, act=act, add=add)
        y = F.linear(x, self.weight, self.bias)
        if act is not None:
            return act(y)
        return y if add is None else y + add

    def pack(self, make: MakeProduct) -> None:
        """Hands the weight to another way of computing the product.

        What stays of `weight` has its shape, dtype and device, and one NaN that all its elements share: whoever
        computes with it by mistake cannot miss it.
        """
        biases = [None] * self.pieces if self.bias is None else self.bias.detach().chunk(self.pieces)
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
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}{parts}{ways}"


class GatedLinear(Linear):
    """act(x G^T) * (x U^T): the first and the second half of the weight's rows.

    Args:
        in_features: Size of the input.
        out_features: Size of both halves together, or the parts.
        act: On the first half.
        bias: Whether there is a bias.
    """

    # Two products that end with the activation and the factor beat one larger product and two passes over its result.
    pieces = 2

    def __init__(
        self, in_features: int, out_features: int | Mapping[str, int], *, act: Activation, bias: bool = False
    ) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self.act = act

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
