"""Sparse vectors that need no forward pass: each token of a text has a weight in a table."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from anypool.adapters.load import LoadedModel
from anypool.adapters.router import read_table
from anypool.engine.request import Request
from anypool.engine.tokenization import Tokenizer, truncate
from anypool.errors import CheckpointFormatError, InvalidPromptError
from anypool.pooling.plan import PoolingPlan
from anypool.pooling.sparse import pack_weights, prune


class Lookup:
    """The table of a router's route, and the tokenizer that comes with it.

    As sentence-transformers' SparseStaticEmbedding has it: texts get no special tokens, and a word counts once however
    often it stands in a text.

    Args:
        loaded: A model whose router has a table.
        tokenizer: The model's own, which is taken where the table has none.

    Raises:
        CheckpointFormatError: The table or its tokenizer cannot be read.
    """

    def __init__(self, loaded: LoadedModel, tokenizer: Tokenizer | None) -> None:
        router, sparse = loaded.recipe.router, loaded.defaults.sparse
        assert router is not None and router.table is not None and sparse is not None
        folder = loaded.repository.subfolder(router.table)
        own = folder.exists("tokenizer.json") and tokenizer is not None
        found = Tokenizer.load(folder) if own else tokenizer
        if found is None:
            raise CheckpointFormatError(
                f"{loaded.config.name}: weights by token need the tokenizer; leave skip_tokenizer_init out"
            )
        self.tokenizer = found
        unknown = found.named_tokens.get("unk_token")
        self.table_V = read_table(
            loaded.repository,
            router.table,
            size=sparse.size,
            find=found.find,
            unknown=None if unknown is None else found.find(unknown),
        )

    def requests(
        self,
        prompts: Sequence[str | list[int]],
        plans: Sequence[PoolingPlan],
        names: Sequence[str],
        limit: int | None,
        *,
        side: str | None,
    ) -> list[Request]:
        """Requests that have their answers already.

        Args:
            prompts: Texts with their prompts before them, or token ids.
            plans: One per prompt.
            names: Of the requests.
            limit: Tokens after which a text is cut, beside the tokenizer's own limit.
            side: "right" or "left": which end is cut; None for the tokenizer's own.
        """
        encoded = iter(self.tokenizer.encode([one for one in prompts if isinstance(one, str)], special_tokens=False))
        limits = [one for one in (limit, self.tokenizer.max_length) if one is not None]
        made = []
        for index, (prompt, plan, name) in enumerate(zip(prompts, plans, names, strict=True)):
            ids = next(encoded) if isinstance(prompt, str) else prompt
            kept = truncate(ids, min(limits), side=side or self.tokenizer.truncation_side) if limits else ids
            for token in kept:
                if not 0 <= token < len(self.table_V):
                    raise InvalidPromptError(
                        f"input {index} has the token id {token}; this model's ids are 0 to {len(self.table_V) - 1}"
                    )
            request = Request(
                request_id=name,
                token_ids=list(kept),
                plan=plan,
                num_truncated_tokens=len(ids) - len(kept),
                is_answered=True,
            )
            request.future.set_result(self._weights(kept, plan))
            made.append(request)
        return made

    def _weights(self, ids: Sequence[int], plan: PoolingPlan) -> torch.Tensor:
        indices_K = torch.tensor(sorted(set(ids)), dtype=torch.int64)
        values_K = self.table_V[indices_K]
        kept_K = values_K != 0
        return prune(pack_weights(indices_K[kept_K], values_K[kept_K]), plan.max_active_dims)
