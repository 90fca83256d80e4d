"""Blocks through the engine: the next ones are read, tokenised and queued while it runs those before."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import numpy as np
import torch

from anypool.engine.engine import Engine
from anypool.engine.prompt_options import PromptOptions
from anypool.engine.request import Request
from anypool.entrypoints.bulk.blocks import Block, Column, Done, Failure, Position, joined
from anypool.entrypoints.bulk.sources import Source
from anypool.errors import AnypoolError, EngineDeadError, EngineError, InvalidRequestError
from anypool.pooling.params import PoolingParams
from anypool.pooling.sparse import unpack_weights
from anypool.pooling.tasks import PoolingTask

# Blocks that are queued at a time. The engine puts near lengths of all of them together.
_QUEUED_BLOCKS = 2
# Vectors that are gathered before they are written, and for how long: what a kill costs.
_PART_BYTES = 64 << 20
_PART_S = 300.0


@dataclass(frozen=True, kw_only=True)
class Work:
    """What is done with each text.

    Attributes:
        task: `embed` or `sparse_embed`.
        params: What is asked of the pooler.
        options: How texts become token ids.
        skips_errors: Whether a row that cannot be run is noted and left out; it ends the job otherwise.
    """

    task: PoolingTask = PoolingTask.EMBED
    params: PoolingParams = field(default_factory=PoolingParams)
    options: PromptOptions = field(default_factory=PromptOptions)
    skips_errors: bool = False


@dataclass(frozen=True)
class _Tokenised:
    """A block with a request for each row, or why there is none."""

    block: Block
    position: Position
    outcomes: Sequence[Request | AnypoolError]

    @property
    def requests(self) -> list[Request]:
        return [one for one in self.outcomes if isinstance(one, Request)]


@dataclass(frozen=True)
class _Finished:
    """What became of a block, and what ends the job after it."""

    done: Done | None
    end: AnypoolError | None

    def given(self) -> Iterator[Done]:
        if self.done is not None:
            yield self.done
        if self.end is not None:
            raise self.end


class Stream:
    """Runs a source's rows.

    Args:
        engine: What runs them.
        source: The rows.
        work: What is done with each.
    """

    def __init__(self, engine: Engine, source: Source, work: Work) -> None:
        self.engine, self.source, self.work = engine, source, work

    def run(self, position: Position) -> Generator[Done, None, None]:
        """What becomes of the blocks after a position, in their order.

        Raises:
            AnypoolError: A row cannot be run, and errors are not skipped; the message says where it is. Or the engine
                has died.
        """
        self.engine.prepare(["a"], self.work.task, self.work.params, self.work.options)  # wrong parameters are no row's
        queue: deque[_Tokenised] = deque()
        try:
            for block, after in self.source.blocks(position):
                tokenised = self._tokenise(block, after)  # while those before run
                finished = self._wait(queue.popleft()) if len(queue) == _QUEUED_BLOCKS else None
                self.engine.submit(tokenised.requests)
                queue.append(tokenised)
                if finished is not None:  # whoever takes it writes it while the next runs
                    yield from finished.given()
            while queue:
                yield from self._wait(queue.popleft()).given()
        finally:  # after an error or an interrupt nobody wants the rest
            for tokenised in queue:
                for request in tokenised.requests:
                    request.future.cancel()

    def _tokenise(self, block: Block, position: Position) -> _Tokenised:
        prepared = iter(self._prepare([text for text in block.texts if isinstance(text, str)]))
        outcomes = [next(prepared) if isinstance(text, str) else text for text in block.texts]
        if not self.work.skips_errors:  # what comes after an error is not run
            good = sum(1 for _ in takewhile(lambda one: isinstance(one, Request), outcomes))
            outcomes = outcomes[: good + 1]
        return _Tokenised(block, position, outcomes)

    def _prepare(self, texts: Sequence[str]) -> list[Request | AnypoolError]:
        """A request or an error per text. A list that has an error is halved until it stands alone."""
        if not texts:
            return []
        try:
            return list(self.engine.prepare(texts, self.work.task, self.work.params, self.work.options))
        except InvalidRequestError as error:
            if len(texts) == 1:
                return [error]
        middle = len(texts) // 2
        return self._prepare(texts[:middle]) + self._prepare(texts[middle:])

    def _wait(self, tokenised: _Tokenised) -> _Finished:
        """Waits for a block's results. Where a row ends the job, only those before it count."""
        block, first = tokenised.block, tokenised.position.rows - len(tokenised.block)
        results: dict[int, torch.Tensor] = {}
        failures: list[Failure] = []
        end: AnypoolError | None = None
        read = tokens = 0
        for place, outcome in enumerate(tokenised.outcomes):
            try:
                if not isinstance(outcome, Request):
                    raise outcome
                results[place] = outcome.future.result()
                tokens += len(outcome)
            except (InvalidRequestError, EngineError) as error:
                where = self.source.where(tokenised.position.file, block.places[place])
                told = _told(error, where)
                if not self.work.skips_errors or isinstance(error, EngineDeadError):
                    end = told
                    break
                failures.append(Failure(first + place, where, told))
            read += 1
        if not read:
            return _Finished(None, end)
        columns: dict[str, Column] = {"index": np.fromiter(results, np.int64, len(results)) + first}
        for name, column in block.kept.items():
            columns[name] = column if len(results) == len(block) else _taken(column, list(results))
        columns |= _result_columns(self.work.task, list(results.values()))
        position = Position(tokenised.position.file, block.places[read - 1], first + read)
        return _Finished(Done(position=position, columns=columns, failures=failures, tokens=tokens), end)


def gather(done: Iterator[Done], *, rows: int, may_cut: Callable[[], bool]) -> Generator[Done, None, None]:
    """Blocks put together to parts, which end after `rows` rows, after some memory or some minutes.

    When what runs them fails or is interrupted, the rows that are done are a last part, and the error comes after it.

    Args:
        done: The blocks.
        rows: About how many a part has.
        may_cut: Whether a part may end for another reason than its rows.
    """
    gathered: list[Done] = []
    began = time.monotonic()
    try:
        for one in done:
            gathered.append(one)
            is_due = sum(map(_rows_read, gathered)) >= rows
            if not is_due and may_cut():
                too_large = sum(part.nbytes for part in gathered) >= _PART_BYTES
                is_due = too_large or time.monotonic() - began >= _PART_S
            if is_due:
                yield _joined(gathered)
                gathered, began = [], time.monotonic()
    except GeneratorExit:
        raise
    except BaseException:
        if gathered and may_cut():
            yield _joined(gathered)
        raise
    if gathered:
        yield _joined(gathered)


def _rows_read(done: Done) -> int:
    return len(done) + len(done.failures)


def _joined(blocks: Sequence[Done]) -> Done:
    with_rows = [one for one in blocks if len(one)] or blocks[:1]
    return Done(
        position=blocks[-1].position,
        columns={name: joined([one.columns[name] for one in with_rows]) for name in with_rows[0].columns},
        failures=[failure for one in blocks for failure in one.failures],
        tokens=sum(one.tokens for one in blocks),
    )


def _told(error: AnypoolError, where: str) -> AnypoolError:
    """The error with the row's place in its message, in place of the number that it had among its like."""
    message = str(error)
    if message.startswith("input 0"):
        message = where + message.removeprefix("input 0")
    elif not message.startswith(where):  # readers say it themselves
        message = f"{where}: {message}"
    return type(error)(message)


def _taken(column: Column, places: Sequence[int]) -> Column:
    if isinstance(column, list):
        return [column[place] for place in places]
    return column.take(np.array(places, np.int64))  # an empty list has no type


def _result_columns(task: PoolingTask, results: Sequence[torch.Tensor]) -> dict[str, Any]:
    if task is PoolingTask.EMBED:
        vectors = [result.numpy() for result in results]
        return {"embedding": np.stack(vectors).astype(np.float32) if vectors else np.empty((0, 0), np.float32)}
    pairs = [unpack_weights(result) for result in results]
    return {
        "indices": [indices.numpy() for indices, _ in pairs],
        "values": [values.numpy() for _, values in pairs],
    }
