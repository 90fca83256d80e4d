"""Activation functions that checkpoints name by their torch class."""

from __future__ import annotations

from torch import nn

from anypool.errors import CheckpointFormatError

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
