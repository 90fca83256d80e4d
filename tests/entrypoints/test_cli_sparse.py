"""`anypool embed --sparse`, and what `anypool info` says of sparse models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from anypool.entrypoints.cli import main
from tests.adapters.test_router import inference_free
from tests.adapters.test_sparse import splade
from tests.helpers import loaded

TEXTS = ["the cat sat", "a story"]


def test_lines_have_indices_and_values(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["embed", str(splade()), *TEXTS, "--sparse", "--max-active-dims", "5", "--device", "cpu"]) == 0
    lines = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    with loaded(splade()) as llm:
        whole = [output.outputs.weights for output in llm.sparse_embed(TEXTS, use_tqdm=False)]
    for index, (line, weights) in enumerate(zip(lines, whole, strict=True)):
        assert line["index"] == index
        found = dict(zip(line["indices"], line["values"], strict=True))
        assert found == {i: pytest.approx(weights[i], abs=1e-6) for i in sorted(weights, key=lambda i: -weights[i])[:5]}
    file = tmp_path / "vectors.jsonl"
    assert main(["embed", str(splade()), *TEXTS, "--sparse", "--output", str(file), "--device", "cpu"]) == 0
    assert len(file.read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--sparse", "--dimensions", "8"], "--dimensions is about dense vectors"),
        (["--sparse", "--precision", "int8"], "--precision is about dense vectors"),
        (["--sparse", "--output", "vectors.npy"], "known endings are .jsonl, .parquet"),
        (["--max-active-dims", "8"], "--max-active-dims goes with --sparse"),
    ],
    ids=["dimensions", "precision", "npy", "dense"],
)
def test_flags_that_do_not_go_together_are_refused(
    flags: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["embed", str(splade()), "cat", *flags]) != 0
    assert message in capfd.readouterr().err


def test_info_says_how_sparse_vectors_are_made(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["info", str(inference_free()), "--device", "cpu"]) == 0
    printed = capfd.readouterr().out
    assert "SPLADE, max of log1p_relu over" in printed
    assert "looked up for queries" in printed
