"""Every text architecture of transformers' mappings works, or is refused with a reason; none is wrong."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.breadth.page import TASKS, share
from tests.breadth.run import run


@pytest.mark.breadth
@pytest.mark.timeout(4 * 3600)
def test_nine_of_ten_architectures_work_and_none_is_wrong(tmp_path: Path) -> None:
    """`ANYPOOL_BREADTH_RESULTS` names a file that keeps results, so that a run may go on where another ended."""
    results = list(run(Path(os.environ.get("ANYPOOL_BREADTH_RESULTS", tmp_path / "results.jsonl"))).values())
    for task in TASKS:
        works, tried = share(results, task)
        print(f"{task}: {works} of {tried} work")
        if task in ("causal_lm", "encoder"):
            assert works >= 0.9 * tried
    amiss = [f"{one['architecture']}: {one['why']}" for one in results if one["outcome"] in ("wrong", "failed")]
    assert not amiss, "\n".join(amiss)
