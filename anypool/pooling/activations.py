"""Activation functions: of layers, which checkpoints name by their torch class, and of scores, which users name."""

from __future__ import annotations

from torch import nn

from anypool.errors import CheckpointFormatError
from anypool.kernels import score_head

ACTIVATIONS: dict[str, type[nn.Module]] = {
    name: getattr(nn, name)
    for name in (
        "Identity",
        "Tanh",
        "ReLU",
        "GELU",
        "SiLU",
        "Sigmoid",
        "LeakyReLU",
        "ELU",
        "SELU",
        "Softplus",
        "Mish",
        "Hardtanh",
        "ReLU6",
        "Softsign",
        "LogSigmoid",
    )
}


SCORE_ACTIVATIONS = score_head.ACTIVATIONS


def activation_from_path(path: str, *, where: str) -> nn.Module:
    """The activation of a dotted path such as `torch.nn.modules.activation.Tanh`.

    Args:
        path: Dotted path of a torch class; matched by its last component.
        where: The file that names it, for the message.

    Raises:
        CheckpointFormatError: It is not one of `ACTIVATIONS`.
    """
    name = path.rsplit(".", 1)[-1] if isinstance(path, str) and path.startswith("torch.") else ""
    if name not in ACTIVATIONS:
        raise CheckpointFormatError(
            f"{where}: activation {path!r} is not supported; known: {', '.join(f'torch.nn.{n}' for n in ACTIVATIONS)}"
        )
    return ACTIVATIONS[name]()


def score_activation_from_path(path: str, *, where: str) -> str:
    """The name in `SCORE_ACTIVATIONS` of a dotted path such as `torch.nn.modules.linear.Identity`."""
    name = path.rsplit(".", 1)[-1].lower() if isinstance(path, str) and path.startswith("torch.") else ""
    name = {"identity": "none"}.get(name, name)
    if name not in SCORE_ACTIVATIONS:
        raise CheckpointFormatError(
            f"{where}: activation {path!r} of scores is not supported; known: {', '.join(SCORE_ACTIVATIONS)}"
        )
    return name
