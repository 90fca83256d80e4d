"""Texts that a checkpoint puts into its chat template give sentence-transformers' vectors."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_transformers import MultiVectorEncoder, SentenceTransformer
from sentence_transformers.base.modules import Normalize, Transformer
from sentence_transformers.base.modules.dense import Dense
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
from sentence_transformers.sentence_transformer.modules import Pooling

from anypool import LLM, PoolerConfig
from anypool.entrypoints.cli import main
from anypool.entrypoints.serve.app import create_app
from anypool.errors import CheckpointFormatError, ConfigError, InvalidPromptError, UnsupportedArchitectureError
from tests.entrypoints.conftest import Client
from tests.helpers import HIDDEN, RAGGED, assert_close, copy_of, edit_json, loaded, new_folder, tiny_llama, vectors
from tests.multimodal.checkpoints import picture, qwen2_vl_folder

TEXTS = ["a cat", "", "  the mat, and é 😀 ", "<s> a </s>", RAGGED[1]]
FLAT = (
    "{{ bos_token }}{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }};{% endfor %}"
    "{% if add_generation_prompt %}answer{{ mood }}:{% endif %}</s>"
)
STRUCTURED = FLAT.replace(
    "{{ message['content'] }}", "{% for part in message['content'] %}{{ part['text'] }}{% endfor %}"
)


@cache
def chat(template: str = FLAT, mode: str = "mean", **settings: Any) -> Path:
    """An embedding model that sentence-transformers saved with its chat template."""
    backbone = copy_of(tiny_llama(template="<s> $A </s>"))
    (backbone / "chat_template.jinja").write_text(template)
    transformer = Transformer(str(backbone))
    folder = new_folder("chat")
    model = SentenceTransformer(
        modules=[transformer, Pooling(HIDDEN, mode), Normalize()], prompts={"query": "find: "}, device="cpu"
    )
    model.save(str(folder), create_model_card=False)
    if settings:
        edit_json(folder / "sentence_bert_config.json", lambda config: config.update(settings))
    return folder


def reference(folder: Path) -> SentenceTransformer:
    return SentenceTransformer(str(folder), device="cpu", local_files_only=True)


def encoded(folder: Path, texts: list[Any], **options: Any) -> torch.Tensor:
    rows: torch.Tensor = reference(folder).encode(texts, convert_to_tensor=True, show_progress_bar=False, **options)
    return rows


ANSWER = {"chat_template": {"add_generation_prompt": True, "mood": "!"}}


@pytest.mark.parametrize("mode", ["mean", "lasttoken"])
@pytest.mark.parametrize("options", [{}, {"processing_kwargs": ANSWER}], ids=["plain", "answer"])
@pytest.mark.parametrize("template", [FLAT, STRUCTURED], ids=["flat", "structured"])
def test_vectors_are_those_of_sentence_transformers(template: str, options: dict[str, Any], mode: str) -> None:
    folder = copy_of(chat(template, mode))
    edit_json(folder / "sentence_bert_config.json", lambda config: config.update(options))
    with loaded(folder) as llm:
        assert_close(vectors(llm, TEXTS), encoded(folder, TEXTS))
        named = vectors(llm, TEXTS, prompt_name="query")
        assert_close(named, encoded(folder, TEXTS, prompt_name="query"))
        assert_close(vectors(llm, TEXTS, prompt="find: "), named, atol=1e-6)


@pytest.mark.parametrize("mode", ["mean", "lasttoken"])
def test_what_stands_behind_a_text_is_kept_where_it_is_cut(mode: str) -> None:
    folder = chat(FLAT, mode)
    texts = [RAGGED[1] * 5, "a cat"]
    with loaded(folder) as llm:
        for options in ({}, {"prompt_name": "query"}):
            cut = vectors(llm, texts, truncate_prompt_tokens=-1, **options)
            assert_close(cut, encoded(folder, texts, **options))


def test_token_ids_and_conversations_are_read_as_they_are() -> None:
    folder = chat()
    messages = [{"role": "system", "content": "find: "}, {"role": "user", "content": "a cat"}]
    with loaded(folder) as llm:
        [output] = llm.embed("a cat", prompt_name="query", use_tqdm=False)
        assert llm.engine.tokenizer is not None
        assert llm.engine.tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False) == (
            "<s><system>find: ;<user>a cat;</s>"
        )
        by_ids = vectors(llm, [{"prompt_token_ids": output.prompt_token_ids}])
        response = Client(create_app([llm.engine])).embed(messages=messages)
    assert_close(by_ids[0], output.outputs.data, atol=1e-6)
    assert response.status_code == 200, response.text
    assert_close(torch.tensor(response.json()["data"][0]["embedding"]), output.outputs.data, atol=1e-6)


def test_info_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", str(chat()), "--device", "cpu"]) == 0
    assert "texts           in the chat template" in capsys.readouterr().out


def test_images_stand_in_the_template() -> None:
    """sentence-transformers needs torchvision to read this folder, so it is written by hand."""
    folder = copy_of(qwen2_vl_folder())
    (folder / "chat_template.jinja").write_text(
        "{% for message in messages %}<{{ message['role'] }}>{% for part in message['content'] %}"
        "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}"
        "{% endif %}{% endfor %};{% endfor %}"
    )
    with loaded(folder) as llm:
        plain = vectors(llm, ["<user>a cat;", *pictured(f"<user>{IMAGE};", f"<user>{IMAGE}a cat;", f"{IMAGE}a cat")])
    modules = [{"type": "Transformer", "path": ""}, {"type": "Pooling", "path": "1_Pooling"}]
    modules.append({"type": "Normalize", "path": "2_Normalize"})
    output = {"method": "forward", "method_output_name": "last_hidden_state"}
    modalities = {"text": output, "image": output, "message": {**output, "format": "structured"}}
    (folder / "1_Pooling").mkdir()
    for name, content in (
        ("modules.json", modules),
        ("1_Pooling/config.json", {"embedding_dimension": HIDDEN, "pooling_mode": "lasttoken"}),
        ("sentence_bert_config.json", {"modality_config": modalities, "module_output_name": "token_embeddings"}),
    ):
        (folder / name).write_text(json.dumps(content))
    with loaded(folder) as llm:
        found = vectors(llm, ["a cat", *pictured(None, "a cat", f"{IMAGE}a cat")])
    assert_close(found, plain, atol=1e-6)


IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"


def pictured(*texts: str | None) -> list[dict[str, Any]]:
    """Prompts with a picture: of the picture alone, and of a text that may say where it stands."""
    image = {"multi_modal_data": {"image": picture(1)}}
    return [image if text is None else {"prompt": text, **image} for text in texts]


def test_what_does_not_go_with_a_template_is_refused() -> None:
    with loaded(chat()) as llm:
        with pytest.raises(InvalidPromptError, match=r"input 0 is a pair of texts, and .* in its chat template"):
            llm.embed({"prompt": "a", "text_pair": "b"})
        with pytest.raises(InvalidPromptError, match=r"input 0 is a text with spans, and .* in its chat template"):
            llm.embed_spans("a cat", [(0, 2)])
    with pytest.raises(ConfigError, match=r"enable_chunked_processing is not supported for .* chat template"):
        LLM(chat(), device="cpu", pooler_config=PoolerConfig(enable_chunked_processing=True))
    folder = copy_of(chat())
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(CheckpointFormatError, match="puts texts into a chat template, and there is none"):
        LLM(folder, device="cpu")


def test_token_vectors_in_a_template_are_refused() -> None:
    backbone = copy_of(tiny_llama())
    (backbone / "chat_template.jinja").write_text(FLAT)
    dense = Dense(HIDDEN, 16, bias=False, module_input_name="token_embeddings")
    folder = new_folder("chat-tokens")
    modules = [Transformer(str(backbone)), dense, MultiVectorMask(), Normalize(module_input_name="token_embeddings")]
    MultiVectorEncoder(modules=modules, device="cpu").save(str(folder), create_model_card=False)
    with pytest.raises(UnsupportedArchitectureError, match="puts texts into a chat template, which is not supported"):
        LLM(folder, device="cpu")
