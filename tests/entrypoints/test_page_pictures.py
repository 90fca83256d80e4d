"""Pictures in the page's view of tokens: the patches that it marks and its score are those of the Python API."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageDraw

from anypool import LLM
from tests.entrypoints.browser import CHROMIUM, DESKTOP, DRIVER, PHONE, Browser
from tests.entrypoints.page_server import served
from tests.entrypoints.test_page import FAINT, OPEN, SIZES, fill, fits, number, post, run, visit
from tests.multimodal.checkpoints import colmodernvbert_folder, colpali_folder, colqwen2_folder

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None or DRIVER is None, reason="Chromium and chromedriver are not installed"),
]

QUERY = "orange box"
# ColQwen2's checkpoint takes at most 3600 pixels, and both sides in steps of 14: 220 x 160 becomes 70 x 42.
GRIDS = {"colpali": (8, 8), "colqwen2": (3, 5)}


@pytest.fixture(scope="module")
def models() -> Iterator[dict[str, LLM]]:
    folders = {"colpali": colpali_folder(112), "colqwen2": colqwen2_folder(), "tiles": colmodernvbert_folder()}
    llms = {
        name: LLM(folder, device="cpu", served_model_name=name, use_tqdm_on_load=False)
        for name, folder in folders.items()
    }
    yield llms
    for llm in llms.values():
        llm.close()


@pytest.fixture(scope="module")
def address(models: dict[str, LLM], engine: Any) -> Iterator[str]:
    with served([*(llm.engine for llm in models.values()), engine]) as address:
        yield address


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of 220 x 160 pixels, which is no square."""
    image = Image.new("RGB", (220, 160), "white")
    pen = ImageDraw.Draw(image)
    pen.text((12, 10), "revenue in 2024", fill="black")
    pen.rectangle((30, 60, 120, 140), fill="orange")
    pen.ellipse((140, 40, 200, 100), fill="navy")
    path = tmp_path_factory.mktemp("pictures") / "page.png"
    image.save(path)
    return path


def similarities(llm: LLM, page: Path) -> Any:
    """`[query tokens, tokens of the page]`, as Python gives them."""
    prompts = [QUERY, {"multi_modal_data": {"image": page}}]
    query, answer = (one.outputs.data.numpy() for one in llm.token_embed(prompts, use_tqdm=False))
    return query @ answer.T


def first_row(address: str, model: str, page: Path) -> int:
    messages = [{"role": "user", "content": content(page)}]
    [answer] = post(
        address, "/pooling", model=model, task="token_embed", messages=messages, return_token_ids=True
    )["data"]  # fmt: skip
    first: int = answer["image_grids"][0]["first_row"]
    return first


def content(page: Path) -> list[dict[str, Any]]:
    url = f"data:image/png;base64,{base64.b64encode(page.read_bytes()).decode()}"
    return [{"type": "image_url", "image_url": {"url": url}}]


def marked(browser: Browser) -> list[list[int]]:
    found: list[list[int]] = browser.run(
        "return [...document.querySelectorAll('.patch')].map((one) => [+one.dataset.row, +one.dataset.column])"
    )
    return found


@SIZES
@pytest.mark.parametrize("model", list(GRIDS))
def test_patches_and_score_are_those_of_python(
    browser: Browser, address: str, models: dict[str, LLM], page: Path, model: str, size: tuple[int, int]
) -> None:
    browser.look(size)
    visit(browser, address, "tokens", model=model)
    fill(browser, query=QUERY)
    browser.choose_file(f"{OPEN} [name=picture]", page)
    run(browser)
    assert browser.text(f"{OPEN} .failure") == ""
    expected, start = similarities(models[model], page), first_row(address, model, page)
    [score] = post(address, "/score", model=model, queries=QUERY, documents=[{"content": content(page)}])["data"]
    assert number(browser.text("#maxsim")) == pytest.approx(score["score"], abs=0.00051)
    assert score["score"] == pytest.approx(expected.max(axis=1).sum(), abs=1e-4)

    rows, columns = GRIDS[model]
    assert f"{rows} × {columns} patches" in browser.text(".patches")
    patches = expected[:, start : start + rows * columns]
    best = expected.argmax(axis=1) - start
    found = {divmod(int(place), columns) for place in best if 0 <= place < rows * columns}
    assert {tuple(one) for one in marked(browser)} == found
    for i in (0, 2, len(expected) - 1):
        browser.click(f".above .token:nth-child({i + 1})")
        assert marked(browser) == [list(divmod(int(patches[i].argmax()), columns))]
        low, high = (number(one) for one in browser.texts(".patches figcaption span:not(.ramp)"))
        assert (low, high) == (pytest.approx(patches[i].min(), abs=5.1e-4), pytest.approx(patches[i].max(), abs=5.1e-4))
        words = browser.text(".said")
        assert ("finds the patch" in words) == (0 <= best[i] < rows * columns)
    browser.click("details summary")
    table = browser.texts(".plain td")
    np.testing.assert_allclose([number(one) for one in table[2::3]], expected.max(axis=1), atol=5.1e-4)
    for name, place in zip(table[1::3], best, strict=True):
        row, column = divmod(int(place), columns)
        assert (name == f"row {row + 1}, column {column + 1}") == (0 <= place < rows * columns)
    assert fits(browser)


def test_heat_is_the_similarity_over_the_whole_picture(
    browser: Browser, address: str, models: dict[str, LLM], page: Path
) -> None:
    visit(browser, address, "tokens", model="colpali")
    fill(browser, query=QUERY)
    browser.choose_file(f"{OPEN} [name=picture]", page)
    run(browser)
    start = first_row(address, "colpali", page)
    values = similarities(models["colpali"], page)[1, start : start + 64]
    browser.click(".above .token:nth-child(2)")
    shown = browser.run(
        """const heat = document.querySelector(".patch-heat");
        const {data} = heat.getContext("2d").getImageData(0, 0, heat.width, heat.height);
        return [heat.width, heat.height, [...data].filter((_, i) => i % 4 === 3)]"""
    )
    assert shown[:2] == [8, 8]
    shares = (values - values.min()) / (values.max() - values.min())
    np.testing.assert_allclose(shown[2], 178 * shares, atol=0.51)
    boxes = browser.run(
        """return [".picture", ".patch-heat", ".patch"].map((one) => {
          const {left, top, width, height} = document.querySelector(one).getBoundingClientRect();
          return [left, top, width, height];
        })"""
    )
    (left, top, width, height), heat, patch = boxes
    np.testing.assert_allclose(heat, [left, top, width, height], atol=0.5)
    assert width / height == pytest.approx(220 / 160, rel=0.01)  # as the file has it, not as the model squeezes it
    row, column = divmod(int(values.argmax()), 8)
    np.testing.assert_allclose(
        patch, [left + column * width / 8, top + row * height / 8, width / 8, height / 8], atol=0.5
    )
    browser.click(".above .token:nth-child(2)")  # let go
    browser.run(
        "document.querySelector('.patches').dispatchEvent(new PointerEvent('pointerleave', {pointerType: 'mouse'}))"
    )
    assert "Point at a token" in browser.text(".said")


@pytest.mark.parametrize("shape", [(40, 400), (400, 40), (8, 8)], ids=["tall", "wide", "small"])
def test_a_picture_keeps_its_shape(browser: Browser, address: str, tmp_path: Path, shape: tuple[int, int]) -> None:
    Image.new("RGB", shape, "teal").save(tmp_path / "picture.png")
    visit(browser, address, "tokens", model="colpali")
    browser.choose_file(f"{OPEN} [name=picture]", tmp_path / "picture.png")
    run(browser)
    width, height = browser.run(
        "const {width, height} = document.querySelector('.picture').getBoundingClientRect(); return [width, height]"
    )
    assert width / height == pytest.approx(shape[0] / shape[1], rel=0.01)
    assert height <= 545
    assert fits(browser)


def test_the_keyboard_shows_what_pointing_does(browser: Browser, address: str, page: Path) -> None:
    visit(browser, address, "tokens", model="colpali")
    browser.choose_file(f"{OPEN} [name=picture]", page)
    run(browser)
    browser.run("document.querySelector('details summary').focus()")
    browser.press("\ue008", "\ue004")  # Shift, Tab: back to the last token
    assert "column" in browser.text(".said")
    assert len(marked(browser)) == 1


def test_a_picture_is_dropped_pasted_and_removed(browser: Browser, address: str, page: Path) -> None:
    visit(browser, address, "tokens", model="colpali")
    give = """
    const bytes = Uint8Array.from(atob(arguments[0]), (letter) => letter.charCodeAt(0));
    const data = new DataTransfer();
    data.items.add(new File([bytes], arguments[1], {type: "image/png"}));
    const options = {bubbles: true, cancelable: true};
    const event = arguments[1] === "dropped.png"
      ? new DragEvent("drop", {...options, dataTransfer: data})
      : new ClipboardEvent("paste", {...options, clipboardData: data});
    document.querySelector("#token-document").dispatchEvent(event);
    """
    state = (
        "const {picture, document: text} = document.querySelector('#tokens form').elements;"
        "return [[...picture.files].map((one) => one.name), text.disabled]"
    )
    for name in ("dropped.png", "pasted.png"):
        browser.run(give, base64.b64encode(page.read_bytes()).decode(), name)
        assert browser.run(state) == [[name], True]
    run(browser)
    assert browser.run("return document.querySelector('.picture').getAttribute('aria-label')") == "pasted.png"
    browser.click(".drop button")
    assert browser.run(state) == [[], False]
    run(browser)
    assert browser.texts(".picture") == []
    assert len(browser.texts(".below .token")) > 3


def test_models_without_a_grid_or_without_images_say_so(
    browser: Browser, address: str, models: dict[str, LLM], page: Path
) -> None:
    visit(browser, address, "tokens", model="tiles")
    fill(browser, query=QUERY)
    browser.choose_file(f"{OPEN} [name=picture]", page)
    run(browser)
    assert "no single grid" in browser.text(".patches")
    expected = similarities(models["tiles"], page)
    assert number(browser.text("#maxsim")) == pytest.approx(expected.max(axis=1).sum(), abs=0.0011)
    visit(browser, address, "tokens", model="minilm")
    assert not browser.run("return document.querySelector('#token-picture').checkVisibility()")
    run(browser)
    assert browser.texts(".picture") == []


def test_what_is_no_picture_is_told_in_words(browser: Browser, address: str, tmp_path: Path) -> None:
    path = tmp_path / "damaged.png"
    buffer = io.BytesIO()
    Image.new("RGB", (60, 60), "red").save(buffer, "PNG")
    path.write_bytes(buffer.getvalue()[:60])
    visit(browser, address, "tokens", model="colpali")
    browser.choose_file(f"{OPEN} [name=picture]", path)
    run(browser)
    assert "damaged" in browser.text(f"{OPEN} .failure")
    assert any("400" in one for one in browser.complaints())


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_around_a_picture_stand_out(browser: Browser, address: str, page: Path, scheme: str) -> None:
    for size in (PHONE, DESKTOP):
        browser.look(size, scheme=scheme)
        visit(browser, address, "tokens", model="colpali")
        browser.choose_file(f"{OPEN} [name=picture]", page)
        run(browser)
        browser.click(".above .token:nth-child(2)")
        browser.run("document.querySelector('.result').style.transition = 'none'")
        assert browser.run(FAINT) == []
        assert fits(browser)
