"""Images in chat messages give what the Python API gives; what is no image, or may not be fetched, is a 400."""

from __future__ import annotations

import base64
import contextlib
import io
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import numpy
import pytest
import torch
from PIL import Image

from anypool import LLM
from anypool.entrypoints.serve.app import create_app
from anypool.entrypoints.serve.fetching import ImageFetcher, is_public, public_address
from anypool.entrypoints.server_options import ServerOptions
from anypool.errors import InvalidPromptError
from tests.entrypoints.conftest import Client
from tests.helpers import assert_close, copy_of, loaded, tiny_bert, vectors
from tests.multimodal.checkpoints import clip_folder, colpali_folder, picture, qwen2_vl_folder

PICTURE = picture(1)
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
)


def file_of(image: Image.Image, kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


def data_url(content: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def message(*parts: Any) -> list[dict[str, Any]]:
    """A conversation of one message, of texts and of URLs of images."""
    content = [
        {"type": "image_url", "image_url": {"url": part[1]}}
        if isinstance(part, tuple)
        else {"type": "text", "text": part}
        for part in parts
    ]
    return [{"role": "user", "content": content}]


@pytest.fixture(scope="module")
def models() -> Iterator[dict[str, LLM]]:
    chatty = copy_of(qwen2_vl_folder())
    (chatty / "chat_template.jinja").write_text(CHAT)
    folders = {"clip": clip_folder(3), "colpali": colpali_folder(), "qwen": chatty, "bert": tiny_bert()}
    llms = {
        name: LLM(folder, device="cpu", served_model_name=name, use_tqdm_on_load=False)
        for name, folder in folders.items()
    }
    yield llms
    for llm in llms.values():
        llm.close()


@pytest.fixture(scope="module")
def server(models: dict[str, LLM]) -> Client:
    return Client(create_app([llm.engine for llm in models.values()]))


def embedding(answer: Any) -> torch.Tensor:
    assert answer.status_code == 200, answer.text
    return torch.tensor([one["embedding"] for one in answer.json()["data"]])


def test_an_image_and_a_text_are_embedded(server: Client, models: dict[str, LLM]) -> None:
    url = data_url(file_of(PICTURE))
    answer = server.embed(model="clip", messages=[message(("image", url)), message("a cat")])
    expected = vectors(models["clip"], [{"multi_modal_data": {"image": PICTURE}}, "a cat"])
    assert_close(embedding(answer), expected)
    assert answer.json()["usage"]["prompt_tokens"] == 4 + 7


def test_a_conversation_goes_through_the_chat_template(server: Client, models: dict[str, LLM]) -> None:
    conversation = [
        {"role": "system", "content": "say"},
        *message("what is ", ("image", data_url(file_of(PICTURE))), "?"),
    ]
    mark = "<|vision_start|><|image_pad|><|vision_end|>"
    text = f"<|im_start|>system\nsay<|im_end|>\n<|im_start|>user\nwhat is {mark}?<|im_end|>\n"
    expected = vectors(models["qwen"], [{"prompt": text, "multi_modal_data": {"image": PICTURE}}])
    assert_close(embedding(server.embed(model="qwen", messages=conversation)), expected)


def test_pages_and_queries_have_their_token_vectors(server: Client, models: dict[str, LLM]) -> None:
    url = data_url(file_of(PICTURE))
    answer = server.post(
        "/pooling", model="colpali", task="token_embed", messages=[message(("image", url)), message("what is it")]
    )
    assert answer.status_code == 200, answer.text
    expected = models["colpali"].token_embed([{"multi_modal_data": {"image": PICTURE}}, "what is it"], use_tqdm=False)
    for one, output in zip(answer.json()["data"], expected, strict=True):
        assert_close(torch.tensor(one["data"]), output.outputs.data)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_files_of_every_format_are_read(kind: str, server: Client, models: dict[str, LLM]) -> None:
    content = file_of(PICTURE, kind)
    answer = server.embed(model="clip", messages=message(("image", data_url(content, kind.lower()))))
    opened = Image.open(io.BytesIO(content)).convert("RGB")
    assert_close(embedding(answer), vectors(models["clip"], [{"multi_modal_data": {"image": opened}}]))


def bomb() -> bytes:
    """A file of a few kilobytes that holds 60 million pixels."""
    return file_of(Image.new("1", (10_000, 6_000)))


REFUSED = {
    "damaged": (data_url(file_of(PICTURE)[:300]), "damaged"),
    "no-base64": ("data:image/png;base64,a$b", "not valid base64"),
    "no-image": (data_url(b"hello"), "no image of the formats PNG, JPEG, WEBP, GIF"),
    "not-encoded": ("data:text/plain,hello", "in base64"),
    "other-format": (data_url(file_of(PICTURE, "BMP")), "no image of the formats"),
    "too-large": (data_url(bomb()), "10,000 x 6,000 pixels, the limit is 50,000,000"),
    "path": ("/etc/passwd", "image_url is /etc/passwd"),
    "file-url": ("file:///etc/passwd", "image_url is file:///etc/passwd"),
    "web": ("http://127.0.0.1/x.png", "--allow-image-urls"),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_is_no_image_is_refused(name: str, server: Client) -> None:
    url, words = REFUSED[name]
    answer = server.embed(model="clip", messages=message(("image", url)))
    assert answer.status_code == 400, answer.text
    assert words in answer.json()["error"]["message"]


def test_messages_that_the_model_cannot_read_are_refused(server: Client) -> None:
    url = data_url(file_of(PICTURE))
    for model, messages, words in (
        ("bert", message(("image", url)), "reads text alone"),
        ("clip", message("a cat", ("image", url)), "reads one or the other"),
        ("clip", [*message("a cat"), *message("a mat")], "no chat template: send one message"),
        ("qwen", message(("image", data_url(file_of(picture(1, 400, 1))))), "cannot be processed"),
    ):
        answer = server.embed(model=model, messages=messages)
        assert answer.status_code == 400, answer.text
        assert words in answer.json()["error"]["message"]
    part = [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]
    assert "only text and image_url" in server.embed(model="clip", messages=part).json()["error"]["message"]


def test_images_are_no_part_of_tokenize(server: Client) -> None:
    answer = server.post("/tokenize", model="qwen", messages=message(("image", data_url(file_of(PICTURE)))))
    assert answer.status_code == 400


class Web(BaseHTTPRequestHandler):
    """A web server with an image, redirects, and a body that does not end."""

    def do_GET(self) -> None:
        if self.path == "/image":
            self._answer(200, file_of(PICTURE))
        elif self.path.startswith("/again"):
            left = int(self.path.removeprefix("/again"))
            self._answer(302, b"", "/image" if left == 1 else f"/again{left - 1}")
        elif self.path == "/inside":
            self._answer(302, b"", "http://inside/image")
        elif self.path == "/drip":
            self._drip(b"HTTP/1.0 200 OK\r\n" + b"X: y\r\n" * 90 + b"\r\n")
        elif self.path == "/drop":
            self._drip(b"HTTP/1.0 200 OK\r\n\r\n" + bytes(90), 20)
        elif self.path == "/large":
            self._answer(200, bytes(100_000))
        else:
            self._answer(404, b"")

    def _drip(self, content: bytes, at_once: int = 1) -> None:
        with contextlib.suppress(OSError):
            self.wfile.write(content[:at_once])
            for place in range(at_once, len(content)):
                time.sleep(0.05)
                self.wfile.write(content[place : place + 1])

    def _answer(self, status: int, body: bytes, target: str | None = None) -> None:
        self.send_response(status)
        if target is not None:
            self.send_header("Location", target)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def web() -> Iterator[int]:
    server = HTTPServer(("127.0.0.1", 0), Web)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server.server_port
    server.shutdown()
    server.server_close()
    thread.join()


def as_if_public(host: str, port: int) -> str:
    """Takes the host `web` for a public one, which it is not."""
    return "127.0.0.1" if host == "web" else public_address(host, port)


def test_an_image_on_the_web_is_fetched(web: int) -> None:
    fetch = ImageFetcher(resolve=as_if_public)
    for path in ("image", "again3"):
        content = fetch(f"http://web:{web}/{path}", "the image")
        assert numpy.array_equal(numpy.asarray(Image.open(io.BytesIO(content))), numpy.asarray(PICTURE))


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("again4", "redirected more than 3 times"),
        ("large", "more than 50,000 bytes"),
        ("missing", "answers 404"),
    ],
)
def test_limits_of_fetching(path: str, words: str, web: int) -> None:
    fetch = ImageFetcher(resolve=as_if_public, max_bytes=50_000)
    with pytest.raises(InvalidPromptError, match=words):
        fetch(f"http://web:{web}/{path}", "the image")


@pytest.mark.parametrize("path", ["drip", "drop"])
def test_a_server_that_drips_has_no_more_time_than_another(path: str, web: int) -> None:
    began = time.monotonic()
    with pytest.raises(InvalidPromptError, match="takes too long"):
        ImageFetcher(resolve=as_if_public, timeout_s=0.4)(f"http://web:{web}/{path}", "the image")
    assert time.monotonic() - began < 2


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("1.1.1.1", True),
        ("2606:4700::1111", True),
        ("::ffff:1.1.1.1", True),
        ("64:ff9b::101:101", True),
        ("64:ff9b::7f00:1", False),
        ("64:ff9b::a01:203", False),
        ("64:ff9b:1::101:101", False),
        ("::127.0.0.1", False),
        ("::ffff:0:127.0.0.1", False),
        ("2002:7f00:1::", False),
        ("fec0::1", False),
        ("fe80::1%eth0", False),
        ("ff0e::1", False),
        ("224.0.0.1", False),
        ("100.64.0.1", False),
    ],
)
def test_what_is_public(address: str, expected: bool) -> None:
    assert is_public(address) is expected


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "2130706433", "0x7f.1", "[::1]", "10.1.2.3", "169.254.169.254", "[::ffff:127.0.0.1]", "0.0.0.0"],
)
def test_private_addresses_are_not_fetched_from(host: str, web: int) -> None:
    with pytest.raises(InvalidPromptError, match="not on the public internet"):
        ImageFetcher()(f"http://{host}:{web}/image", "the image")


def test_a_redirect_is_checked_like_the_first_url(web: int) -> None:
    def resolve(host: str, port: int) -> str:
        return "127.0.0.1" if host == "web" else public_address("127.0.0.1", port)

    with pytest.raises(InvalidPromptError, match="not on the public internet"):
        ImageFetcher(resolve=resolve)(f"http://web:{web}/inside", "the image")


def test_a_server_fetches_where_it_is_told_to(models: dict[str, LLM], web: int) -> None:
    server = Client(create_app(models["clip"].engine, ServerOptions(allow_image_urls=True)))
    answer = server.embed(messages=message(("image", f"http://127.0.0.1:{web}/image")))
    assert answer.status_code == 400
    assert "not on the public internet" in answer.json()["error"]["message"]


def test_python_takes_files_bytes_and_arrays(models: dict[str, LLM], tmp_path: Any) -> None:
    path = tmp_path / "picture.png"
    path.write_bytes(file_of(PICTURE))
    array = numpy.asarray(PICTURE)
    forms = [PICTURE, path, str(path), path.read_bytes(), data_url(path.read_bytes()), array, torch.tensor(array)]
    found = vectors(models["clip"], [{"multi_modal_data": {"image": form}} for form in forms])
    assert (found == found[0]).all()
    for form, words in ((3, "of type int"), ("no/such.png", "cannot be read"), (array.astype(float), "array of float")):
        with pytest.raises(InvalidPromptError, match=words):
            models["clip"].embed({"multi_modal_data": {"image": form}})
    for given, words in (({"video": 1}, "nothing else is read"), ({"image": []}, "has no images")):
        with pytest.raises(InvalidPromptError, match=words):
            models["clip"].embed({"multi_modal_data": given})


def test_text_models_refuse_images() -> None:
    with loaded(tiny_bert()) as llm, pytest.raises(InvalidPromptError, match="reads text alone"):
        llm.embed({"multi_modal_data": {"image": PICTURE}})


def test_pages_are_scored_and_ranked(server: Client, models: dict[str, LLM]) -> None:
    pages = [picture(1), picture(2), picture(3)]
    content = [{"content": message(("image", data_url(file_of(one))))[0]["content"]} for one in pages]
    prompts = [{"multi_modal_data": {"image": one}} for one in pages]
    expected = [float(one.outputs.score) for one in models["colpali"].score("what is it", prompts, use_tqdm=False)]
    scored = server.post("/score", model="colpali", queries="what is it", documents=content)
    assert scored.status_code == 200, scored.text
    assert_close(torch.tensor([one["score"] for one in scored.json()["data"]]), torch.tensor(expected))
    ranked = server.post("/rerank", model="colpali", query="what is it", documents=[*content, "a text"])
    assert ranked.status_code == 200, ranked.text
    by_index = {one["index"]: one for one in ranked.json()["results"]}
    assert_close(torch.tensor([by_index[i]["relevance_score"] for i in range(3)]), torch.tensor(expected))
    assert "document" not in by_index[0]
    assert by_index[3]["document"] == {"text": "a text"}


def test_a_pair_of_texts_takes_no_image(server: Client) -> None:
    part = {"content": message(("image", data_url(file_of(PICTURE))))[0]["content"]}
    answer = server.post("/score", model="bert", queries="a cat", documents=[part])
    assert answer.status_code == 400
    assert "reads text alone" in answer.json()["error"]["message"]
