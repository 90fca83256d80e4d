"""The packed batch: every token of every sequence in one row, no padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
import torch.nn.functional as F

from anypool.kernels.segmented_lora import BASE
from anypool.model_executor.attention import AttentionMetadata, PrefixKeys
from anypool.model_executor.images import ImageInputs
from anypool.model_executor.transfers import to_device
from anypool.pooling.methods import Segments


@dataclass(frozen=True)
class PackedBatch:
    """One forward pass's input, complete when constructed.

    Attributes:
        input_ids_T: `[T]` int64 token ids.
        positions_T: `[T]` int64, counted from 0 in each sequence's whole prompt.
        attn: The sequences, for attention.
        segments: The prompts, for pooling: with their cached prefixes where hidden states are kept.
        token_type_ids_T: `[T]` int64 segment ids of text pairs, or None where all are 0.
        keeps_hidden: Whether hidden states go to and come from the store beside the keys.
        images: Those of each sequence, on the host; empty where no sequence has any.
        adapters: The slot of each sequence's LoRA adapter, `BASE` for none; empty where no sequence has one.
    """

    input_ids_T: torch.Tensor
    positions_T: torch.Tensor
    attn: AttentionMetadata
    segments: Segments
    token_type_ids_T: torch.Tensor | None = None
    keeps_hidden: bool = False
    images: tuple[ImageInputs | None, ...] = ()
    adapters: tuple[int, ...] = ()

    @classmethod
    def pack(
        cls,
        sequences: Sequence[Sequence[int]],
        *,
        device: torch.device,
        skips: Sequence[int] | None = None,
        token_types: Sequence[Sequence[int] | None] | None = None,
        pad_token_id: int | None = None,
        starts: Sequence[int] | None = None,
        prompt_lengths: Sequence[int] | None = None,
        prefix: PrefixKeys | None = None,
        images: Sequence[ImageInputs | None] = (),
        key_lengths: Sequence[int] | None = None,
        adapters: Sequence[int] = (),
    ) -> PackedBatch:
        """Packs token ids: those of whole prompts, or the part of each that this pass computes.

        Args:
            sequences: Token ids per sequence, each at least one.
            device: Where the model runs.
            skips: Leading tokens of each sequence that are not pooled.
            token_types: Segment ids per sequence; None for a sequence of zeros.
            pad_token_id: The id that sequence classification passes over at the end of a text.
            starts: Tokens of each prompt before its sequence; zeros where not given.
            prompt_lengths: Tokens of each whole prompt; where not given, those up to the end of its sequence.
            prefix: The cached keys of the tokens before, of which there are `starts`.
            images: Those of each sequence.
            key_lengths: Leading tokens of each sequence that are attended to; all where not given.
            adapters: The slot of each sequence's LoRA adapter.
        """
        assert sequences and all(sequences), "a batch holds at least one sequence, each with at least one token"
        lengths = tuple(len(ids) for ids in sequences)
        skipped = tuple(skips) if skips is not None else (0,) * len(lengths)
        before = tuple(starts) if starts is not None else (0,) * len(lengths)
        assert before == (prefix.lengths if prefix is not None else (0,) * len(lengths)), "starts without their keys"
        ends = tuple(start + length for start, length in zip(before, lengths, strict=True))
        prompts = tuple(prompt_lengths) if prompt_lengths is not None else ends
        assert all(end <= prompt for end, prompt in zip(ends, prompts, strict=True)), "a prompt is too short"
        parts = [
            torch.tensor([i for ids in sequences for i in ids], dtype=torch.int64),
            positions(lengths, before),
            torch.tensor([0, *accumulate(lengths)], dtype=torch.int32),
        ]
        if any(skipped):
            parts.append(torch.tensor(skipped, dtype=torch.int32))
        if token_types is not None and any(types is not None for types in token_types):
            types = [t for own, n in zip(token_types, lengths, strict=True) for t in (own or (0,) * n)]
            parts.append(torch.tensor(types, dtype=torch.int64))
        keys = None if key_lengths is None else tuple(key_lengths)
        if keys is not None:
            assert all(0 < own <= length for own, length in zip(keys, lengths, strict=True))
            parts.append(torch.tensor(keys, dtype=torch.int32))
        input_ids_T, positions_T, cu_seqlens, *others = to_device(parts, device)
        keys_N = None if keys is None else others.pop()
        skips_N = others.pop(0) if any(skipped) else None
        return cls(
            input_ids_T=input_ids_T,
            positions_T=positions_T,
            attn=AttentionMetadata(lengths, cu_seqlens, prompts, prefix, keys, keys_N),
            segments=Segments(lengths, skipped, device, input_ids_T, pad_token_id, cu_seqlens, skips_N),
            token_type_ids_T=others[0] if others else None,
            images=tuple(images) if any(one is not None for one in images) else (),
            adapters=tuple(adapters) if any(one != BASE for one in adapters) else (),
        )

    def to(self, device: torch.device) -> PackedBatch:
        """The batch on a device, moved in one copy; itself where it is there. Keys of a prefix are there already."""
        if self.input_ids_T.device == device:
            return self
        segments = self.segments
        parts = [
            self.input_ids_T,
            self.positions_T,
            self.attn.cu_seqlens,
            *(x for x in (segments.skips_N, self.token_type_ids_T, self.attn.key_lengths_N) if x is not None),
        ]
        own_ids = segments.input_ids_T is not None and segments.input_ids_T is not self.input_ids_T
        if own_ids:
            assert segments.input_ids_T is not None
            parts.append(segments.input_ids_T)
        ids_T, positions_T, cu_seqlens, *others = to_device(parts, device)
        skips_N = None if segments.skips_N is None else others.pop(0)
        types_T = None if self.token_type_ids_T is None else others.pop(0)
        keys_N = None if self.attn.key_lengths_N is None else others.pop(0)
        return replace(
            self,
            input_ids_T=ids_T,
            positions_T=positions_T,
            attn=replace(self.attn, cu_seqlens=cu_seqlens, key_lengths_N=keys_N),
            segments=replace(
                segments,
                device=device,
                input_ids_T=others.pop(0) if own_ids else ids_T,
                bounds_N1=None if own_ids else cu_seqlens,
                skipped_N=skips_N,
            ),
            token_type_ids_T=types_T,
        )

    def filled(self) -> PackedBatch:
        """The same sequences, and as many of one token behind them as make the number of rows a common one.

        oneDNN compiles code for every shape that it meets, which takes longer than a short batch does; a few shapes
        stay compiled. `segments` knows nothing of the sequences that fill, whose hidden states stand last.
        """
        rows = self.input_ids_T.shape[0]
        fill = common_rows(rows) - rows
        if fill == 0:
            return self
        types_T = self.token_type_ids_T
        return replace(
            self,
            input_ids_T=F.pad(self.input_ids_T, (0, fill)),
            positions_T=F.pad(self.positions_T, (0, fill)),
            attn=self.attn.extended(fill),
            token_type_ids_T=None if types_T is None else F.pad(types_T, (0, fill)),
        )


def positions(lengths: Sequence[int], starts: Sequence[int]) -> torch.Tensor:
    """`[T]` int64 position of each token in its prompt, of which `starts` tokens come before the sequence."""
    lengths_N = torch.tensor(lengths, dtype=torch.int64)
    offsets_N = torch.tensor(starts, dtype=torch.int64) - (lengths_N.cumsum(0) - lengths_N)
    total = sum(lengths)
    return torch.arange(total) + offsets_N.repeat_interleave(lengths_N, output_size=total)


def common_rows(rows: int) -> int:
    """The next multiple of a sixteenth of the number's power of two, which may be 8 to 64."""
    step = min(64, max(8, 1 << (rows.bit_length() - 5) if rows >= 16 else 8))
    return -(-rows // step) * step
