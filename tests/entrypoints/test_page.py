"""The page at `/` in a browser: every view, on a phone and on a desktop, shows what the API says, and only that."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from anypool.config import EngineConfig
from anypool.engine.engine import Engine
from anypool.errors import OverloadedError
from tests.entrypoints.browser import CHROMIUM, DESKTOP, DRIVER, PHONE, Browser
from tests.entrypoints.page_server import served
from tests.named_checkpoints import cross_encoder, named_entities, process_reward_model, sentiment

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None or DRIVER is None, reason="Chromium and chromedriver are not installed"),
]

# Skips punctuation in documents, marks both sides and expands queries.
COLBERT = Path(__file__).parents[1] / "fixtures" / "pylate"
TEXTS = ["The Moon causes the tides.", "Why are there tides?", "<b>bread</b> & butter"]
MARKUP = "<img src=x onerror='window.hacked=1'><script>window.hacked=1</script>"
SIZES = pytest.mark.parametrize("size", [PHONE, DESKTOP], ids=["phone", "desktop"])
VIEWS = ("similarity", "rank", "tokens", "model-card", "live")
OPEN = "section:not([hidden])"

# Texts of the page whose contrast with what is behind them is below 4.5, the least that WCAG 2.2 (1.4.3, AA) allows.
FAINT = """
const context = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
function over(colour, behind) {
  context.fillStyle = `rgb(${behind})`; context.fillRect(0, 0, 1, 1);
  context.fillStyle = colour; context.fillRect(0, 0, 1, 1);
  return [...context.getImageData(0, 0, 1, 1).data].slice(0, 3);
}
function ground(node) {
  return node ? over(getComputedStyle(node).backgroundColor, ground(node.parentElement)) : [255, 255, 255];
}
const linear = (c) => (c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4);
const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
return [...document.querySelectorAll("body *")]
  .filter((node) => node.checkVisibility() && [...node.childNodes].some((one) => one.nodeType === 3 && one.data.trim()))
  .map((node) => {
    const behind = ground(node);
    const [a, b] = [light(over(getComputedStyle(node).color, behind)), light(behind)];
    return [(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), node.outerHTML.slice(0, 120)];
  })
  .filter(([contrast]) => contrast < 4.5);
"""


@pytest.fixture(scope="module")
def engines(engine: Engine) -> Iterator[list[Engine]]:
    made = {
        "ner": named_entities(),
        "sentiment": sentiment(),
        "steps": process_reward_model(),
        "cross": cross_encoder(),
        "colbert": COLBERT,
    }
    others = [
        Engine(EngineConfig(model=str(path), served_model_name=name, use_tqdm_on_load=False))
        for name, path in made.items()
    ]
    yield [engine, *others]
    for one in others:
        one.close()


@pytest.fixture(scope="module")
def address(engines: Sequence[Engine]) -> Iterator[str]:
    with served(engines) as address:
        yield address


def visit(browser: Browser, address: str, view: str, *, model: str | None = None) -> None:
    browser.open(f"{address}/#{view}")
    browser.wait("return document.body.dataset.ready")
    if model is not None:
        browser.run("const s = document.getElementById('model'); s.value = arguments[0];"
                    "s.dispatchEvent(new Event('change'))", model)  # fmt: skip
        browser.wait("return document.querySelector('#model-card dd').textContent === arguments[0]", model)


def fill(browser: Browser, **fields: str) -> None:
    for name, text in fields.items():
        browser.type(f"{OPEN} form [name={name}]", text)


def run(browser: Browser) -> None:
    """Presses the view's button and waits for the answer."""
    browser.click(f"{OPEN} form [type=submit]")
    settle(browser)


def settle(browser: Browser) -> None:
    browser.wait(f"return !document.querySelector('{OPEN}[aria-busy]')")


def fits(browser: Browser) -> bool:
    """Whether nothing is wider than the screen."""
    width: int = browser.run("return document.documentElement.scrollWidth")
    return width <= browser.size[0]


def number(text: str) -> float:
    return float(text.replace("−", "-").replace(",", ""))


def post(address: str, path: str, **fields: Any) -> Any:
    response = httpx.post(f"{address}{path}", json=fields, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()


@SIZES
def test_similarity_is_the_cosine_of_the_vectors(browser: Browser, address: str, size: tuple[int, int]) -> None:
    browser.look(size)
    visit(browser, address, "similarity")
    fill(browser, texts="\n".join(TEXTS) + "\n\n")
    run(browser)
    rows = np.array([one["embedding"] for one in post(address, "/v1/embeddings", input=TEXTS)["data"]])
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    expected = unit @ unit.T
    shown = [number(cell) for cell in browser.texts(".heat td.cell, .heat td.same")]
    np.testing.assert_allclose(np.reshape(shown, (3, 3)), expected, atol=0.0051)  # two digits are shown
    assert browser.run("return [...document.querySelectorAll('.heat tbody .name')].map((n) => n.textContent)") == TEXTS
    closest = browser.texts(".pairs .score")
    above = sorted((expected[0, 1], expected[0, 2], expected[1, 2]), reverse=True)
    np.testing.assert_allclose([number(one) for one in closest], above, atol=0.00051)
    browser.click(".heat tbody tr:nth-child(3) td:nth-of-type(1)")
    assert number(browser.text(".picked .score")) == pytest.approx(expected[2, 0], abs=0.00051)
    assert TEXTS[2] in browser.text(".picked")
    assert "3 texts · 384 dimensions" in browser.text(f"{OPEN} .status")
    assert fits(browser)


@SIZES
def test_a_large_table_scrolls_by_itself(browser: Browser, address: str, size: tuple[int, int]) -> None:
    browser.look(size)
    visit(browser, address, "similarity")
    browser.run("document.querySelector('#texts').value = arguments[0]", "\n".join(f"text {i} " * 9 for i in range(40)))
    run(browser)
    assert len(browser.texts(".heat td.cell")) == 40 * 39
    assert browser.run("const box = document.querySelector('.scroll'); return box.scrollWidth > box.clientWidth")
    assert fits(browser)


@SIZES
def test_ranking_is_that_of_rerank(browser: Browser, address: str, size: tuple[int, int]) -> None:
    browser.look(size)
    visit(browser, address, "rank")
    fill(browser, query="tides", documents="\n".join(TEXTS))
    run(browser)
    expected = post(address, "/rerank", query="tides", documents=TEXTS)["results"]
    shown = browser.run(
        "return [...document.querySelectorAll('.ranked')].map((row) => [Number(row.dataset.index),"
        " row.querySelector('.bar-value').textContent, row.querySelector('.bar-label').textContent])"
    )
    assert [index for index, _, _ in shown] == [one["index"] for one in expected]
    np.testing.assert_allclose(
        [number(score) for _, score, _ in shown], [one["relevance_score"] for one in expected], atol=0.000051
    )
    assert [text.endswith(TEXTS[index]) for index, _, text in shown] == [True] * 3
    widths = browser.run("return [...document.querySelectorAll('.bar-fill')].map((one) => one.offsetWidth)")
    assert widths == sorted(widths, reverse=True)
    assert fits(browser)


def test_models_that_give_several_labels_do_not_rank_and_say_why(browser: Browser, address: str) -> None:
    visit(browser, address, "rank", model="sentiment")
    assert "2 labels" in browser.text("#rank-way")
    assert not browser.run("return document.querySelector('#rank form').checkVisibility()")
    visit(browser, address, "rank", model="cross")
    run(browser)
    assert len(browser.texts(".ranked")) == 5


@SIZES
def test_alignment_is_maxsim_of_the_token_vectors(browser: Browser, address: str, size: tuple[int, int]) -> None:
    browser.look(size)
    visit(browser, address, "tokens")
    query, document = "What causes tides?", "Gravity of the Moon moves the oceans, so tides follow."
    fill(browser, query=query, document=document)
    run(browser)
    answer = post(address, "/pooling", task="token_embed", input=[query, document], return_token_ids=True)["data"]
    left, right = (np.array(one["data"]) for one in answer)
    similarities = left @ right.T
    assert number(browser.text("#maxsim")) == pytest.approx(similarities.max(axis=1).sum(), abs=0.00051)
    tokens = [
        post(address, "/decode", ids=[[i] for i in one["prompt_token_ids"]], skip_special_tokens=False)
        for one in answer
    ]
    assert browser.texts(".above .token") == tokens[0]
    assert browser.texts(".below .token") == tokens[1]
    assert browser.texts(".token.special") == ["[CLS]", "[SEP]"] * 2
    browser.click("details summary")
    cells = browser.texts(".plain td")
    best = similarities.argmax(axis=1)
    assert cells[1::3] == [tokens[1][place] for place in best]
    np.testing.assert_allclose([number(one) for one in cells[2::3]], similarities.max(axis=1), atol=0.00051)
    browser.click(".above .token:nth-child(3)")
    assert f"“{tokens[0][2]}” finds “{tokens[1][best[2]]}”" in browser.text(".said")
    chosen = browser.run("return [...document.querySelectorAll('.below .token')].map((t) => t.matches('.chosen'))")
    assert chosen.index(True) == best[2]
    assert browser.run("return document.querySelectorAll('.alignment path.chosen').length") == 1
    assert fits(browser)


def test_alignment_of_a_multi_vector_model_is_its_score(browser: Browser, address: str) -> None:
    visit(browser, address, "similarity", model="colbert")
    assert "no vector for a whole text" in browser.text("#similarity-way")
    visit(browser, address, "tokens", model="colbert")
    query, document = "the cat sat", "a cat, a mat: the story."
    fill(browser, query=query, document=document)
    run(browser)
    [score] = post(address, "/score", model="colbert", queries=query, documents=document)["data"]
    assert number(browser.text("#maxsim")) == pytest.approx(score["score"], abs=0.00051)
    [answer] = post(
        address, "/pooling", model="colbert", task="token_embed", input=[document], input_type="document",
        return_token_ids=True,
    )["data"]  # fmt: skip
    ids = answer["prompt_token_ids"]
    assert len(answer["row_places"]) == len(answer["data"]) < len(ids)
    kept = [[ids[place]] for place in answer["row_places"]]
    decoded = post(address, "/decode", model="colbert", ids=kept, skip_special_tokens=False)
    assert browser.texts(".below .token") == [text.replace(" ", "␣") for text in decoded]
    assert not {",", ":", "."} & set(browser.texts(".below .token"))
    visit(browser, address, "model-card", model="colbert")
    assert "8 dimensions per token" in browser.text("#model-card")


@SIZES
def test_token_labels_are_those_with_the_highest_scores(browser: Browser, address: str, size: tuple[int, int]) -> None:
    browser.look(size)
    visit(browser, address, "tokens", model="ner")
    text = "the cat sat on a mat"
    fill(browser, text=text)
    run(browser)
    answer = post(address, "/pooling", model="ner", task="token_classify", input=[text])["data"][0]["data"]
    names = httpx.get(f"{address}/info", params={"model": "ner"}).json()["card"]["head"]["labels"]
    scores = np.array(answer)
    assert browser.texts(".labelled small") == [names[i] for i in scores.argmax(axis=1)]
    browser.click(".labelled:nth-child(4)")
    assert browser.texts(".chosen-token .bar-label") == [names[i] for i in np.argsort(-scores[3], kind="stable")]
    shown = [number(one) for one in browser.texts(".chosen-token .bar-value")]
    np.testing.assert_allclose(shown, np.sort(scores[3])[::-1], atol=0.000051)
    assert fits(browser)


def test_labels_of_a_text_and_of_a_pair_are_those_of_predict(browser: Browser, address: str) -> None:
    visit(browser, address, "tokens", model="sentiment")
    for inputs in (["the cat sat"], ["the cat sat", "on a mat"]):
        fill(browser, **dict(zip(("text", "pair"), inputs, strict=False)))
        run(browser)
        expected = post(address, "/predict", model="sentiment", inputs=[inputs])[0]
        assert browser.texts(".bar-label") == [one["label"] for one in expected]
        shown = [number(one) for one in browser.texts(".bar-value")]
        np.testing.assert_allclose(shown, [one["score"] for one in expected], atol=0.000051)
    browser.click(".modes label:nth-of-type(2)")
    run(browser)
    assert set(browser.texts(".labelled small")) <= {"NEGATIVE", "POSITIVE"}


def test_rewards_are_those_of_the_steps(browser: Browser, address: str) -> None:
    visit(browser, address, "tokens", model="steps")
    assert browser.texts(".modes label") == ["Reward", "Alignment"]
    text = "2 + 2 = 4<extra_0>4 * 3 = 12<extra_0>"
    fill(browser, text=text)
    run(browser)
    expected = post(address, "/reward", model="steps", input=[text])["data"][0]["reward"]
    assert browser.texts(".bar-label") == ["Step 1", "Step 2"]
    np.testing.assert_allclose([float(one) for one in browser.texts(".bar-value")], expected, rtol=1e-3)


@SIZES
def test_model_card_is_that_of_info(browser: Browser, address: str, size: tuple[int, int]) -> None:
    browser.look(size)
    for model in ("minilm", "ner"):
        visit(browser, address, "model-card", model=model)
        card = httpx.get(f"{address}/info", params={"model": model}).json()["card"]
        text = browser.text("#model-card")
        for fact in (card["architecture"], card["class"], card["dtype"], card["device"], *card["tasks"]):
            assert fact in text
        assert f"{card['max_model_len']:,} tokens" in text
        assert f"{card['embedding_size']:,} dimensions" in text
        assert fits(browser)


def test_live_charts_follow_the_metrics(browser: Browser, address: str) -> None:
    visit(browser, address, "live")
    lines = "return [...document.querySelectorAll('#live .line')].map((line) => line.getAttribute('d') ?? '')"
    for _ in range(5):
        post(address, "/v1/embeddings", input=["a b c", "d"])
    browser.wait("return /\\d/.test(document.querySelector('#live .value strong').textContent)")
    browser.wait(f"return (() => {{ {lines} }})().every((path, i) => path || i === 2 || i === 3)")
    assert "/s" in browser.text("#live .card:nth-child(1) strong")
    browser.run("location.hash = '#rank'")
    browser.requests()
    assert not browser.run("return new Promise((done) => setTimeout(() => done(0), 2300))")
    assert browser.requests() == []  # nobody looks


def test_quantiles_are_those_of_prometheus(browser: Browser, address: str) -> None:
    """Two readings of a histogram with 4 values up to 0.1, 4 up to 0.5 and 2 above: ranks are interpolated."""
    visit(browser, address, "similarity")
    before = (
        'h_bucket{le="0.1"} 1\nh_bucket{le="0.5"} 1\nh_bucket{le="+Inf"} 1\n# HELP x y\nx{a="b\\"c\\\\",d="e"} 2.5\n'
    )
    after = 'h_bucket{le="0.1"} 5\nh_bucket{le="0.5"} 9\nh_bucket{le="+Inf"} 11\n'
    found = browser.run(
        """return import("./page/prometheus.js").then(({parse, quantile}) => {
          const [a, b] = [parse(arguments[0]), parse(arguments[1])];
          const at = (share) => quantile(a, b, "h", share);
          return [at(0.2), at(0.4), at(0.5), at(0.8), at(0.95), quantile(b, b, "h", 0.5), a.get("x")[0]];
        })""",
        before, after,
    )  # fmt: skip
    np.testing.assert_allclose(found[:5], [0.05, 0.1, 0.2, 0.5, 0.5], atol=1e-12)
    assert found[5:] == [None, {"labels": {"a": 'b"c\\', "d": "e"}, "value": 2.5}]


def test_markup_in_a_text_is_shown_as_text(browser: Browser, address: str) -> None:
    visit(browser, address, "similarity")
    fill(browser, texts=f"{MARKUP}\na text")
    run(browser)
    assert MARKUP in browser.run("return document.querySelector('.heat tbody .name').textContent")
    assert MARKUP in browser.text(".pairs")
    visit(browser, address, "rank")
    fill(browser, query=MARKUP, documents=f"{MARKUP}\nb")
    run(browser)
    assert MARKUP in browser.text(".ranking")
    visit(browser, address, "tokens")
    fill(browser, query=MARKUP, document=MARKUP)
    run(browser)
    assert "<" in browser.texts(".above .token")
    for model in ("ner", "sentiment"):
        visit(browser, address, "tokens", model=model)
        fill(browser, text=MARKUP)
        run(browser)
    assert browser.run("return [window.hacked ?? null, document.querySelectorAll('img').length]") == [None, 1]


def test_mistakes_and_refusals_are_told_in_words(
    browser: Browser, address: str, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OverloadedError("too many tokens wait: <b>4</b>", retry_after_s=3.0)

    visit(browser, address, "similarity")
    fill(browser, texts="one text")
    run(browser)
    assert browser.text(f"{OPEN} .failure") == "Give at least two texts, one per line."
    fill(browser, texts="one\ntwo")
    with monkeypatch.context() as patched:
        patched.setattr(engine, "submit", full)
        run(browser)
    assert browser.text(f"{OPEN} .failure") == "too many tokens wait: <b>4</b> (try again in 3 s)"
    assert [one.split(" - ")[-1][:60] for one in browser.complaints()] == [
        "Failed to load resource: the server responded with a status "
    ]
    run(browser)
    assert browser.text(f"{OPEN} .failure") == ""
    assert len(browser.texts(".heat td")) == 5


def test_a_server_that_is_gone_is_told(browser: Browser, engines: Sequence[Engine]) -> None:
    with served(engines) as address:
        visit(browser, address, "similarity")
    run(browser)
    assert browser.text(f"{OPEN} .failure") == "The server does not answer. Is it still running?"
    assert any("ERR_CONNECTION_REFUSED" in one for one in browser.complaints())


def test_a_server_without_metrics_says_so(browser: Browser, engines: Sequence[Engine]) -> None:
    with served(engines, metrics=False) as address:
        visit(browser, address, "live")
        browser.wait(f"return document.querySelector('{OPEN} .failure').textContent")
        assert "--no-metrics" in browser.text(f"{OPEN} .failure")
        assert any("404" in one for one in browser.complaints())


def test_the_page_asks_for_a_key_and_keeps_it_in_the_tab(browser: Browser, engines: Sequence[Engine]) -> None:
    asks = "return document.getElementById('key-dialog').open"
    with served(engines[:1], api_key="right") as address:
        browser.open(f"{address}/")
        browser.wait(asks)
        assert "the API key is missing" in browser.text("#key-reason")
        browser.click("#key-cancel")
        browser.wait("return document.querySelector('#problem button')")
        assert "The server wants an API key." in browser.text("#problem")
        browser.click("#problem button")
        browser.wait(asks)
        browser.type("#key", "wrong")
        browser.click("#key-dialog [type=submit]")
        browser.wait("return document.getElementById('key-reason').textContent.includes('not valid')")
        browser.type("#key", "right")
        browser.click("#key-dialog [type=submit]")
        browser.wait("return document.body.dataset.ready")
        run(browser)
        assert browser.texts(".heat td.cell")
        kept = "return [Object.values(sessionStorage), localStorage.length, document.cookie]"
        assert browser.run(kept) == [["right"], 0, ""]
        assert all("right" not in url for url in browser.requests())
        browser.click("#forget")
        browser.wait(asks)
        assert browser.run(kept)[0] == []
        assert {one.rsplit("(", 1)[-1] for one in browser.complaints()} == {"Unauthorized)"}


def test_everything_is_reached_by_keyboard_and_has_a_name(browser: Browser, address: str) -> None:
    visit(browser, address, "rank")
    browser.run("document.querySelector('#query').focus()")
    browser.press("\ue008", "\ue004")  # Shift, Tab
    assert browser.run("return document.activeElement.textContent") == "Live"
    browser.press("\ue004")
    browser.press("\ue009", "\ue007")  # Control, Enter
    browser.wait("return document.querySelector('.ranked')")
    nameless = browser.run(
        "return [...document.querySelectorAll('input, textarea, select')].filter((field) => !field.labels.length)"
        ".concat([...document.querySelectorAll('button, a')].filter((one) => !one.textContent.trim())).map(String)"
    )
    assert nameless == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@SIZES
def test_texts_stand_out_and_nothing_is_too_wide(
    browser: Browser, address: str, size: tuple[int, int], scheme: str
) -> None:
    browser.look(size, scheme=scheme)
    for view in VIEWS:
        for model in ("minilm", "ner", "sentiment") if view == "tokens" else ("minilm",):
            visit(browser, address, view, model=model)
            if view in ("similarity", "rank", "tokens"):
                run(browser)
                browser.run("document.querySelector('.result').style.transition = 'none'")
            assert browser.run(FAINT) == []
            assert fits(browser)
