"""Runs the sides in turns and collects what they answer."""

from __future__ import annotations

import json
import logging
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anypool.entrypoints.bench.side import SideError, SideProcess, SideSpec
from anypool.entrypoints.bench.texts import SETS, WORDS, make_texts
from anypool.errors import EngineError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is measured.

    Attributes:
        model: A folder, a file or a hub id, for all sides.
        gguf: The same model as a GGUF file, for llama.cpp.
        sides: What is run.
        sets: Names of sets of texts.
        rounds: How often each side embeds each set.
        texts: How many texts a set has.
        profile: Whether to say where our own time goes.
    """

    model: str
    gguf: str | None
    sides: tuple[SideSpec, ...]
    sets: tuple[str, ...]
    rounds: int
    texts: int
    profile: bool


@dataclass
class Measured:
    """What is known about a side.

    Attributes:
        failure: Why it gave no more than the rest holds; None where it gave all.
        seconds: Of each round, by set.
        vectors: `[N, E]` by set, of length 1.
        breakdown: Seconds by what they go to, on the mixed set.
    """

    spec: SideSpec
    failure: str | None = None
    dtype: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    startup_s: float | None = None
    peak_bytes: int | None = None
    seconds: dict[str, list[float]] = field(default_factory=dict)
    vectors: dict[str, NDArray[np.float64]] = field(default_factory=dict)
    flop_per_s: float | None = None
    flop_per_token: int | None = None
    breakdown: dict[str, float] | None = None

    @property
    def is_ours(self) -> bool:
        return self.spec.name == "anypool"

    def median_s(self, name: str) -> float:
        return statistics.median(self.seconds[name])


@dataclass
class TextSet:
    """Texts as they were run, or why they were not."""

    name: str
    texts: int = 0
    tokens: int = 0
    skipped: str | None = None


@dataclass
class Results:
    """All that a report is made of."""

    plan: Plan
    sets: list[TextSet]
    sides: list[Measured]


class Driver:
    """A run of the benchmark.

    Args:
        plan: What is measured.
        folder: For texts, vectors and what the sides print.
    """

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan = plan
        self.folder = folder
        self.sides = [Measured(spec) for spec in plan.sides]
        self.processes: dict[int, SideProcess] = {}  # by place in `sides`, those that run

    def run(self) -> Results:
        """Measures. A side that fails is left out from then on; whatever ends this ends all sides."""
        try:
            with self._counter() as counter:
                facts = counter.ask("facts")
                sets = [self._prepare(name, counter, facts["max_tokens"]) for name in self.plan.sets]
            self._start(facts)
            for one in sets:
                if one.skipped is None:
                    self._warm_up(one.name)
                    self._measure(one.name)
            self._look_inside(sets)
            for process in self.processes.values():
                process.close()
            return Results(self.plan, sets, self.sides)
        finally:
            for process in self.processes.values():
                process.kill()

    @contextmanager
    def _counter(self) -> Iterator[SideProcess]:
        """Our engine for a moment: it knows what a text's tokens are, whoever is measured."""
        logger.info("bench: counting tokens")
        process = SideProcess(SideSpec("anypool"), self.folder / "counter.log")
        try:
            process.ask("load", model=self.plan.model, dtype="auto", prompt="", gguf=None)
            yield process
            process.close()
        except SideError as error:
            raise EngineError(f"anypool itself cannot count the tokens: {error}") from None
        finally:
            process.kill()

    def _prepare(self, name: str, counter: SideProcess, max_tokens: int) -> TextSet:
        words = self._write("words", [" ".join(WORDS * 8)])
        per_word = counter.ask("count", file=words)["tokens"] / (len(WORDS) * 8)
        longest = SETS[name][1]
        if name == "long" and max_tokens < longest:
            return TextSet(name, skipped=f"the model takes {max_tokens:,} tokens, these texts have up to {longest:,}")
        texts = make_texts(name, self.plan.texts, tokens_per_word=per_word)
        tokens = counter.ask("count", file=self._write(name, texts))["tokens"]
        return TextSet(name, len(texts), tokens)

    def _start(self, facts: dict[str, Any]) -> None:
        for place, side in enumerate(self.sides):
            if side.spec.name == "llama.cpp" and not facts["causal"]:
                side.failure = "it pools the last token here, and this model is no causal LM"
                continue
            logger.info("bench: starting %s", side.spec.label)
            began = time.perf_counter()
            try:
                self.processes[place] = SideProcess(side.spec, self.folder / f"side{place}.log")
            except OSError as error:
                side.failure = f"{side.spec.python}: {error.strerror}"
                continue
            answer = self._ask(
                place, "load", model=self.plan.model, dtype=side.spec.dtype, prompt=facts["prompt"], gguf=self.plan.gguf
            )
            if answer is not None:
                side.startup_s = time.perf_counter() - began
                side.dtype, side.versions = answer["dtype"], answer["versions"]

    def _warm_up(self, name: str) -> None:
        for place in list(self.processes):
            file = self.folder / f"vectors{place}.npy"
            if self._ask(place, "embed", file=self._file(name), keep=str(file)) is not None:
                vectors_NE = np.load(file).astype(np.float64)
                norms_N1 = np.linalg.norm(vectors_NE, axis=-1, keepdims=True)
                self.sides[place].vectors[name] = vectors_NE / np.maximum(norms_N1, 1e-12)

    def _measure(self, name: str) -> None:
        for turn in range(self.plan.rounds):
            logger.info("bench: %s texts, round %d of %d", name, turn + 1, self.plan.rounds)
            for place in list(self.processes):
                answer = self._ask(place, "embed", file=self._file(name))
                if answer is not None:
                    self.sides[place].seconds.setdefault(name, []).append(answer["seconds"])

    def _look_inside(self, sets: Sequence[TextSet]) -> None:
        """Memory of all, before what our sides measure about themselves adds to it."""
        for place in list(self.processes):
            if (answer := self._ask(place, "memory")) is not None:
                self.sides[place].peak_bytes = answer["bytes"]
        for place in list(self.processes):
            side = self.sides[place]
            if side.is_ours and (answer := self._ask(place, "ceiling")) is not None:
                side.flop_per_s, side.flop_per_token = answer["flop_per_s"], answer["flop_per_token"]
        if self.plan.profile:
            self._profile(sets)

    def _profile(self, sets: Sequence[TextSet]) -> None:
        run = [one.name for one in sets if one.skipped is None]
        name = "mixed" if "mixed" in run else run[0]
        for place in list(self.processes):
            if self.sides[place].is_ours:
                logger.info("bench: looking where the time of %s goes", self.sides[place].spec.label)
                answer = self._ask(place, "breakdown", file=self._file(name))
                self.sides[place].breakdown = None if answer is None else answer["seconds"]

    def _ask(self, place: int, command: str, **fields: Any) -> dict[str, Any] | None:
        """The answer of a side; None where it failed, which ends it."""
        try:
            return self.processes[place].ask(command, **fields)
        except SideError as error:
            self.sides[place].failure = str(error)
            logger.warning("bench: %s: %s", self.sides[place].spec.label, error)
            self.processes.pop(place).kill()
            return None

    def _file(self, name: str) -> str:
        return str(self.folder / f"{name}.json")

    def _write(self, name: str, texts: list[str]) -> str:
        Path(self._file(name)).write_text(json.dumps(texts), encoding="utf-8")
        return self._file(name)


def measure(plan: Plan) -> Results:
    """Runs a plan in a folder that is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="anypool-bench-") as folder:
        return Driver(plan, Path(folder)).run()
