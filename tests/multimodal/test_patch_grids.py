"""`image_grids` of /pooling: which rows are the patches of an image, and where in the image they stand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy
import pytest
from PIL import Image

from anypool import LLM
from anypool.entrypoints.serve.app import create_app
from tests.entrypoints.conftest import Client
from tests.helpers import copy_of
from tests.multimodal.checkpoints import (
    colmodernvbert_folder,
    colpali_folder,
    colqwen2_folder,
    llava_folder,
    picture,
    qwen2_vl_folder,
)
from tests.multimodal.test_images_over_http import CHAT, data_url, file_of, message

SIDE = 112


@pytest.fixture(scope="module")
def server() -> Iterator[Client]:
    chatty = copy_of(qwen2_vl_folder())
    (chatty / "chat_template.jinja").write_text(CHAT)
    folders = {
        "colpali": colpali_folder(SIDE),
        "colqwen2": colqwen2_folder(),
        "colmodernvbert": colmodernvbert_folder(),
        "qwen": chatty,
        "llava": llava_folder(),
    }
    llms = [LLM(path, device="cpu", served_model_name=name, use_tqdm_on_load=False) for name, path in folders.items()]
    yield Client(create_app([llm.engine for llm in llms]))
    for llm in llms:
        llm.close()


def embed(server: Client, model: str, *messages: Any, **fields: Any) -> list[dict[str, Any]]:
    answer = server.post("/pooling", model=model, task="token_embed", messages=list(messages), **fields)
    assert answer.status_code == 200, answer.text
    data: list[dict[str, Any]] = answer.json()["data"]
    return data


def of(image: Image.Image) -> list[dict[str, Any]]:
    return message(("image", data_url(file_of(image))))


# Of a picture of 60 x 30 pixels. ColPali stretches it to its square of patches of 14 pixels. ColQwen2's patches have 7
# pixels, of which 2 x 2 become one token, and an image keeps its shape: 60 x 30 becomes 56 x 28.
GRIDS = {"colpali": (8, 8), "colqwen2": (2, 4)}


@pytest.mark.parametrize("model", list(GRIDS))
@pytest.mark.parametrize("form", ["float", "base64"])
def test_grid_counts_the_image_tokens(server: Client, model: str, form: str) -> None:
    text, page = embed(
        server, model, message("what"), of(picture(1, 60, 30)), return_token_ids=True, encoding_format=form
    )
    rows, columns = GRIDS[model]
    [grid] = page["image_grids"]
    assert (grid["rows"], grid["columns"]) == (rows, columns)
    ids, first = page["prompt_token_ids"], grid["first_row"]
    [token] = set(ids[first : first + rows * columns])
    assert ids.count(token) == rows * columns
    assert "image_grids" not in text


@pytest.mark.parametrize("model", list(GRIDS))
def test_a_patch_that_changes_changes_its_row_most(server: Client, model: str) -> None:
    """Rows are in the grid's order: from left to right, then from top to bottom."""
    rows, columns = GRIDS[model]
    # the size that the model reads, so that nothing is resampled
    width, height = {"colpali": (SIDE, SIDE), "colqwen2": (56, 28)}[model]
    pixels = numpy.asarray(picture(2, width, height)) // 8 + 100
    cells = [(0, 0), (0, columns - 1), (1, 2), (rows - 1, 0), (rows - 1, columns - 2)]
    pictures = [pixels]
    for row, column in cells:
        changed = pixels.copy()
        changed[row * 14 : (row + 1) * 14, column * 14 : (column + 1) * 14] = (255, 0, 0)
        pictures.append(changed)
    first, *others = embed(server, model, *(of(Image.fromarray(one)) for one in pictures), return_token_ids=True)
    start = first["image_grids"][0]["first_row"]
    before, *after = (numpy.array(one["data"])[start : start + rows * columns] for one in (first, *others))
    found = [int(numpy.linalg.norm(one - before, axis=1).argmax()) for one in after]
    assert [divmod(place, columns) for place in found] == cells


def test_several_images_have_a_grid_each(server: Client) -> None:
    parts = [("image", data_url(file_of(one))) for one in (picture(1, 60, 30), picture(2, 28, 42))]
    [answer] = embed(server, "qwen", message(parts[0], "and", parts[1]), return_token_ids=True)
    shapes = [(one["rows"], one["columns"]) for one in answer["image_grids"]]
    assert shapes == [(2, 4), (3, 2)]
    ids = answer["prompt_token_ids"]
    for grid, cells in zip(answer["image_grids"], (8, 6), strict=True):
        first = grid["first_row"]
        assert ids[first - 1] != ids[first] != ids[first + cells]
        assert len(set(ids[first : first + cells])) == 1


@pytest.mark.parametrize("model", ["colmodernvbert", "llava"])
def test_tiles_and_crops_have_no_grid(server: Client, model: str) -> None:
    [answer] = embed(server, model, of(picture(1, 80, 40)), return_token_ids=True)
    assert answer["image_grids"] is None


def test_grids_are_there_where_they_are_asked_for(server: Client) -> None:
    [answer] = embed(server, "colpali", of(picture(1)))
    assert "image_grids" not in answer
