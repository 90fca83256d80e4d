"""Prompts with images -> token ids, and what the model's vision tower is given, through transformers' processor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from threading import RLock
from typing import Any

import torch

from anypool.adapters.colpali_engine import PageProcessor, find_wording
from anypool.adapters.load import LoadedModel
from anypool.adapters.processors import load_processor
from anypool.engine.images import open_image
from anypool.engine.patch_grids import num_patches, patch_grids
from anypool.engine.prompts import ImagePrompt
from anypool.errors import InvalidPromptError, PromptTooLongError
from anypool.model_executor.images import ImageInputs

# What a processor returns beside ids and the tensors of images.
_NOT_FOR_THE_MODEL = ("input_ids", "attention_mask", "labels")
# Around the placeholder of an image that a text does not place itself.
_AROUND = {"<|image_pad|>": ("<|vision_start|>", "<|vision_end|>")}


class ImagePrompts:
    """Prompts with images for one loaded model.

    Args:
        loaded: The model.
        max_model_len: Longest prompt in tokens.
    """

    def __init__(self, loaded: LoadedModel, max_model_len: int) -> None:
        self._loaded, self._max_model_len = loaded, max_model_len
        self._name = loaded.config.name
        self._input = loaded.facts.image_input
        self._lock = RLock()  # transformers' tokenizers are set anew for every call, which two threads must not do

    @property
    def owns_texts(self) -> bool:
        """Whether texts without images go through the processor, too: it pads them, or puts a query's words around."""
        return self._input in ("tower", "page") and self._loaded.facts.processes_texts

    @cached_property
    def _processor(self) -> Any:
        loaded = self._loaded
        repository = loaded.repository.subfolder(loaded.recipe.backbone)
        if (wording := find_wording(loaded.config)) is not None:
            return PageProcessor(repository, loaded.config.architecture, wording)
        return load_processor(repository, trust_remote_code=loaded.config.trust_remote_code)

    def processor(self) -> Any:
        """transformers' processor, loaded when it is first needed."""
        with self._lock:
            return self._processor

    def texts(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of texts without images, for models that own their texts."""
        processor = self.processor()
        if self._input == "page":
            with self._lock:
                batch = processor.process_queries(text=list(texts), return_tensors="pt")
            masks = batch["attention_mask"].bool()
            return [row[mask].tolist() for row, mask in zip(batch["input_ids"], masks, strict=True)]
        recipe, length = self._loaded.recipe, self._loaded.config.max_positions
        if recipe.max_seq_length is not None:
            length = min(length, recipe.max_seq_length)
        if recipe.do_lower_case:
            texts = [text.lower() for text in texts]
        with self._lock:
            batch = processor.tokenizer(list(texts), padding="max_length", max_length=length)
        rows: list[list[int]] = batch["input_ids"]
        return rows

    @cached_property
    def around(self) -> tuple[list[int], list[int]] | None:
        """The tokens that the processor puts before and after a query; None where it puts none around texts."""
        if self._input != "page":
            return None
        first, second = self.texts(["0", "1"])
        [start] = [i for i, (a, b) in enumerate(zip(first, second, strict=True)) if a != b]
        return first[:start], first[start + 1 :]

    def encode(self, prompt: ImagePrompt, index: int, *, special_tokens: bool = True) -> tuple[list[int], ImageInputs]:
        """Token ids, an image token for each feature of an image, and the images.

        Args:
            prompt: The images and the text.
            index: Its place among the inputs, for messages.
            special_tokens: Whether the text gets the tokenizer's special tokens.

        Raises:
            InvalidPromptError: The model reads no images, or not this many, or they cannot be read.
            PromptTooLongError: There are more tokens than the model takes.
        """
        where = f"input {index}"
        if self._input is None:
            raise InvalidPromptError(f"{where} has an image, and {self._name} reads text alone")
        if self._input != "inline":
            self._refuse_more_than_one_image(prompt, where)
        count = len(prompt.images)
        images = [
            open_image(one, f"{where}: image {number}" if count > 1 else f"{where}: the image")
            for number, one in enumerate(prompt.images)
        ]
        encode = {"tower": self._tower, "page": self._page, "inline": self._inline}[self._input]
        try:
            ids, inputs = encode(images, prompt.text, where, special_tokens)
        except InvalidPromptError:
            raise
        except Exception as error:  # processors raise whatever they meet, such as an image of one row of pixels
            raise InvalidPromptError(f"{where}: its image cannot be processed: {error}") from error
        if self._input != "tower" and len(ids) > self._max_model_len:
            raise PromptTooLongError(
                f"{where} has {len(ids):,} tokens with its images, the limit is {self._max_model_len:,}: give fewer or "
                "smaller images, or less text; a prompt with images is not cut"
            )
        return ids, inputs

    def has_placeholder(self, text: str) -> bool:
        """Whether a text says where an image stands."""
        return self._input == "inline" and str(self.processor().image_token) in text

    def refuse_image_tokens(self, ids: Sequence[int], index: int) -> None:
        """Refuses a prompt that has image tokens and no images: its vector would be one of nothing."""
        token = next((one for one in self._loaded.facts.image_token_ids if one in ids), None)
        if token is not None:
            raise InvalidPromptError(
                f"input {index} has the model's image token, {token}, and no image: give multi_modal_data with it"
            )

    def _refuse_more_than_one_image(self, prompt: ImagePrompt, where: str) -> None:
        if prompt.text:
            raise InvalidPromptError(f"{where} has an image and a text, and {self._name} reads one or the other")
        if len(prompt.images) != 1:
            raise InvalidPromptError(
                f"{where} has {len(prompt.images)} images, and {self._name} reads one: give a prompt for each"
            )

    def _tower(self, images: list[Any], text: str | None, where: str, special: bool) -> tuple[list[int], ImageInputs]:
        tensors = dict(self.processor().image_processor(images=images, return_tensors="pt"))
        patch_size = self._loaded.facts.patch_size
        assert patch_size is not None
        return [0] * num_patches(tensors, patch_size), ImageInputs(tensors)

    def _page(self, images: list[Any], text: str | None, where: str, special: bool) -> tuple[list[int], ImageInputs]:
        processor = self.processor()
        with self._lock:
            batch = processor.process_images(images=images, return_tensors="pt")
        if "image_grid_thw" in batch:  # a row of patches per image, padded, where the tower takes patches
            batch["pixel_values"] = batch["pixel_values"].flatten(0, 1)
        return self._split(batch, len(images))

    def _inline(self, images: list[Any], text: str | None, where: str, special: bool) -> tuple[list[int], ImageInputs]:
        processor = self.processor()
        placeholder = str(processor.image_token)
        text = text or ""
        placed = text.count(placeholder)
        if placed not in (0, len(images)):
            raise InvalidPromptError(
                f"{where} has {len(images)} images, and its text {placed} times {placeholder!r}: write it once for "
                "each image, or not at all to have the images before the text"
            )
        before, after = _AROUND.get(placeholder, ("", ""))
        if before and placeholder * 2 in text:
            raise InvalidPromptError(
                f"{where} has two images side by side: write {before}{placeholder}{after} for each"
            )
        if placed == 0:
            text = f"{before}{placeholder}{after}" * len(images) + text
        extra: dict[str, Any] = {} if special else {"add_special_tokens": False}
        with self._lock:
            batch = processor(text=[text], images=[images], return_tensors="pt", **extra)
        return self._split(batch, len(images))

    def _split(self, batch: Mapping[str, Any], count: int) -> tuple[list[int], ImageInputs]:
        """A processor's answer for one prompt: ids, and tensors per token and per image."""
        ids: list[int] = batch["input_ids"][0].tolist()
        rest = {name: tensor for name, tensor in batch.items() if name not in _NOT_FOR_THE_MODEL}
        by_token = {name: tensor[0] for name, tensor in rest.items() if name.endswith("token_type_ids")}
        tensors = {name: torch.as_tensor(tensor) for name, tensor in rest.items() if name not in by_token}
        facts = self._loaded.facts
        grids = patch_grids(
            ids,
            tensors,
            count,
            image_token=next(iter(facts.image_token_ids), None),
            patch_size=facts.patch_size,
            image_processor=getattr(self.processor(), "image_processor", None),
        )
        return ids, ImageInputs(tensors, by_token, count, grids)
