"""The words that clients have for what a text is, and the prompts that checkpoints have for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from anypool.errors import InvalidParameterError

# What a text is for -> what clients call it, and the names under which checkpoints keep their prompt for it.
_QUERY = ("query", "search_query", "retrieval.query", "retrieval_query", "s2p_query", "web_search_query", "queries")
_DOCUMENT = ("document", "search_document", "retrieval.passage", "retrieval_document", "passage", "corpus", "documents")
_USES: tuple[tuple[str, ...], ...] = (
    _QUERY,
    _DOCUMENT,
    ("classification",),
    ("clustering", "separation"),
    ("text-matching", "sts", "semantic_similarity", "sentence_similarity"),
)


@dataclass(frozen=True)
class NamedPrompts:
    """A model's prompts by name, found by whatever name a client has for them.

    Attributes:
        prompts: The texts.
        has_sides: Whether the model reads queries and documents each in its way, with a prompt of its own where it has
            one: what a text is then says no more than that.
        has_tasks: Whether each prompt comes with an adapter, so that without one a text would be read for no task.
    """

    prompts: Mapping[str, str] = field(default_factory=dict)
    has_sides: bool = False
    has_tasks: bool = False

    def choose(
        self, *, prompt: str | None, prompt_name: str | None, input_type: str | None, task: str | None
    ) -> tuple[str | None, str | None]:
        """A prompt's name or its text, of which at most one is set: where neither is, the default one applies.

        Raises:
            InvalidParameterError: Several fields say different things, or a word is unknown.
        """
        given = {"prompt": prompt, "prompt_name": prompt_name, "input_type": input_type, "task": task}
        named = {name: value for name, value in given.items() if value is not None}
        if not named:
            return None, None
        if len(named) > 1:
            first, *others = named
            raise InvalidParameterError(
                f"{first} and {' and '.join(others)} are ways to say the same: give one", param=first
            )
        [(name, value)] = named.items()
        if name == "prompt":
            return None, value
        if name == "prompt_name":
            return value, None  # the engine knows which there are
        if self.has_sides:
            self.is_query(**{name: value})
            return None, None
        return self._for_use(name, value)

    def is_query(self, *, input_type: str | None = None, task: str | None = None) -> bool | None:
        """Which side a text is on, by the words for what it is; None where there are none.

        Raises:
            InvalidParameterError: It is neither a query nor a document.
        """
        for name, word in (("input_type", input_type), ("task", task)):
            if word is not None and word.lower() in _QUERY:
                return True
            if word is not None and word.lower() in _DOCUMENT:
                return False
            if word is not None:
                raise InvalidParameterError(
                    f"{name}={word!r} means nothing to this model, which knows 'query' and 'document'", param=name
                )
        return None

    def _for_use(self, name: str, word: str) -> tuple[str | None, str | None]:
        """The prompt for a use. A model that has none for documents takes them bare; for others its default applies."""
        if word in self.prompts:
            return word, None
        use = next((use for use in _USES if word.lower() in use), ())
        by_lower_case = {key.lower(): key for key in self.prompts}
        own = next((by_lower_case[key] for key in use if key in by_lower_case), None)
        if not use or (own is None and self.has_tasks):
            uses = () if self.has_tasks else tuple(use[0] for use in _USES)
            known = ", ".join(map(repr, dict.fromkeys([*self.prompts, *uses])))
            raise InvalidParameterError(f"{name}={word!r} is unknown; known: {known}", param=name)
        if own is None and use is _DOCUMENT:
            return None, ""
        return own, None
