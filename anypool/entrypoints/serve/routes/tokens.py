"""`/tokenize`, `/detokenize` and `/decode`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from starlette.responses import Response

from anypool.engine.prompt_options import PromptOptions
from anypool.engine.tokenization import Token
from anypool.entrypoints.serve.call import Call, Work, has
from anypool.entrypoints.serve.encoding import Stamp, json_answer
from anypool.entrypoints.serve.http_errors import ErrorStyle
from anypool.entrypoints.serve.route import Route
from anypool.entrypoints.serve.schemas.tokens import (
    Decoded,
    DecodeRequest,
    DetokenizeRequest,
    DetokenizeResponse,
    TEITokenizeRequest,
    Tokenized,
    TokenizeRequest,
    TokenizeResponse,
)
from anypool.entrypoints.serve.served import ServedModel
from anypool.errors import InvalidPromptError

# Characters, or ids, of one request: each token is an object for a while, and no other request runs meanwhile.
_LONGEST = 1_000_000


def tokenize(asked: TokenizeRequest, model: ServedModel) -> Work:
    """The token ids of a text or a conversation."""
    [text] = [asked.prompt] if asked.prompt is not None else model.render(asked)
    assert isinstance(text, str)  # the schema takes no images
    _check_size(len(text), "characters", "prompt" if asked.messages is None else "messages")
    options = asked.prompt_options(model.prompts, in_windows=model.in_windows)
    tokens = _tokens(text, model, options, special_tokens=asked.gets_special_tokens)
    body: dict[str, Any] = {
        "count": len(tokens),
        "max_model_len": model.engine.max_model_len,
        "tokens": [token.id for token in tokens],
    }
    if asked.return_token_strs:
        body["token_strs"] = [token.text for token in tokens]
    return _answered(body)


def tokenize_inputs(asked: TEITokenizeRequest, model: ServedModel) -> Work:
    """The tokens of texts with their places, the model's prompt before each where one is asked for."""
    options = model.prompt_options(asked)
    prefix = model.engine.prompt_text(options) if options.prompt is not None or options.prompt_name is not None else ""
    _check_size(sum(len(prefix) + len(text) for text in asked.inputs), "characters", "inputs")
    return _answered(
        [
            [_place(token) for token in _tokens(prefix + text, model, options, special_tokens=asked.add_special_tokens)]
            for text in asked.inputs
        ]
    )


def _tokens(text: str, model: ServedModel, options: PromptOptions, *, special_tokens: bool) -> list[Token]:
    """The tokens of a text that are left where the options cut it."""
    tokens = model.tokenizer.tokens(text, special_tokens=special_tokens)
    return [tokens[place] for place in model.engine.kept_places([token.id for token in tokens], options)]


def _place(token: Token) -> dict[str, Any]:
    added = token.is_special and token.start == token.stop
    return {
        "id": token.id,
        "text": token.text,
        "special": token.is_special,
        "start": None if added else token.start,
        "stop": None if added else token.stop,
    }


def detokenize(asked: DetokenizeRequest, model: ServedModel) -> Work:
    """The text of token ids."""
    _check_ids([asked.tokens], model, "tokens")
    return _answered({"prompt": model.tokenizer.decode(asked.tokens, skip_special_tokens=False)})


def decode(asked: DecodeRequest, model: ServedModel) -> Work:
    """The texts of token ids."""
    _check_ids(asked.ids, model, "ids")
    return _answered([model.tokenizer.decode(ids, skip_special_tokens=asked.skip_special_tokens) for ids in asked.ids])


def _check_size(size: int, of: str, field: str) -> None:
    if size > _LONGEST:
        raise InvalidPromptError(
            f"{field} has {size:,} {of}, the limit is {_LONGEST:,}: send several requests", param=field
        )


def _check_ids(lists: Sequence[Sequence[int]], model: ServedModel, field: str) -> None:
    _check_size(sum(map(len, lists)), "ids", field)
    most = model.engine.loaded.config.vocab_size
    wrong = next((one for ids in lists for one in ids if not 0 <= one < most), None)
    if wrong is not None:
        raise InvalidPromptError(f"{field} has {wrong}; this model's ids are 0 to {most - 1}", param=field)


def _answered(body: Any) -> Work:
    """Work that is done already."""

    def encode(results: list[torch.Tensor], stamp: Stamp) -> Response:
        return json_answer(body)

    return Work(requests=[], encode=encode)


ROUTES = (
    Route(
        paths=("/tokenize",),
        summary="Token ids of texts",
        calls=(
            Call(TEITokenizeRequest, tokenize_inputs, Tokenized, style=ErrorStyle.TEI, when=has("inputs")),
            Call(TokenizeRequest, tokenize, TokenizeResponse),
        ),
    ),
    Route(
        paths=("/detokenize",),
        summary="The text of token ids",
        calls=(Call(DetokenizeRequest, detokenize, DetokenizeResponse),),
    ),
    Route(
        paths=("/decode",),
        summary="The texts of token ids",
        calls=(Call(DecodeRequest, decode, Decoded, style=ErrorStyle.TEI),),
        style=ErrorStyle.TEI,
    ),
)
