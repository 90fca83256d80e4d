"""What a vision tower gives is kept by the pixels, within a bound, and never mistaken for another image's."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
import torch

from anypool import AsyncEngine
from anypool.engine.async_engine import SMALL, _size
from anypool.errors import InvalidPromptError
from anypool.model_executor.images import FeatureCache, ImageInputs
from tests.helpers import loaded
from tests.multimodal.checkpoints import clip_folder, picture


def inputs(value: float) -> ImageInputs:
    return ImageInputs({"pixel_values": torch.full((1, 3, 2, 2), value)})


def tower(images: Sequence[ImageInputs]) -> list[torch.Tensor]:
    return [torch.full((4,), float(one.tensors["pixel_values"].flatten()[0])) for one in images]


def test_each_image_has_its_own_features() -> None:
    cache = FeatureCache()
    found = cache.get([inputs(1), inputs(2), inputs(1)], tower)
    assert [float(one[0]) for one in found] == [1, 2, 1]
    assert cache.computed == 2
    assert [float(one[0]) for one in cache.get([inputs(2), inputs(3)], tower)] == [2, 3]
    assert cache.computed == 3


def test_the_least_recently_used_goes_first() -> None:
    cache = FeatureCache(most_bytes=2 * 16)
    for value in (1, 2, 1, 3, 1):  # 2 goes when 3 comes
        cache.get([inputs(value)], tower)
    assert cache.computed == 3
    cache.get([inputs(2)], tower)
    assert cache.computed == 4


def test_an_image_larger_than_the_cache_is_computed_and_not_kept() -> None:
    cache = FeatureCache(most_bytes=8)
    for _ in range(2):
        [found] = cache.get([inputs(5)], tower)
        assert float(found[0]) == 5
    assert cache.computed == 2


def test_equal_bytes_of_another_shape_or_type_are_another_image() -> None:
    digests = {
        ImageInputs({"pixel_values": torch.zeros(shape, dtype=dtype)}).digest
        for shape in ((1, 3, 2, 4), (1, 3, 4, 2))
        for dtype in (torch.float32, torch.int32)
    }
    assert len(digests) == 4


@pytest.mark.parametrize(
    ("tensors", "count", "parts"),
    [
        ({"pixel_values": torch.zeros(2, 3, 4, 4)}, 2, 2),
        ({"pixel_values": torch.zeros(10, 8), "image_grid_thw": torch.tensor([[1, 2, 2], [1, 3, 2]])}, 2, 2),
        ({"pixel_values": torch.zeros(1, 5, 3, 4, 4)}, 2, 1),
        ({"pixel_values": torch.zeros(1, 5, 3, 4, 4)}, 1, 1),
    ],
    ids=["a-row-each", "patches", "tiles-of-all", "one-image"],
)
def test_images_are_kept_apart_where_the_processor_does(
    tensors: dict[str, torch.Tensor], count: int, parts: int
) -> None:
    each = ImageInputs(tensors, count=count).each
    assert len(each) == parts
    assert sum(one.tensors["pixel_values"].numel() for one in each) == tensors["pixel_values"].numel()


def test_an_image_is_prepared_off_the_event_loop_and_fails_alone() -> None:
    prompts = [{"multi_modal_data": {"image": picture(1)}}]
    assert _size(prompts) >= SMALL

    async def both(engine: AsyncEngine) -> list[object]:
        good, bad = engine.run(prompts, "embed"), engine.run([{"multi_modal_data": {"image": b"no"}}], "embed")
        return await asyncio.gather(good, bad, return_exceptions=True)

    with loaded(clip_folder(3)) as llm:
        good, bad = asyncio.run(both(AsyncEngine(llm.engine)))
    assert isinstance(good, tuple)
    assert isinstance(bad, InvalidPromptError)
