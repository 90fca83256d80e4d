"""Token ids are those of transformers' tokenizer, and truncation keeps what stands around the text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sentence_transformers.sentence_transformer.modules import Pooling
from transformers import AutoTokenizer

from anypool import PoolingTask
from anypool.engine.prompt_options import PromptOptions
from anypool.engine.tokenization import Tokenizer, truncate
from anypool.errors import CheckpointFormatError, InvalidPromptError
from anypool.model_executor.weights.repository import Repository
from tests.helpers import (
    HIDDEN,
    RAGGED,
    byte_tokenizer,
    copy_of,
    edit_json,
    loaded,
    new_folder,
    save_sentence_transformer,
    tiny_bert,
    wordpiece_tokenizer,
)

TEXTS = [*RAGGED, "", " ", "ü 🦊\n\x00 [CLS] </s>"]

TEMPLATES = {
    "$A": ([], []),
    "<s> $A": ([1], []),
    "$A </s>": ([], [2]),
    "<s> $A </s>": ([1], [2]),
    "<s> <s> $A </s> </s>": ([1, 1], [2, 2]),
}


def saved(tokenizer: Any) -> Path:
    folder = new_folder("tokenizer")
    tokenizer.save_pretrained(folder)
    return folder


def load(folder: Path, **options: Any) -> Tokenizer:
    return Tokenizer.load(Repository.open(str(folder)), **options)


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_special_tokens_around_a_text_are_found(template: str) -> None:
    tokenizer = load(saved(byte_tokenizer(template)))
    assert (tokenizer.prefix_ids, tokenizer.suffix_ids) == TEMPLATES[template]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("limit", [4, 5, 12])
@pytest.mark.parametrize("template", TEMPLATES)
def test_truncation_equals_that_of_transformers(template: str, limit: int, side: str) -> None:
    folder = saved(byte_tokenizer(template, truncation_side=side))
    theirs, ours = AutoTokenizer.from_pretrained(folder), load(folder)
    assert ours.truncation_side == side
    for text, ids in zip(TEXTS, ours.encode(TEXTS), strict=True):
        assert ids == theirs(text)["input_ids"]
        cut = truncate(ids, limit, side=side, prefix=ours.prefix_ids, suffix=ours.suffix_ids)
        assert cut == theirs(text, truncation=True, max_length=limit)["input_ids"]


def test_wordpiece_ids_equal_those_of_transformers() -> None:
    folder = saved(wordpiece_tokenizer())
    assert load(folder).encode(TEXTS) == AutoTokenizer.from_pretrained(folder)(TEXTS)["input_ids"]


ids = st.lists(st.integers(10, 20), max_size=12)
ends = st.lists(st.integers(1, 3), max_size=2)


@given(prefix=ends, suffix=ends, body=ids, limit=st.integers(1, 16), side=st.sampled_from(["left", "right"]))
def test_truncated_ids_keep_both_ends_and_one_end_of_the_body(
    prefix: list[int], suffix: list[int], body: list[int], limit: int, side: str
) -> None:
    whole = prefix + body + suffix
    if limit < len(prefix) + len(suffix) and len(whole) > limit:
        with pytest.raises(InvalidPromptError, match="leaves no room"):
            truncate(whole, limit, side=side, prefix=prefix, suffix=suffix)
        return
    room = max(0, limit - len(prefix) - len(suffix))
    kept = body[:room] if side == "right" else body[max(0, len(body) - room) :]
    assert truncate(whole, limit, side=side, prefix=prefix, suffix=suffix) == prefix + kept + suffix


def test_ids_without_the_special_tokens_are_cut_as_they_are() -> None:
    body = list(range(10, 20))
    assert truncate(body, 4, side="right", prefix=[1], suffix=[2]) == [10, 11, 12, 13]
    assert truncate(body, 4, side="left", prefix=[1], suffix=[2]) == [16, 17, 18, 19]
    assert truncate([*body, 2], 4, side="left", prefix=[1], suffix=[2]) == [17, 18, 19, 2]


def test_the_length_of_a_prompt_leaves_out_a_special_token_at_its_end() -> None:
    assert load(saved(byte_tokenizer("<s> $A </s>"))).prompt_length("abc") == 4
    assert load(saved(byte_tokenizer("<s> $A"))).prompt_length("abc") == 4
    assert load(saved(byte_tokenizer("$A"))).prompt_length("abc") == 3


def test_special_tokens_are_those_of_tokenizer_json_as_in_transformers() -> None:
    folder = saved(byte_tokenizer("<s> $A"))
    edit_json(folder / "tokenizer_config.json", lambda config: config.update(add_eos_token=True))
    assert load(folder).encode(["ab"])[0] == AutoTokenizer.from_pretrained(folder)("ab")["input_ids"]


@pytest.mark.parametrize("lower", [True, False])
@pytest.mark.parametrize("strip", [True, False, None])
def test_settings_of_a_bert_tokenizer_win_over_tokenizer_json(lower: bool, strip: bool | None) -> None:
    folder = copy_of(tiny_bert())
    settings = {"tokenizer_class": "BertTokenizer", "do_lower_case": lower, "strip_accents": strip}
    content = json.loads((folder / "tokenizer.json").read_text())
    content["normalizer"] = {
        "type": "BertNormalizer",
        "clean_text": True,
        "handle_chinese_chars": True,
        "strip_accents": None,
        "lowercase": not lower,
    }
    (folder / "tokenizer.json").write_text(json.dumps(content))
    edit_json(folder / "tokenizer_config.json", lambda config: config.update(settings))
    text = "The CAT sat, ünïcode Ünïcode"
    assert load(folder).encode([text])[0] == AutoTokenizer.from_pretrained(folder)(text)["input_ids"]


def test_a_checkpoint_with_a_vocabulary_file_alone_is_tokenised() -> None:
    folder = copy_of(tiny_bert())
    (folder / "tokenizer.json").unlink()
    vocab = wordpiece_tokenizer().get_vocab()
    (folder / "vocab.txt").write_text("\n".join(sorted(vocab, key=vocab.__getitem__)))
    edit_json(
        folder / "tokenizer_config.json",
        lambda config: config.update(tokenizer_class="BertTokenizer", do_lower_case=False),
    )
    assert load(folder).encode(RAGGED) == load(tiny_bert()).encode(RAGGED)


def test_texts_are_encoded_some_at_a_time_so_that_an_interrupt_need_not_wait_for_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer = load(saved(wordpiece_tokenizer()))
    texts = [f"a cat {i}" for i in range(25)]
    whole = tokenizer.encode(texts)
    monkeypatch.setattr("anypool.engine.tokenization._TEXTS_AT_ONCE", 4)
    assert tokenizer.encode(texts) == whole
    assert tokenizer.encode([]) == []

    class Interrupted:
        calls = 0

        def encode_batch_fast(self, some: list[str], **_: Any) -> list[Any]:
            self.calls += 1
            assert len(some) <= 4
            raise KeyboardInterrupt

    interrupted = Interrupted()
    monkeypatch.setattr(tokenizer, "_backend", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tokenizer.encode(texts)
    assert interrupted.calls == 1


def test_a_damaged_tokenizer_is_named() -> None:
    folder = copy_of(tiny_bert())
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(CheckpointFormatError, match=r"tokenizer.json cannot be read"):
        load(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointFormatError, match=r"no tokenizer.json, and transformers cannot build a tokenizer"):
        load(folder)
    (folder / "tokenizer_config.json").write_text("[]")
    with pytest.raises(CheckpointFormatError, match=r"tokenizer_config.json is not an object"):
        load(folder)


@pytest.mark.parametrize("text", TEXTS)
def test_tokens_and_their_texts_are_those_of_transformers(text: str) -> None:
    reference, tokenizer = AutoTokenizer.from_pretrained(tiny_bert()), load(tiny_bert())
    ids = reference(text)["input_ids"]
    assert [token.id for token in tokenizer.tokens(text)] == ids
    assert [token.text for token in tokenizer.tokens(text)] == reference.convert_ids_to_tokens(ids)
    assert [token.id for token in tokenizer.tokens(text, special_tokens=False)] == ids[1:-1]
    for skip in (True, False):
        assert tokenizer.decode(ids, skip_special_tokens=skip) == reference.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize(("side", "kept"), [("right", "the cat"), ("left", "a mat")])
def test_a_text_is_shortened_to_whole_tokens(side: str, kept: str) -> None:
    tokenizer = load(tiny_bert())
    assert tokenizer.shorten("the cat sat on a mat", 2, side=side) == (kept, 4)
    assert tokenizer.shorten("the cat", 2, side=side) == ("the cat", 0)


def test_special_tokens_may_be_left_out_of_prompts() -> None:
    with loaded(tiny_bert()) as llm:
        for texts, prompt in ((["the cat", "a"], None), (["a mat"], "the ")):
            options = PromptOptions(special_tokens=False, prompt=prompt)
            requests = llm.engine.prepare(texts, PoolingTask.EMBED, None, options)
            reference = AutoTokenizer.from_pretrained(tiny_bert())
            expected = [reference((prompt or "") + text, add_special_tokens=False)["input_ids"] for text in texts]
            assert [request.token_ids for request in requests] == expected


def test_a_prompt_that_is_not_pooled_is_as_long_without_special_tokens_as_it_is() -> None:
    folder = save_sentence_transformer(tiny_bert(), Pooling(HIDDEN, "mean", include_prompt=False))
    with loaded(folder) as llm:
        for special_tokens, skipped in ((True, 3), (False, 2)):
            options = PromptOptions(special_tokens=special_tokens, prompt="the story ")
            [request] = llm.engine.prepare(["a cat"], PoolingTask.EMBED, None, options)
            assert request.skip == skipped
