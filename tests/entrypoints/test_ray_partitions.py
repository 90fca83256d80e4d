"""Files that actors of Ray die of: begun a few times at one place, and then an error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from anypool.entrypoints.bulk.job import PROGRESS
from anypool.entrypoints.ray.partitions import MOST_BEGINNINGS, Partition
from anypool.errors import EngineError


def test_a_file_that_kills_actors_is_an_error_unless_they_get_further(tmp_path: Path) -> None:
    one = Partition(tmp_path / "in.parquet", tmp_path / "out.parquet")
    for _ in range(MOST_BEGINNINGS):
        one.begin()
    with pytest.raises(EngineError, match=r"in\.parquet: 3 actors died .* after row 0, "):
        one.begin()
    one.parts.mkdir()
    lines = [{"job": {}}, {"position": [0, 4, 700]}]
    (one.parts / PROGRESS).write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    for _ in range(MOST_BEGINNINGS):
        one.begin()
    with pytest.raises(EngineError, match="after row 700"):
        one.begin()
