"""Embedding on Ray Data: a folder of files by a pool of actors, or a stage of a pipeline of your own."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from anypool import errors
from anypool.config import EngineConfig
from anypool.engine.prompt_options import PromptOptions
from anypool.entrypoints.bulk.identity import engine_identity
from anypool.entrypoints.bulk.job import Job, Output
from anypool.entrypoints.bulk.report import Report
from anypool.entrypoints.bulk.sources import Files, find_files, refuse_output_in_input
from anypool.entrypoints.bulk.storing import Storing
from anypool.entrypoints.bulk.stream import Work
from anypool.entrypoints.llm import LLM
from anypool.entrypoints.ray.partitions import Partition, left_to_do, partitions_of
from anypool.errors import AnypoolError, EngineError, InvalidParameterError, MissingDependencyError
from anypool.pooling.params import PoolingParams


class Embed:
    """A stage of a Ray Data pipeline: `ds.map_batches(Embed, fn_constructor_kwargs={"model": ...}, compute=...)`.

    Each actor loads the model once. `batch_size` is how many rows it is given at a time; what is run together is chosen
    by tokens, up to `max_num_batched_tokens`.

    Args:
        model: A folder, a `.gguf` file or a hub id, which every node can read.
        field: The column of texts.
        into: The column for the vectors.
        params: Dimensions and normalisation.
        options: How texts become token ids: prompts and truncation.
        precision: How a number is stored; int8 and uint8 take `calibration`.
        calibration: A .npy file of float vectors that int8 and uint8 take their ranges from.
        **engine_args: The fields of `EngineConfig`.
    """

    def __init__(
        self,
        model: str,
        *,
        field: str = "text",
        into: str = "embedding",
        params: PoolingParams | None = None,
        options: PromptOptions | None = None,
        precision: str = "float32",
        calibration: str | None = None,
        **engine_args: Any,
    ) -> None:
        self.field, self.into = field, into
        self.storing = _storing(precision, calibration)
        self.params = params
        self.options = options or PromptOptions()
        self.llm = LLM(model, **{"use_tqdm_on_load": False, **engine_args})

    def __call__(self, batch: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """The batch with a column more, `[N, E]`.

        Raises:
            InvalidRequestError: A text cannot be run.
        """
        if self.field not in batch:
            raise InvalidParameterError(f"the batch has no column {self.field!r}; it has {', '.join(batch)}")
        outputs = self.llm.embed(
            list(batch[self.field]),
            self.params,
            prompt_name=self.options.prompt_name,
            prompt=self.options.prompt,
            truncate_prompt_tokens=self.options.truncate_prompt_tokens,
            truncation_side=self.options.truncation_side,
            use_tqdm=False,
        )
        vectors_NE = np.stack([output.outputs.numpy() for output in outputs])
        return {**batch, self.into: self.storing.store(vectors_NE)}


@dataclass(frozen=True, kw_only=True)
class DatasetReport:
    """What `embed_dataset` did.

    Attributes:
        output: The folder.
        partitions: How many files were run now.
        skipped: How many were there already.
        rows: Rows with a result, of those that were run now.
        errors: Rows without one.
        tokens: How many were run.
        seconds: What it took, loading included.
    """

    output: Path
    partitions: int
    skipped: int
    rows: int = 0
    errors: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        errors = f", {self.errors:,} without a result" if self.errors else ""
        seconds = max(self.seconds, 1e-9)
        return (
            f"{self.output}: {self.partitions:,} files were run and {self.skipped:,} were there; {self.rows:,} "
            f"rows{errors}; {self.tokens:,} tokens in {self.seconds:,.1f} s ({self.rows / seconds:,.0f} rows/s, "
            f"{self.tokens / seconds:,.0f} tokens/s)"
        )


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """What every actor has to know."""

    model: str
    engine_args: Mapping[str, Any]
    identity: dict[str, Any]
    field: str
    keep: Sequence[str]
    work: Work
    storing: Storing
    ending: str
    rows_per_part: int


class _Actor:
    """Runs whole partitions. One that an actor began and did not finish is gone on with by the next.

    The model is loaded with the first, so that it counts where the process dies of that.
    """

    def __init__(self, plan: _Plan) -> None:
        self.plan = plan
        self._llm: LLM | None = None

    def __call__(self, batch: dict[str, NDArray[Any]]) -> dict[str, list[Any]]:
        [source], [output] = batch["source"], batch["output"]
        partition = Partition(Path(source), Path(output))
        row: dict[str, Any] = {"rows": 0, "errors": 0, "tokens": 0, "kind": "", "message": ""}
        try:
            partition.begin()
            row |= self.run(partition).as_json()
        except AnypoolError as error:  # Ray would give it as a text among others
            row |= {"kind": type(error).__name__, "message": str(error)}
        partition.begun.unlink(missing_ok=True)
        return {name: [value] for name, value in row.items()}

    def run(self, partition: Partition) -> Report:
        """Runs what is left of a partition."""
        plan = self.plan
        target = Output(path=partition.output, ending=plan.ending, rows_per_part=plan.rows_per_part)
        rows = Files([partition.source], plan.field, plan.keep)
        return Job(rows, plan.work, plan.storing, target, plan.identity).run(lambda: nullcontext(self._loaded()))

    def _loaded(self) -> LLM:
        if self._llm is None:
            self._llm = LLM(self.plan.model, **{"use_tqdm_on_load": False, **self.plan.engine_args})
        return self._llm


def embed_dataset(
    model: str,
    inputs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    *,
    field: str = "text",
    keep: Sequence[str] = (),
    output_format: str = "parquet",
    work: Work | None = None,
    precision: str = "float32",
    calibration: str | None = None,
    rows_per_part: int = 10_000,
    overwrite: bool = False,
    actors: int | None = None,
    cpus_per_actor: float | None = None,
    gpus_per_actor: float | None = None,
    show_progress: bool = False,
    **engine_args: Any,
) -> DatasetReport:
    """Embeds files on a Ray cluster, each of them to a file of its own.

    A file that is there is not made again, unless its input has changed; so after a failure the same call goes on. Ray
    is started on this machine where the process is not connected to any and `RAY_ADDRESS` names none.

    Args:
        model: A folder, a `.gguf` file or a hub id, which every node can read.
        inputs: Files, folders or patterns, on a file system that all nodes share.
        output: A folder there. `index` of a row is its number in its input file.
        field: The column of texts.
        keep: Columns to carry over.
        output_format: "parquet", "arrow", "jsonl" or "npy".
        work: What is done with each text; a dense vector where nothing is said.
        precision: How a number is stored; int8 and uint8 take `calibration`.
        calibration: A .npy file of float vectors that int8 and uint8 take their ranges from.
        rows_per_part: How many rows an actor writes at a time: what is lost when it dies.
        overwrite: Whether what another job left in the folder is replaced.
        actors: How many engines run; by default one per GPU, and without GPUs one per node.
        cpus_per_actor: By default the cluster's, shared out; 1 where there are GPUs.
        gpus_per_actor: By default 1 where the cluster has some. With `tensor_parallel_size`, give as many.
        show_progress: Whether to show a progress bar.
        **engine_args: The fields of `EngineConfig`.

    Raises:
        InvalidParameterError: Nothing to read, or the folder has the work of another job.
        InvalidRequestError: A row cannot be run, and `work` does not skip errors. Other files are kept.
        MissingDependencyError: Ray is not installed.
        EngineError: Actors died of a file three times, one after the other, and none got any further with it.
    """
    EngineConfig.from_kwargs(model=model, **engine_args)  # checks them
    ray = import_ray()
    began, folder = time.monotonic(), Path(output)
    storing, work, ending = _storing(precision, calibration), work or Work(), f".{output_format}"
    given = [inputs] if isinstance(inputs, (str, os.PathLike)) else inputs
    names = [os.fspath(one) for one in given]
    partitions = partitions_of(find_files(names), folder, ending)
    if any(one.output == one.source for one in partitions):
        raise InvalidParameterError(f"{folder} is the folder of the inputs: give another")
    refuse_output_in_input(names, folder)
    Files([one.source for one in partitions], field, keep)  # checks that they can be read
    plan = _Plan(
        model=str(Path(model).resolve()) if Path(model).exists() else model,
        engine_args=engine_args,
        identity=engine_identity(model, engine_args),
        field=field,
        keep=tuple(keep),
        work=work,
        storing=storing,
        ending=ending,
        rows_per_part=rows_per_part,
    )
    folder.mkdir(parents=True, exist_ok=True)
    description = Job(
        Files([], field, tuple(keep)), work, storing, Output(path=folder, ending=ending), plan.identity
    ).description
    todo = left_to_do(partitions, folder, description, overwrite=overwrite)
    counts = {"rows": 0, "errors": 0, "tokens": 0}
    if todo:
        with _connected(ray):
            pool = _pool(ray, len(todo), actors, cpus_per_actor, gpus_per_actor)
            for row in _run(ray, plan, todo, pool, show_progress=show_progress):
                counts = {name: counts[name] + row[name] for name in counts}
    return DatasetReport(
        output=folder,
        partitions=len(todo),
        skipped=len(partitions) - len(todo),
        seconds=time.monotonic() - began,
        **counts,
    )


def import_ray() -> Any:
    """The package ray.

    Raises:
        MissingDependencyError: It is not installed.
    """
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise MissingDependencyError(f"this needs Ray ({error}): pip install 'anypool[ray]'") from error
    return ray


def _storing(precision: str, calibration: str | None) -> Storing:
    storing = Storing(precision, calibration)
    if storing.needs_ranges:
        raise InvalidParameterError(
            f"precision={precision!r} needs calibration=, a .npy of float vectors: the parts of a dataset could not be "
            "compared if each had ranges of its own",
            param="calibration",
        )
    return storing


@contextmanager
def _connected(ray: Any) -> Iterator[None]:
    if ray.is_initialized():
        yield
        return
    ray.init(log_to_driver=False)
    try:
        yield
    finally:
        ray.shutdown()


def _pool(ray: Any, files: int, actors: int | None, cpus: float | None, gpus: float | None) -> dict[str, Any]:
    """How many actors there are, and what each takes."""
    has = ray.cluster_resources()
    if gpus is None:
        gpus = 1 if has.get("GPU", 0) >= 1 else 0
    if actors is None:
        actors = int(has["GPU"] // gpus) if gpus else sum(node["Alive"] for node in ray.nodes())
    actors = max(1, min(actors, files))
    if cpus is None:
        cpus = 1 if gpus else max(1, has.get("CPU", 1) // actors)
    return {
        "compute": ray.data.ActorPoolStrategy(size=actors),
        "num_cpus": cpus,
        **({"num_gpus": gpus} if gpus else {}),
    }


def _run(
    ray: Any, plan: _Plan, partitions: Sequence[Partition], pool: dict[str, Any], *, show_progress: bool
) -> Iterator[dict[str, Any]]:
    """What became of each partition, in the order in which they end."""
    items = [{"source": str(one.source), "output": str(one.output)} for one in partitions]
    dataset = ray.data.from_items(items, override_num_blocks=len(items)).map_batches(
        _Actor, fn_constructor_args=(plan,), batch_size=1, batch_format="numpy", **pool
    )
    dataset.context.enable_progress_bars = False  # of batches; what counts here are files
    with tqdm(total=len(items), desc="embed", unit="file", disable=not show_progress, file=sys.stderr) as bar:
        try:
            for row in dataset.iter_rows():
                if row["kind"]:
                    raise getattr(errors, row["kind"])(row["message"])
                bar.update()
                yield row
        except ray.exceptions.RayError as error:
            raise EngineError(f"an actor failed: {str(error).strip().splitlines()[-1]}") from error
