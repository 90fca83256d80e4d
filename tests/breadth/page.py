"""docs/architectures.md, out of the results."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

from tests.breadth.overrides import NOT_TEXT

WORKS = {
    "native": "native",
    "packed": "packed",
    "padded": "padded",
    "equal_lengths": "equal lengths",
    "alone": "alone",
}
TASKS = {
    "causal_lm": ("Causal LMs", "hidden states of every token, as `token_embed` gives them"),
    "encoder": ("Encoders", "the same; base models, masked LMs, and the encoders of encoder-decoders"),
    "classify": ("Sequence classification", "raw scores"),
    "token_classify": ("Token classification", "raw scores of every token"),
}

_HEAD = """\
# Architectures

Every text architecture that transformers {version} lists, saved tiny and random by transformers, loaded here, and
compared with transformers' own forward pass in float32, each text alone: entries differ by at most 1e-5, or by no more
than twice what float32 itself costs against float64; and the vectors of a text alone and in a mixed batch by at most
1e-6. `scripts/breadth` tries them all and writes this page.

- **native**: a class of anypool's own. **packed**: transformers' module on packed batches, at full speed.
- **padded**: batches of near lengths with a mask. **equal lengths**: batches of texts of one length, where padding
  would change a text. **alone**: one text at a time.
- **refused**: loading ends with an error that says why. **not tried**: transformers' own class does not run on text by
  itself, or no tiny configuration of it was found.

{counts}
"""


def share(results: Iterable[dict[str, Any]], task: str) -> tuple[int, int]:
    """How many architectures of a task work, of how many that transformers itself runs."""
    tried = [result["outcome"] for result in results if result["task"] == task and result["outcome"] != "no reference"]
    return sum(outcome in WORKS for outcome in tried), len(tried)


def page(results: list[dict[str, Any]], version: str) -> str:
    """The text of the page."""
    counts = "| | work | of | " + " | ".join((*WORKS.values(), "refused", "not tried")) + " |\n"
    counts += "| --- |" + " --- |" * (len(WORKS) + 4) + "\n"
    for task, (title, _) in TASKS.items():
        found = Counter(result["outcome"] for result in results if result["task"] == task)
        refused = found["refused"] + found["failed"] + found["wrong"]
        columns = (*share(results, task), *(found[name] for name in WORKS), refused, found["no reference"])
        counts += f"| {title} | " + " | ".join(map(str, columns)) + " |\n"
    parts = [_HEAD.format(version=version, counts=counts)]
    for task, (title, compared) in TASKS.items():
        rows = [result for result in results if result["task"] == task]
        parts.append(f"## {title}\n\nCompared: {compared}.\n\n| architecture | runs | why |\n| --- | --- | --- |\n")
        parts[-1] += "".join(map(_row, sorted(rows, key=lambda result: result["architecture"].lower())))
    others = "".join(f"| `{name}` | {what} |\n" for name, what in sorted(NOT_TEXT.items()))
    parts.append(
        f"## Not models of text\n\nOf the same lists, and left out.\n\n| name | reads |\n| --- | --- |\n{others}"
    )
    return "\n".join(parts)


def _row(result: dict[str, Any]) -> str:
    outcome = result["outcome"]
    runs = WORKS.get(outcome) or {"no reference": "not tried"}.get(outcome, "refused")
    return f"| `{result['architecture']}` | {runs} | {_short(result['why'])} |\n"


def _short(why: str) -> str:
    """A reason in one line that is the same in every run."""
    text = re.sub(r"\s+", " ", why).replace("MODEL: ", "").replace("|", "\\|").replace("<", "&lt;")
    text = re.sub(r"differ by [\d.e+-]+ of their length", "differ", text)
    text = re.sub(r"\w+ cannot run through transformers: ", "", text)
    return text if len(text) <= 220 else text[:217] + "..."
