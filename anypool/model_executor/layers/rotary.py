"""Rotary position embeddings (Su et al., arXiv:2104.09864) and the ways in which they are stretched."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from anypool.kernels.rotary import apply_rotary
from anypool.model_executor.attention import AttentionMetadata

__all__ = ["RopeConfig", "Rotary", "apply_rotary", "frequency_length"]

Frequencies = tuple[torch.Tensor, float]


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """One kind of rotary embedding, as config.json describes it.

    Attributes:
        rope_type: default, linear, dynamic, llama3, yarn or longrope.
        theta: The base of the frequencies.
        size: How many of a head's dimensions are rotated.
        max_positions: The model's `max_position_embeddings`.
        original_max_positions: The length it was trained at before stretching.
        factor: How far it is stretched; None where it follows from the two lengths.
        attention_factor: Factor on sine and cosine; None where the type computes it.
    """

    rope_type: str = "default"
    theta: float = 10_000.0
    size: int
    max_positions: int
    original_max_positions: int
    factor: float | None = None
    attention_factor: float | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    @property
    def depends_on_length(self) -> bool:
        """Whether a prompt's length decides its frequencies."""
        return self.rope_type in ("dynamic", "longrope")

    @property
    def stretch(self) -> float:
        return self.factor if self.factor is not None else self.max_positions / self.original_max_positions


class Rotary:
    """Turns positions into cosines and sines.

    The dynamic and longrope types depend on a prompt's own length, so positions of a packed batch look their
    frequencies up by sequence: a text's vector must not depend on what it is batched with.
    """

    def __init__(self, config: RopeConfig) -> None:
        self.config = config
        self._tables: dict[tuple[int, torch.device], Frequencies] = {}

    def __call__(
        self, positions_T: torch.Tensor, attn: AttentionMetadata, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine of each position.

        Args:
            positions_T: `[T]` positions, counted per prompt.
            attn: The sequences.
            dtype: Of the result.

        Returns:
            Two tensors `[T, 1, size]`.
        """
        kinds = [frequency_length(self.config, length) for length in attn.prompt_lengths]
        if len(set(kinds)) == 1:
            inv_freq, factor = self._frequencies(kinds[0], positions_T.device)
            angles_TK = positions_T.float()[:, None] * inv_freq
        else:
            per_sequence = [self._frequencies(kind, positions_T.device) for kind in kinds]
            factor = per_sequence[0][1]
            angles_TK = torch.cat(
                [
                    part.float()[:, None] * inv_freq
                    for part, (inv_freq, _) in zip(positions_T.split(attn.lengths), per_sequence, strict=True)
                ]
            )
        angles_T1K = torch.cat([angles_TK, angles_TK], dim=-1).unsqueeze(1)
        return (angles_T1K.cos() * factor).to(dtype), (angles_T1K.sin() * factor).to(dtype)

    def _frequencies(self, length: int, device: torch.device) -> Frequencies:
        key = (length, device)
        if key not in self._tables:
            inv_freq, factor = FREQUENCIES[self.config.rope_type](self.config, length)
            if len(self._tables) > 256:  # dynamic has a table per length: keep the newest
                self._tables.clear()
            self._tables[key] = (inv_freq.to(device), factor)
        return self._tables[key]


def frequency_length(config: RopeConfig, length: int) -> int:
    """The length that decides a sequence's frequencies; sequences with equal ones share a table."""
    if config.rope_type == "dynamic":
        return max(length, config.max_positions)
    if config.rope_type == "longrope":
        return config.original_max_positions + (1 if length > config.original_max_positions else 0)
    return 0


def default(config: RopeConfig, _length: int) -> Frequencies:
    return _inverse(config.theta, config.size), 1.0


def linear(config: RopeConfig, _length: int) -> Frequencies:
    """Positions divided by the factor."""
    return _inverse(config.theta, config.size) / config.stretch, 1.0


def dynamic(config: RopeConfig, length: int) -> Frequencies:
    """NTK-aware: the base grows with the length of the text."""
    size, factor = config.size, config.stretch
    grown = (factor * length / config.max_positions) - (factor - 1)
    return _inverse(config.theta * grown ** (size / (size - 2)), size), 1.0


def llama3(config: RopeConfig, _length: int) -> Frequencies:
    """Llama 3.1: long waves are stretched, short ones kept, those between interpolated."""
    inv_freq = _inverse(config.theta, config.size)
    turns = config.original_max_positions * inv_freq / (2 * math.pi)  # of each wave over the trained length
    smooth = (turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    smooth = smooth.clamp(0.0, 1.0)
    return (1 - smooth) * inv_freq / config.stretch + smooth * inv_freq, 1.0


def yarn(config: RopeConfig, _length: int) -> Frequencies:
    """YaRN (Peng et al., arXiv:2309.00071), with the mscale of DeepSeek where given."""
    size, factor = config.size, config.stretch

    def dimension_of(turns: float) -> float:
        return size * math.log(config.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(config.theta))

    low, high = dimension_of(config.beta_fast), dimension_of(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    ramp = (torch.arange(size // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    kept = 1 - ramp.clamp(0.0, 1.0)
    inv_freq = _inverse(config.theta, size)
    stretched = inv_freq / factor * (1 - kept) + inv_freq * kept
    return stretched, _yarn_attention_factor(config)


def longrope(config: RopeConfig, length: int) -> Frequencies:
    """LongRoPE (Ding et al., arXiv:2402.13753): one factor per dimension, one set for short texts and one for long."""
    factors = config.long_factor if length > config.original_max_positions else config.short_factor
    inv_freq = _inverse(config.theta, config.size) / torch.tensor(factors, dtype=torch.float32)
    if config.attention_factor is not None:
        return inv_freq, config.attention_factor
    if config.stretch <= 1.0:
        return inv_freq, 1.0
    return inv_freq, math.sqrt(1 + math.log(config.stretch) / math.log(config.original_max_positions))


def _yarn_attention_factor(config: RopeConfig) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if config.stretch <= 1 else 0.1 * weight * math.log(config.stretch) + 1.0

    if config.attention_factor is not None:
        return config.attention_factor
    if config.mscale and config.mscale_all_dim:
        return mscale(config.mscale) / mscale(config.mscale_all_dim)
    return mscale(1.0)


def _inverse(theta: float, size: int) -> torch.Tensor:
    return 1.0 / (theta ** (torch.arange(0, size, 2, dtype=torch.float32, device="cpu") / size))


FREQUENCIES: dict[str, Callable[[RopeConfig, int], Frequencies]] = {
    "default": default,
    "linear": linear,
    "dynamic": dynamic,
    "llama3": llama3,
    "yarn": yarn,
    "longrope": longrope,
}
