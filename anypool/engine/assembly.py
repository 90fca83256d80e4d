"""Token ids that fit the model, and a plan -> a request."""

from __future__ import annotations

import itertools

from anypool.adapters.load import LoadedModel
from anypool.engine.fitting import Fitted
from anypool.engine.request import Request
from anypool.engine.windows import combination
from anypool.errors import InvalidPromptError, PromptTooLongError
from anypool.model_executor.images import ImageInputs
from anypool.pooling.plan import PoolingPlan
from anypool.pooling.tasks import PoolingTask

# What cannot be made of a text's windows.
_WHOLE = {PoolingTask.REWARD: "reward", PoolingTask.SPARSE_EMBED: "sparse vector of this model"}


class Assembly:
    """Makes the requests of one loaded model, and numbers them.

    Args:
        loaded: The model.
        max_model_len: Longest prompt in tokens that is run as one.
    """

    def __init__(self, loaded: LoadedModel, max_model_len: int) -> None:
        self._loaded, self._max_model_len = loaded, max_model_len
        self._ids = itertools.count()
        self._left_out = loaded.facts.left_out

    def next_name(self) -> str:
        """A name for a request that no other has."""
        return str(next(self._ids))

    def request(
        self,
        tokens: Fitted,
        plan: PoolingPlan,
        index: int,
        *,
        best: bool = False,
        images: ImageInputs | None = None,
        also: tuple[Request, ...] = (),
    ) -> Request:
        """A request for a prompt, or one whose parts are its windows.

        Args:
            tokens: The prompt's.
            plan: What it gets.
            index: Its place among the inputs, for messages.
            best: Whether, of the scores of its windows, the best counts.
            images: What stands in the places of its image tokens.
            also: Others that it answers, of the same prompt, so that their parts are the same windows.

        Raises:
            PromptTooLongError: It is in windows, and its task cannot be done in them.
        """
        name = self.next_name()
        if not tokens.windows:
            return Request(
                request_id=name,
                token_ids=tokens.ids,
                plan=plan,
                token_type_ids=tokens.types,
                images=images,
                skip=tokens.skip,
                num_keys=tokens.num_keys,
                num_truncated_tokens=tokens.truncated,
                also=also,
            )
        combine = combination(plan, tokens.windows, tokens.ids, best=best, defaults=self._loaded.defaults)
        if combine is None:
            raise PromptTooLongError(
                f"input {index} has {len(tokens.ids):,} tokens, the limit is {self._max_model_len:,}: a "
                f"{_WHOLE[plan.task]} is about a whole text, so it is not run in windows; pass "
                "truncate_prompt_tokens=-1, or shorten it"
            )
        parts = tuple(
            Request(
                request_id=f"{name}.{number}",
                token_ids=window.token_ids,
                plan=part_plan,
                token_type_ids=window.token_type_ids,
                skip=tokens.skip,
                also=tuple(one.parts[number] for one in also),
            )
            for number, (window, part_plan) in enumerate(combine.parts)
        )
        return Request(
            request_id=name,
            token_ids=tokens.ids,
            plan=plan,
            num_truncated_tokens=tokens.truncated,
            parts=parts,
            combine=combine,
            also=also,
        )

    def check(self, tokens: Fitted, index: int, plan: PoolingPlan) -> None:
        """Checks that the model has these tokens, and that something is left to pool.

        Raises:
            InvalidPromptError: It is not so.
        """
        ids = tokens.ids
        if not ids:
            raise InvalidPromptError(
                f"input {index} has no tokens: it is empty, and this model's tokenizer adds no special tokens"
            )
        vocab = self._loaded.config.vocab_size
        if min(ids) < 0 or max(ids) >= vocab:
            wrong = next(i for i in ids if not 0 <= i < vocab)
            raise InvalidPromptError(
                f"input {index} has the token id {wrong}; this model's ids are 0 to {vocab - 1}: "
                "it may be of another tokenizer, and texts are safer"
            )
        if plan.task is PoolingTask.TOKEN_EMBED and len(ids) <= self._left_out:
            raise InvalidPromptError(
                f"input {index} has no token vectors: {self._loaded.config.name} gives none to its first token, and it "
                "has no other"
            )
        if tokens.skip >= len(ids):
            raise InvalidPromptError(
                f"input {index} has no tokens left to pool: all {len(ids)} belong to the prompt, "
                "which this model leaves out of pooling"
            )
        if plan.step_tag_id is not None and plan.step_tag_id not in ids:
            raise InvalidPromptError(
                f"input {index} has no step tag: the token {plan.step_tag_id} must stand after each step",
                param="step_tag_id",
            )
