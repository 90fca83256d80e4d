"""The documentation is right: its Python runs and prints what it says, its commands parse, its tables are complete."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import anypool
from anypool import EngineConfig, ModelRegistry, PoolerConfig, PoolingParams, PoolingTask, errors
from anypool.adapters import heads
from anypool.adapters.rerank_templates import manifests
from anypool.config import ACTIVATIONS, SEQUENCE_POOLING_TYPES, TOKEN_POOLING_TYPES
from anypool.entrypoints.cli import build_parser
from anypool.model_executor import registry
from anypool.pooling.quantize import PRECISIONS
from tests.named_checkpoints import link_named

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])

# A skip comment, a fence, and the output that may follow it.
_FENCE = re.compile(
    r"(?P<skip><!-- skip: [^>]+ -->\n)?"
    r"```(?P<language>\w+)\n(?P<code>.*?)```\n"
    r"(?:\n```text\n(?P<output>.*?)```\n)?",
    re.DOTALL,
)


@dataclass(frozen=True)
class Fence:
    line: int
    language: str
    code: str
    output: str | None
    skipped: bool


def fences(page: Path) -> Iterator[Fence]:
    text = page.read_text(encoding="utf-8")
    for match in _FENCE.finditer(text):
        line = text.count("\n", 0, match.start("code")) + 1
        yield Fence(line, match["language"], match["code"], match["output"], match["skip"] is not None)


def shell_lines(page: Path) -> Iterator[str]:
    for fence in fences(page):
        if fence.language == "bash":
            yield from fence.code.replace("\\\n", " ").splitlines()


def table(text: str, header: str) -> list[list[str]]:
    """The cells of the table whose first line is `header`."""
    lines = text.split(header, 1)[1].splitlines()[2:]
    rows = [line for line in lines[: next((i for i, line in enumerate(lines) if not line.startswith("|")), None)]]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", row.strip("| "))] for row in rows]


def page_text(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def name_of(page: object) -> str:
    return page.name if isinstance(page, Path) else str(page)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory in which the documentation's hub ids are folders, which win over the hub."""
    monkeypatch.setattr(ModelRegistry, "_own", {})  # pages register classes and heads
    monkeypatch.setattr(heads, "_REGISTERED", {})
    link_named(tmp_path)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    "page", [page for page in PAGES if any(fence.language == "python" for fence in fences(page))], ids=name_of
)
@pytest.mark.usefixtures("hub")
def test_python_runs_and_prints_what_the_page_says(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    namespace: dict[str, object] = {"__name__": "__main__"}
    for fence in fences(page):
        if fence.language != "python" or fence.skipped:
            continue
        where = f"{page.name}:{fence.line}"
        exec(compile("\n" * (fence.line - 1) + fence.code, str(page), "exec"), namespace)
        printed = capsys.readouterr().out
        assert printed == (fence.output or ""), f"{where} prints something else"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_parse(page: Path) -> None:
    for line in shell_lines(page):
        words = shlex.split(line, comments=True)
        if words[:1] == ["anypool"]:
            build_parser().parse_args(words[1:])
        elif words[:1] == ["curl"] and "-d" in words:
            json.loads(words[words.index("-d") + 1])
        elif words and (words[0].startswith("scripts/") or words[0] == ".ci/run"):
            assert os.access(ROOT / words[0], os.X_OK), words[0]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


def test_every_page_is_in_the_navigation() -> None:
    listed = re.findall(r": ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(listed) == sorted(page.name for page in (ROOT / "docs").glob("*.md"))


def test_arguments_of_llm_are_the_fields_of_engine_config() -> None:
    rows = table(page_text("python-api.md"), "| argument | default | meaning |")
    documented = {name.strip("`"): default.strip("`").replace("_000", "000") for name, default, _ in rows}
    actual = {
        field.name: "required" if field.default is dataclasses.MISSING else repr(field.default)
        for field in dataclasses.fields(EngineConfig)
    }
    assert documented == actual


def test_native_families_are_those_of_the_registry() -> None:
    rows = table(page_text("models.md"), "| family | architectures in config.json |")
    documented = sorted(name for _, names in rows for name in re.findall(r"`(\w+)`", names))
    assert documented == sorted(registry._NATIVE)


def test_pooling_types_are_those_of_the_configuration() -> None:
    rows = table(page_text("pooling.md"), "| type | row | name in sentence-transformers |")
    assert [row[0].strip("`") for row in rows] == [*SEQUENCE_POOLING_TYPES, *TOKEN_POOLING_TYPES]


@pytest.mark.parametrize("page", ["README.md", "docs/tasks.md"])
@pytest.mark.usefixtures("hub")
def test_task_table_has_every_task_and_its_lines_run(page: str) -> None:
    rows = table((ROOT / page).read_text(encoding="utf-8"), "| task | one line | gives |")
    assert {row[0].strip("`") for row in rows} == {*(task.value for task in PoolingTask), "score", "rerank"}
    for task, line, _ in rows:
        code = line.strip("`")
        assert f").{task.strip('`')}(" in code
        assert eval(code, {"LLM": anypool.LLM}) is not None


@pytest.mark.parametrize(
    ("cls", "header"),
    [
        (PoolerConfig, "| field | default | meaning |"),
        (PoolingParams, "| field | default | meaning | tasks |"),
    ],
)
def test_field_tables_are_those_of_the_dataclasses(cls: type, header: str) -> None:
    rows = table(page_text("tasks.md"), header)
    documented = [(row[0].strip("`"), row[1].strip("`")) for row in rows]
    assert documented == [(field.name, repr(field.default)) for field in dataclasses.fields(cls)]


def test_heads_by_family_are_those_of_the_table_of_heads() -> None:
    *rows, (other, layers, _) = table(page_text("tasks.md"), "| model type | layers | row |")
    documented = {kind.strip("`"): text for kind, text, _ in rows}
    actual = {kind: ", ".join(map(_head_layer, chain)) for kind, chain in heads._SEQUENCE.items()}
    assert documented == actual
    assert (other, layers) == ("any other", ", ".join(map(_head_layer, heads._SCORE)))


def _head_layer(layer: heads.HeadLayer) -> str:
    return f"`{layer.tensor}`" + (f" {layer.activation}" if layer.activation else "")


def test_known_rerankers_are_those_of_the_manifests() -> None:
    rows = table(page_text("tasks.md"), "| name | answers | activation |")
    documented = {name.strip("`"): (answers, activation) for name, answers, activation in rows}
    assert documented == {one.name: (", ".join(one.tokens), one.activation) for one in manifests()}


def test_activations_and_precisions_are_those_of_the_code() -> None:
    meaning = dict(row[::2] for row in table(page_text("tasks.md"), "| field | default | meaning |"))["`activation`"]
    assert re.findall(r"`(\w+)`", meaning) == list(ACTIVATIONS)
    rows = table(page_text("pooling.md"), "| precision | bytes per dimension | what is stored |")
    assert [name for row in rows for name in re.findall(r"`(\w+)`", row[0])] == list(PRECISIONS)


def test_error_tree_is_that_of_the_module() -> None:
    assert errors.__doc__ is not None
    tree = errors.__doc__.split("\n\n")[1]
    documented = next(block for block in _text_blocks(page_text("errors.md")) if block.startswith("AnypoolError"))
    assert documented.split() == tree.split()


def _text_blocks(text: str) -> list[str]:
    return re.findall(r"```text\n(.*?)```", text, re.DOTALL)
