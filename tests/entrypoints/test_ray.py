"""Ray, on this machine with two workers: it gives the numbers of one process."""

from __future__ import annotations

import secrets
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import openai
import pyarrow
import pytest
from pyarrow import parquet

from anypool.engine.engine import Engine
from anypool.entrypoints.bulk.stream import Work
from anypool.entrypoints.cli import main
from anypool.entrypoints.ray import Embed, embed_dataset
from anypool.entrypoints.ray.partitions import partitions_of
from anypool.errors import InvalidParameterError, PromptTooLongError
from anypool.pooling.params import PoolingParams
from anypool.pooling.tasks import PoolingTask

ray = pytest.importorskip("ray")

from anypool.entrypoints.ray.serve import TokenPolicy, app  # noqa: E402 - needs ray

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.slow,
    # Ray Data copies its own settings, old ones among them, and warns of each that it copies.
    pytest.mark.filterwarnings(r"ignore:`\w+` is deprecated:Warning:ray\.data\.context"),
    # Ray Serve describes its settings in an old way of pydantic's.
    pytest.mark.filterwarnings(r"ignore:Using extra keyword arguments on .Field.:DeprecationWarning:ray\.serve"),
]

TEXTS = [
    f"the {word} of {place}" for word in ("tower", "river", "bread", "letter") for place in ("Paris", "a cold town")
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    # Not pytest's folder: sockets lie in Ray's, and their paths may have no more than 107 characters.
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as folder:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))  # Ray would write one into the home folder
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # as Ray's next version has it; it warns otherwise
        ray.init(
            "local",
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=80 << 20,
            log_to_driver=False,
            _temp_dir=folder,
        )
        yield ray
        ray.shutdown()


@pytest.fixture
def partitions(tmp_path: Path) -> Path:
    """Two Parquet files with half of the texts each."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(2):
        texts = TEXTS[number::2]
        table = pyarrow.table({"id": [f"{number}-{row}" for row in range(len(texts))], "body": texts})
        parquet.write_table(table, folder / f"{number}.parquet")
    return folder


@pytest.fixture
def expected(engine: Engine) -> np.ndarray:
    requests = engine.prepare(TEXTS, PoolingTask.EMBED)
    engine.submit(requests)
    return np.stack([request.future.result().numpy() for request in requests])


def vectors(path: Path) -> np.ndarray:
    column = parquet.read_table(path)["embedding"].combine_chunks()
    return np.asarray(column.flatten()).reshape(len(column), -1)


def test_partitioned_set_has_the_numbers_of_one_process_and_only_what_is_missing_is_run_again(
    cluster: Any,
    minilm: str,
    partitions: Path,
    expected: np.ndarray,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    output = tmp_path / "out"
    arguments: dict[str, Any] = {"field": "body", "keep": ["id"], "actors": 2, "cpus_per_actor": 1}
    report = embed_dataset(minilm, partitions, output, **arguments)
    assert (report.partitions, report.skipped, report.rows) == (2, 0, len(TEXTS))
    for number in range(2):
        path = output / f"{number}.parquet"
        np.testing.assert_allclose(vectors(path), expected[number::2], atol=1e-6)
        assert parquet.read_table(path)["id"].to_pylist() == [f"{number}-{row}" for row in range(len(TEXTS) // 2)]
    kept = (output / "0.parquet").stat()
    (output / "1.parquet").unlink()
    flags = ["--input", str(partitions), "--input-field", "body", "--keep", "id", "--output", str(output)]
    assert main(["embed", minilm, *flags, "--ray", "--ray-actors", "1", "--ray-cpus", "1"]) == 0
    assert f"1 files were run and 1 were there; {len(TEXTS) // 2} rows" in capsys.readouterr().err
    assert (output / "0.parquet").stat().st_mtime_ns == kept.st_mtime_ns
    np.testing.assert_allclose(vectors(output / "1.parquet"), expected[1::2], atol=1e-6)
    with pytest.raises(
        InvalidParameterError, match=r"work of another job \(params: \{\} before, \{\"dimensions\": 8\}"
    ):
        embed_dataset(minilm, partitions, output, work=Work(params=PoolingParams(dimensions=8)), **arguments)


def test_row_that_cannot_be_run_is_a_typed_error_with_its_place(cluster: Any, minilm: str, tmp_path: Path) -> None:
    source = tmp_path / "long.txt"
    source.write_text("short\n" + "word " * 400 + "\n", encoding="utf-8")
    with pytest.raises(PromptTooLongError, match=r"long\.txt: line 2 has 402 tokens"):
        embed_dataset(minilm, source, tmp_path / "out", actors=1, cpus_per_actor=1)
    report = embed_dataset(minilm, source, tmp_path / "out", work=Work(skips_errors=True), actors=1, cpus_per_actor=1)
    assert (report.rows, report.errors) == (1, 1)


def test_embed_is_a_stage_of_ones_own_pipeline(cluster: Any, minilm: str, expected: np.ndarray) -> None:
    dataset = ray.data.from_items([{"text": text, "place": place} for place, text in enumerate(TEXTS)])
    dataset.context.enable_progress_bars = False
    one = ray.data.ActorPoolStrategy(size=1)
    stage = dataset.map_batches(Embed, fn_constructor_kwargs={"model": minilm}, batch_size=4, compute=one, num_cpus=1)
    rows = sorted(stage.take_all(), key=lambda row: row["place"])
    np.testing.assert_allclose(np.stack([row["embedding"] for row in rows]), expected, atol=1e-6)


def test_serve_answers_the_openai_client(cluster: Any, minilm: str, expected: np.ndarray) -> None:
    from ray import serve

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    try:
        serve.run(app({"model": minilm, "served_model_name": "minilm", "max_replicas": "2", "api_key": "secret"}))
        with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="secret") as client:
            answer = client.embeddings.create(model="minilm", input=TEXTS, encoding_format="float")
            assert [model.id for model in client.models.list()] == ["minilm"]
        found = np.array([one.embedding for one in answer.data], np.float32)
        np.testing.assert_allclose(found, expected, atol=1e-6)
        stranger = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="wrong", max_retries=0)
        with stranger, pytest.raises(openai.AuthenticationError):
            stranger.embeddings.create(model="minilm", input="a")
    finally:
        serve.shutdown()


@pytest.mark.parametrize(
    ("waiting", "busy", "wanted"),
    [([0], [0.0], 1), ([90], [1.0], 1), ([250], [1.0], 3), ([9, 9], [1, 1], 2), ([900], [1], 4)],
)
def test_policy_asks_for_as_many_replicas_as_waiting_tokens_need(
    waiting: list[float], busy: list[float], wanted: int
) -> None:
    metrics = {"waiting_tokens": dict(enumerate(waiting)), "busy": dict(enumerate(busy))}
    context = SimpleNamespace(
        aggregated_metrics=metrics, capacity_adjusted_min_replicas=1, capacity_adjusted_max_replicas=4
    )
    assert TokenPolicy(tokens_per_replica=100)(context) == (wanted, {})


def test_partitions_keep_their_folders_and_never_share_an_output(tmp_path: Path) -> None:
    sources = [tmp_path / "a" / "x.jsonl.gz", tmp_path / "b" / "x.jsonl"]
    found = [one.output.relative_to(tmp_path / "out") for one in partitions_of(sources, tmp_path / "out", ".arrow")]
    assert found == [Path("a/x.arrow"), Path("b/x.arrow")]
    with pytest.raises(InvalidParameterError, match="would both become"):
        partitions_of([tmp_path / "x.csv", tmp_path / "x.jsonl"], tmp_path / "out", ".parquet")
