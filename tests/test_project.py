"""Promises of the project as a whole: what an import costs, what is public, what the files hold."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import anypool
from tests.test_docs import page_text, table

PUBLIC = [
    "LLM",
    "AnypoolError",
    "AsyncEngine",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineConfig",
    "HeadLayer",
    "HeadRecipe",
    "LoRARequest",
    "ModelRegistry",
    "MultiTaskOutput",
    "MultiTaskRequestOutput",
    "PoolerConfig",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "PoolingTask",
    "RerankResult",
    "ScoringOutput",
    "ScoringRequestOutput",
    "ServingOptions",
    "SpanEmbeddingOutput",
    "SpanEmbeddingRequestOutput",
    "SparseEmbeddingOutput",
    "SparseEmbeddingRequestOutput",
    "TokenClassificationOutput",
    "TokenClassificationRequestOutput",
    "__version__",
    "as_pooling_model",
    "encode2pooling_task",
    "is_pooling_model",
    "is_text_generation_model",
    "maxsim",
    "quantize_embeddings",
    "quantize_token_embeddings",
    "register_head",
    "register_model",
]

# Optional or slow to import, so imported only by what needs them.
LATE = [
    "transformers",
    "sentence_transformers",
    "gguf",
    "orjson",
    "prometheus_client",
    "uvicorn",
    "pydantic",
    "triton",
    "pyarrow",
    "jinja2",
]


def run_python(code: str) -> str:
    """Standard output of a fresh interpreter in the repository."""
    root = Path(anypool.__file__).parents[1]
    return subprocess.run([sys.executable, "-c", code], cwd=root, check=True, capture_output=True, text=True).stdout


def packages_of(module: str) -> set[str]:
    """The packages that importing a module loads, beside the standard library's."""
    names = json.loads(run_python(f"import json, sys, {module}; print(json.dumps(list(sys.modules)))"))
    return {name.partition(".")[0] for name in names} - sys.stdlib_module_names


def test_import_loads_torch_and_little_more() -> None:
    assert packages_of("anypool") - packages_of("torch") <= {"anypool", "numpy", "safetensors", "tokenizers", "tqdm"}


def test_import_leaves_optional_packages_alone() -> None:
    loaded = json.loads(run_python("import json, sys, anypool; print(json.dumps(list(sys.modules)))"))
    assert not set(LATE) & set(loaded)


def test_public_names_are_a_list() -> None:
    assert sorted(anypool.__all__) == sorted(PUBLIC)
    assert all(hasattr(anypool, name) for name in PUBLIC)


def test_architecture_page_has_the_twelve_steps_and_names_real_modules(root: Path) -> None:
    rows = table(page_text("architecture.md"), "| # | what happens | where |")
    assert [number for number, _, _ in rows] == [str(i) for i in range(1, 13)]
    for number, _, where in rows:
        modules = re.findall(r"`([^`]+)`", where)
        assert modules, f"step {number} names no module"
        for module in modules:
            assert (root / "anypool" / module).exists(), module


@pytest.mark.parametrize("folder", ["scripts", ".ci"])
def test_scripts_are_executable(root: Path, folder: str) -> None:
    scripts = [path for path in (root / folder).iterdir() if path.is_file()]
    assert scripts
    assert all(os.access(path, os.X_OK) and path.read_text().startswith("#!") for path in scripts)


def test_files_hold_no_leftovers(root: Path) -> None:
    """No absolute path of somebody's machine, no note to oneself, no conflict marker."""
    leftover = re.compile(
        r"(?<![\w.])/(home|root|tmp|work|workspace|Users|mnt)/\w|\b(TODO|FIXME|XXX)\b|^<{7} ", re.MULTILINE
    )
    found = [
        f"{path.relative_to(root)}: {match[0]!r}"
        for path in repository_files(root)
        if path != Path(__file__)
        for match in leftover.finditer(path.read_text(encoding="utf-8", errors="replace"))
    ]
    assert found == []


def repository_files(root: Path) -> list[Path]:
    """What is or would be committed."""
    if not (root / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=root,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    return [path for name in listed.split("\0") if name and (path := root / name).is_file()]
