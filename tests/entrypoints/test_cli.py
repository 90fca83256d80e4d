"""The command line. Most tests run in process over one loaded MiniLM; a few run the program."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import anypool
from anypool.engine.engine import Engine
from anypool.engine.prompt_options import PromptOptions
from anypool.entrypoints import cli_embed, cli_files, cli_info, cli_scores
from anypool.entrypoints.cli import build_parser, main
from anypool.entrypoints.cli_flags import engine_arguments
from anypool.entrypoints.llm import LLM
from anypool.pooling.params import PoolingParams
from anypool.pooling.quantize import PRECISIONS, quantize_embeddings
from anypool.pooling.tasks import PoolingTask
from tests.named_checkpoints import link_named

TEXTS = ["How tall is the Eiffel Tower?", "330 m", "ein Satz, größer"]

ENGINE_FLAGS = {
    "--tokenizer",
    "--revision",
    "--trust-remote-code",
    "--runner",
    "--convert",
    "--dtype",
    "--quantization",
    "--min-quantized-cosine",
    "--max-model-len",
    "--pooler-config",
    "--hf-overrides",
    "--skip-tokenizer-init",
    "--device",
    "--model-impl",
    "--max-num-batched-tokens",
    "--max-num-seqs",
    "--max-queue-s",
    "--max-queued-tokens",
    "--enable-chunked-prefill",
    "--no-enable-chunked-prefill",
    "--enable-prefix-caching",
    "--no-enable-prefix-caching",
    "--block-size",
    "--kv-cache-memory-fraction",
    "--gpu-memory-utilization",
    "--stuck-after-s",
    "--download-dir",
    "--lora",
    "--enable-lora",
    "--lora-modules",
    "--max-loras",
    "--max-lora-rank",
    "--served-model-name",
    "--chat-template",
    "--tensor-parallel-size",
    "--pipeline-parallel-size",
    "--data-parallel-size",
    "--enforce-eager",
    "--use-tqdm-on-load",
    "--no-use-tqdm-on-load",
}
FILE_FLAGS = {"--input", "--input-field", "--output"}
PROMPT_FLAGS = {"--prompt-name", "--truncate", "--truncate-prompt-tokens"}
OWN_FLAGS = {
    "embed": FILE_FLAGS
    | PROMPT_FLAGS
    | {
        "--dimensions",
        "--normalize",
        "--no-normalize",
        "--precision",
        "--calibration",
        "--sparse",
        "--max-active-dims",
        "--keep",
        "--output-format",
        "--rows-per-part",
        "--on-error",
        "--overwrite",
        "--ray",
        "--ray-actors",
        "--ray-cpus",
        "--ray-gpus",
    },
    "classify": FILE_FLAGS | PROMPT_FLAGS | {"--activation"},
    "reward": FILE_FLAGS | PROMPT_FLAGS | {"--activation"},
    "rerank": FILE_FLAGS | {"--query", "--top-n", "--instruction", "--truncate-prompt-tokens", "--activation"},
    "serve": {
        "--model",
        "--config",
        "--host",
        "--port",
        "--api-key",
        "--api-key-file",
        "--max-body-bytes",
        "--max-inputs",
        "--max-concurrent-requests",
        "--max-request-tokens",
        "--request-timeout",
        "--body-timeout",
        "--allow-origin",
        "--trust-request-chat-template",
        "--allow-image-urls",
        "--lora-dir",
        "--metrics",
        "--no-metrics",
        "--docs",
        "--no-docs",
        "--page",
        "--no-page",
        "--access-log",
        "--otlp-traces-endpoint",
        "--log-format",
        "--shutdown-delay",
        "--drain-timeout",
        "--ssl-certfile",
        "--ssl-keyfile",
        "--ssl-keyfile-password",
        "--ssl-ca-certs",
    },
    "info": {"--json"},
    "bench": {"--side", "--sets", "--rounds", "--texts", "--gguf", "--out", "--profile"},
    "plan": {
        "--docs",
        "--tokens",
        "--input",
        "--input-field",
        "--gpu",
        "--share",
        "--price-per-hour",
        "--days",
        "--dimensions",
        "--dtype",
        "--max-num-batched-tokens",
        "--download-dir",
        "--revision",
        "--trust-remote-code",
        "--json",
    },
}


@pytest.fixture
def loaded(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Commands get the loaded engine; what they would have loaded is recorded."""
    calls: list[dict[str, Any]] = []

    class Borrowed(LLM):
        def __init__(self, model: str, **engine_args: Any) -> None:
            calls.append({"model": model, **engine_args})
            self.engine = engine

        def close(self) -> None:
            pass

        def __del__(self) -> None:
            pass

    monkeypatch.setattr(cli_embed, "LLM", Borrowed)
    return calls


@pytest.fixture
def nothing_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any, **__: Any) -> None:
        pytest.fail("the model was loaded")

    monkeypatch.setattr(cli_embed, "LLM", load)
    monkeypatch.setattr(cli_scores, "LLM", load)
    monkeypatch.setattr("anypool.entrypoints.cli_serve.Engine", load)


@pytest.fixture
def expected(engine: Engine) -> Callable[..., np.ndarray]:
    def embed(texts: list[str], truncate: int | None = None, **params: Any) -> np.ndarray:
        options = PromptOptions(truncate_prompt_tokens=truncate)
        requests = engine.prepare(texts, PoolingTask.EMBED, PoolingParams(**params), options)
        engine.submit(requests)
        return np.stack([request.future.result().numpy() for request in requests])

    return embed


def rows(text: str) -> np.ndarray:
    lines = [json.loads(line) for line in text.splitlines()]
    assert [line["index"] for line in lines] == list(range(len(lines)))
    return np.array([line["embedding"] for line in lines], np.float32)


def fails(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Runs a command that the user got wrong, and returns its one line."""
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    [line] = captured.err.splitlines()
    assert line.startswith("anypool: error: ")
    return line.removeprefix("anypool: error: ")


# Flags.


@pytest.mark.parametrize("command", OWN_FLAGS)
def test_flags_are_those_that_are_documented(command: str) -> None:
    [commands] = [a for a in build_parser()._actions if isinstance(a.choices, dict)]
    parser = commands.choices[command]
    flags = {flag for action in parser._actions for flag in action.option_strings} - {"-h", "--help"}
    assert flags == OWN_FLAGS[command] | (set() if command in ("bench", "plan") else ENGINE_FLAGS)
    document = (Path(__file__).parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")
    assert [flag for flag in sorted(flags) if f"`{flag}" not in document] == []


def test_flags_that_are_not_given_are_left_to_the_config() -> None:
    assert engine_arguments(build_parser().parse_args(["info", "m"])) == {}


def test_flags_become_engine_arguments() -> None:
    argv = [
        "info", "m", "--dtype", "float32", "--max-model-len", "128", "--trust-remote-code", "--no-use-tqdm-on-load",
        "--pooler-config", '{"pooling_type": "CLS"}', "--hf-overrides", '{"is_causal": false}',
    ]  # fmt: skip
    assert engine_arguments(build_parser().parse_args(argv)) == {
        "dtype": "float32",
        "max_model_len": 128,
        "trust_remote_code": True,
        "use_tqdm_on_load": False,
        "pooler_config": {"pooling_type": "CLS"},
        "hf_overrides": {"is_causal": False},
    }


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--max-model-len", "many"], "invalid int value: 'many'"),
        (["--pooler-config", "CLS"], "'CLS' is not JSON"),
        (["--pooler-config", "[1]"], "not a JSON object"),
        (["--max-model", "3"], "unrecognized arguments: --max-model 3; did you mean --max-model-len?"),
        (["--qqqq"], "unrecognized arguments: --qqqq; see"),
    ],
)
def test_flag_of_a_wrong_form_is_refused(capsys: pytest.CaptureFixture[str], argv: list[str], words: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["info", "m", *argv])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.startswith("anypool: error: ")
    assert error.endswith(" --help\n")
    assert error.count("\n") == 1


@pytest.mark.parametrize("command", OWN_FLAGS)
def test_an_unknown_flag_names_the_commands_own_help(capsys: pytest.CaptureFixture[str], command: str) -> None:
    with pytest.raises(SystemExit):
        main([command, "m", *(["--query", "q"] if command == "rerank" else []), "--no-such", "x"])
    assert "--no-such" in (error := capsys.readouterr().err)
    assert error.endswith(f"; see anypool {command} --help\n")


def test_help_names_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert all(command in out for command in OWN_FLAGS)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"anypool {anypool.__version__}\n"


# embed.


def test_embed_prints_json_lines(
    loaded: list[dict[str, Any]], expected: Callable[..., np.ndarray], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["embed", "m", *TEXTS, "--dtype", "float32"]) == 0
    assert loaded == [{"model": "m", "dtype": "float32"}]
    np.testing.assert_array_equal(rows(capsys.readouterr().out), expected(TEXTS))


def test_embed_passes_its_parameters(
    loaded: list[dict[str, Any]], expected: Callable[..., np.ndarray], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["embed", "m", *TEXTS, "--dimensions", "5", "--no-normalize"]) == 0
    np.testing.assert_array_equal(rows(capsys.readouterr().out), expected(TEXTS, dimensions=5, normalize=False))


@pytest.mark.parametrize(("flags", "limit"), [(["--truncate"], -1), (["--truncate-prompt-tokens", "4"], 4)])
def test_embed_truncates_when_asked(
    loaded: list[dict[str, Any]],
    expected: Callable[..., np.ndarray],
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    limit: int,
) -> None:
    long = "word and " * 300
    assert "text 1 has 602 tokens, the limit is 256" in fails(capsys, "embed", "m", long)
    assert main(["embed", "m", long, *flags]) == 0
    np.testing.assert_array_equal(rows(capsys.readouterr().out), expected([long], limit))


@pytest.mark.parametrize("ending", [".npy", ".jsonl", ".parquet"])
def test_output_files_hold_the_same_vectors(
    loaded: list[dict[str, Any]], expected: Callable[..., np.ndarray], tmp_path: Path, ending: str
) -> None:
    output = tmp_path / f"out{ending}"
    output.write_bytes(b"old")
    assert main(["embed", "m", *TEXTS, "--output", str(output)]) == 0
    np.testing.assert_array_equal(read(output), expected(TEXTS))
    assert [path.name for path in tmp_path.iterdir()] == [output.name]


@pytest.mark.parametrize("ending", [".npy", ".jsonl", ".parquet"])
def test_empty_input_gives_an_empty_file(loaded: list[dict[str, Any]], tmp_path: Path, ending: str) -> None:
    (tmp_path / "in.txt").touch()
    output = tmp_path / f"out{ending}"
    assert main(["embed", "m", "--input", str(tmp_path / "in.txt"), "--output", str(output)]) == 0
    assert len(read(output)) == 0


def read(output: Path, dtype: Any = np.float32, size: int = 384) -> np.ndarray:
    if output.suffix == ".npy":
        array: np.ndarray = np.load(output)
        assert array.dtype == dtype
        assert array.shape[1:] == (size,)
        return array
    if output.suffix == ".jsonl":
        return rows(output.read_text(encoding="utf-8"))
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(output)
    assert table["index"].to_pylist() == list(range(len(table)))
    kind = table["embedding"].type
    assert (kind.value_type, kind.list_size) == (pyarrow.from_numpy_dtype(dtype), size)
    return np.array(table["embedding"].to_pylist(), dtype)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("ending", [".npy", ".jsonl", ".parquet"])
def test_precision_is_stored_as_the_library_quantises(
    loaded: list[dict[str, Any]],
    expected: Callable[..., np.ndarray],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    precision: str,
    ending: str,
) -> None:
    output = tmp_path / f"out{ending}"
    assert main(["embed", "m", *TEXTS, "--precision", precision, "--output", str(output)]) == 0
    stored = quantize_embeddings(expected(TEXTS), precision)
    np.testing.assert_array_equal(read(output, stored.dtype, stored.shape[1]), stored)
    assert ("ranges from these 3 texts" in capsys.readouterr().err) == (precision in ("int8", "uint8"))


def test_calibration_file_gives_the_ranges(
    loaded: list[dict[str, Any]],
    expected: Callable[..., np.ndarray],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    file = str(tmp_path / "calibration.npy")
    np.save(file, expected(TEXTS))
    assert main(["embed", "m", TEXTS[0], "--precision", "int8", "--calibration", file]) == 0
    captured = capsys.readouterr()
    stored = quantize_embeddings(expected(TEXTS[:1]), "int8", calibration_embeddings=expected(TEXTS))
    np.testing.assert_array_equal(rows(captured.out), stored)
    assert "ranges" not in captured.err
    words = "ranges have the shape [2, 384]; embeddings of 5 dimensions need [2, 5]"
    argv = ["embed", "m", "a", "--dimensions", "5", "--precision", "int8", "--calibration", file]
    assert fails(capsys, *argv) == words


@pytest.mark.parametrize(
    ("name", "content", "flags"),
    [
        ("in.txt", "\n".join(TEXTS), []),
        ("in.txt", "\ufeff" + "\r\n".join(TEXTS) + "\r\n", []),
        ("in.jsonl", "\n\n".join(json.dumps({"id": 1, "text": text}) for text in TEXTS), []),
        ("in.jsonl", "\n".join(json.dumps({"text": 0, "body": text}) for text in TEXTS), ["--input-field", "body"]),
        ("in.jsonl", "\n".join(json.dumps(text, ensure_ascii=False) for text in TEXTS), []),
        ("-", "\n".join(TEXTS), []),
    ],
)
def test_input_forms(
    loaded: list[dict[str, Any]],
    expected: Callable[..., np.ndarray],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    name: str,
    content: str,
    flags: list[str],
) -> None:
    data = content.encode()
    monkeypatch.chdir(tmp_path)
    if name == "-":
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    else:
        Path(name).write_bytes(data)
    assert main(["embed", "m", "--input", name, *flags]) == 0
    np.testing.assert_array_equal(rows(capsys.readouterr().out), expected(TEXTS))


def test_byte_order_mark_is_no_part_of_the_first_line() -> None:
    lines = list(cli_files.read_lines([b"\xef\xbb\xbfa\r\n", b"\xef\xbb\xbfb\n"], "file"))
    assert lines == ["a", "\ufeffb"]


def test_empty_lines_of_text_keep_their_place(
    loaded: list[dict[str, Any]],
    expected: Callable[..., np.ndarray],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    (tmp_path / "in.txt").write_text("a\n\nb \u2028 c\n", encoding="utf-8")
    assert main(["embed", "m", "--input", str(tmp_path / "in.txt")]) == 0
    np.testing.assert_array_equal(rows(capsys.readouterr().out), expected(["a", "", "b \u2028 c"]))


@pytest.mark.usefixtures("nothing_loads")
@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["embed", "m"], "nothing to embed: give texts, or --input FILE"),
        (["embed", "m", "a", "--input", "in.txt"], "texts and --input were both given: give one of them"),
        (["embed", "m", "--input", "none.txt"], "none.txt: No such file or directory"),
        (["embed", "m", "--input", "latin.txt"], "latin.txt: line 2 is not UTF-8: invalid start byte"),
        (["embed", "m", "--input", "bad.jsonl"], "bad.jsonl: line 1 is not JSON: "),
        (["embed", "m", "--input", "numbers.jsonl"], "numbers.jsonl: line 2 is neither a string nor an object with"),
        (["embed", "m", "a", "--output", "out.csv"], "--output out.csv: known endings are .npy, .jsonl, .parquet"),
        (["embed", "m", "a", "--output", "no/out.npy"], "--output no/out.npy: there is no folder no"),
        (["embed", "m", "a", "--output", "folder.npy"], "--output folder.npy: cannot be written to"),
        (["embed", "m", "a", "--dimensions", "0"], "dimensions=0 is not a positive integer"),
        (["embed", "m", "a", "--precision", "int8"], "--precision int8 cannot take its ranges from fewer than two"),
        (["embed", "m", "a", "--calibration", "a.npy"], "--calibration has no meaning for --precision float32"),
        (["embed", "m", "a", "--precision", "uint8", "--calibration", "none.npy"], "none.npy: No such file"),
        (["embed", "m", "a", "--precision", "uint8", "--calibration", "bad.jsonl"], "--calibration bad.jsonl is not a"),
        (
            ["embed", "m", "a", "--precision", "uint8", "--calibration", "row.npy"],
            "--calibration row.npy has shape [3]",
        ),
        (["classify", "m"], "nothing to classify: give texts, or --input FILE"),
        (["classify", "m", "a", "--output", "out.npy"], "--output out.npy: known endings are .jsonl, .parquet"),
        (["reward", "m"], "nothing to reward: give texts, or --input FILE"),
        (["reward", "m", "--input", "bad.jsonl"], "bad.jsonl: line 1 is not JSON: "),
        (["rerank", "m", "--query", "q"], "nothing to rank: give texts, or --input FILE"),
        (["rerank", "m", "a", "--query", "q", "--top-n", "0"], "--top-n 0 is not a positive number of documents"),
        (["serve", "m", "--dtype", "int3"], "dtype='int3' is unknown; known: auto, float32, bfloat16, float16"),
        (["serve", "m", "--pooler-config", '{"pooling": "CLS"}'], "pooler_config: unknown argument 'pooling'; did you"),
        (["serve", "m", "--host", "192.0.2.1"], "cannot listen on 192.0.2.1:8000: "),
        (["serve", "m", "--host", "no such host"], "cannot listen on no such host:8000: "),
        (["serve", "m", "--port", "70000"], "port=70000 is not 0 to 65535"),
    ],
)
def test_users_error_is_one_line_before_anything_is_loaded(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    argv: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("latin.txt").write_bytes("ok\nhöher\n".encode("latin-1"))
    Path("bad.jsonl").write_text("text\n", encoding="utf-8")
    Path("numbers.jsonl").write_text('"a"\n{"text": 1}\n', encoding="utf-8")
    Path("folder.npy").mkdir()
    np.save("row.npy", np.zeros(3, np.float32))
    assert fails(capsys, *argv).startswith(message)


@pytest.mark.usefixtures("nothing_loads")
def test_missing_pyarrow_is_named_with_the_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    line = fails(capsys, "embed", "m", "a", "--output", str(tmp_path / "out.parquet"))
    assert line.endswith("needs pyarrow: pip install 'anypool[parquet]'")


@pytest.mark.usefixtures("nothing_loads")
def test_port_in_use_is_found_before_loading(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert fails(capsys, "serve", "m", "--port", str(port)).startswith(f"cannot listen on 127.0.0.1:{port}: ")


def test_request_that_cannot_be_served_is_one_line_and_leaves_the_old_file(
    loaded: list[dict[str, Any]], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    output = tmp_path / "out.npy"
    output.write_bytes(b"old")
    for flags in (["--prompt-name", "none"], ["--dimensions", "385"], ["--truncate-prompt-tokens", "0"]):
        fails(capsys, "embed", "m", "a", "--output", str(output), *flags)
    assert output.read_bytes() == b"old"
    assert len(list(tmp_path.iterdir())) == 1


def test_file_that_is_not_finished_does_not_appear(tmp_path: Path) -> None:
    def write_half() -> None:
        with cli_files.atomic_file(tmp_path / "out.npy") as file:
            file.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_half()
    assert list(tmp_path.iterdir()) == []


def test_missing_model_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for command in (["info"], ["embed"], ["serve", "--port", "0"]):
        argv = [command[0], str(tmp_path / "none"), *command[1:], *(["a"] if command == ["embed"] else [])]
        assert "none" in fails(capsys, *argv)


def test_interrupt_exits_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli_embed, "LLM", interrupt)
    assert main(["embed", "m", "a"]) == 130


def test_errors_of_ours_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("a bug")

    monkeypatch.setattr(cli_embed, "LLM", fail)
    with pytest.raises(AssertionError, match="a bug"):
        main(["embed", "m", "a"])


# classify, reward, rerank.


@pytest.fixture
def named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory with tiny checkpoints by the names of models."""
    link_named(tmp_path)
    monkeypatch.chdir(tmp_path)


CLASSIFIER = "distilbert/distilbert-base-uncased-finetuned-sst-2-english"
REWARDS = "Skywork/Skywork-Reward-V2-Llama-3.2-1B"
STEPS = "Qwen/Qwen2.5-Math-PRM-7B"
RERANKER = "Qwen/Qwen3-Reranker-0.6B"


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.usefixtures("named")
@pytest.mark.parametrize("activation", [None, "none", "sigmoid"])
def test_classify_prints_labels_and_scores(capsys: pytest.CaptureFixture[str], activation: str | None) -> None:
    with LLM(CLASSIFIER, use_tqdm_on_load=False) as llm:
        outputs = llm.classify(TEXTS, PoolingParams(activation=activation), use_tqdm=False)
    flags = [] if activation is None else ["--activation", activation]
    assert main(["classify", CLASSIFIER, *TEXTS, "--no-use-tqdm-on-load", *flags]) == 0
    assert lines(capsys.readouterr().out) == [
        {"index": i, "label": one.outputs.label, "probs": pytest.approx(one.outputs.probs)}
        for i, one in enumerate(outputs)
    ]


@pytest.mark.usefixtures("named")
@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
def test_classify_writes_files(tmp_path: Path, ending: str) -> None:
    Path("in.txt").write_text("\n".join(TEXTS), encoding="utf-8")
    assert main(["classify", CLASSIFIER, "--input", "in.txt", "--output", f"out{ending}"]) == 0
    rows = read_rows(tmp_path / f"out{ending}")
    assert [row["index"] for row in rows] == [0, 1, 2]
    assert {row["label"] for row in rows} <= {"NEGATIVE", "POSITIVE"}
    assert all(sum(row["probs"]) == pytest.approx(1) for row in rows)


def read_rows(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".jsonl":
        return lines(path.read_text(encoding="utf-8"))
    import pyarrow.parquet

    found: list[dict[str, Any]] = pyarrow.parquet.read_table(path).to_pylist()
    return found


@pytest.mark.usefixtures("named")
@pytest.mark.parametrize(("model", "texts"), [(REWARDS, ["a", "b c"]), (STEPS, ["a<extra_0>b<extra_0>", "c<extra_0>"])])
def test_reward_prints_a_number_or_one_per_step(
    capsys: pytest.CaptureFixture[str], model: str, texts: list[str]
) -> None:
    with LLM(model, use_tqdm_on_load=False) as llm:
        rewards = [output.outputs.data.squeeze(-1).tolist() for output in llm.reward(texts, use_tqdm=False)]
    assert main(["reward", model, *texts]) == 0
    assert lines(capsys.readouterr().out) == [
        {"index": i, "reward": pytest.approx(reward)} for i, reward in enumerate(rewards)
    ]
    assert main(["reward", model, *texts, "--output", "out.parquet"]) == 0
    assert [row["reward"] for row in read_rows(Path("out.parquet"))] == [pytest.approx(reward) for reward in rewards]


@pytest.mark.usefixtures("named")
def test_rerank_prints_the_best_first(capsys: pytest.CaptureFixture[str]) -> None:
    documents = ["a cat", "größer", "the mat"]
    with LLM(RERANKER, use_tqdm_on_load=False) as llm:
        results = llm.rerank("cat", documents, use_tqdm=False)
    expected = [
        {"index": one.index, "relevance_score": pytest.approx(one.relevance_score), "document": one.document}
        for one in results
    ]
    assert main(["rerank", RERANKER, "--query", "cat", *documents]) == 0
    assert lines(capsys.readouterr().out) == expected
    assert main(["rerank", RERANKER, *documents, "--query", "cat", "--top-n", "2"]) == 0
    assert lines(capsys.readouterr().out) == expected[:2]


@pytest.mark.usefixtures("named")
def test_rerank_passes_instruction_and_activation(capsys: pytest.CaptureFixture[str]) -> None:
    with LLM(RERANKER, use_tqdm_on_load=False) as llm:
        [result] = llm.rerank(
            "q", ["d"], instruction="i", pooling_params=PoolingParams(activation="none"), use_tqdm=False
        )
    assert main(["rerank", RERANKER, "--query", "q", "d", "--instruction", "i", "--activation", "none"]) == 0
    [line] = lines(capsys.readouterr().out)
    assert line["relevance_score"] == pytest.approx(result.relevance_score)


def test_task_that_is_not_served_is_one_line(minilm: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = fails(capsys, "classify", minilm, "a", "--no-use-tqdm-on-load")
    assert line.startswith("task 'classify' is not served by")


@pytest.mark.parametrize(
    ("argv", "texts"),
    [
        (["a", "b", "--query", "q"], ["a", "b"]),
        (["--query", "q", "a", "b"], ["a", "b"]),
        (["a", "--query", "q", "b", "--", "-c", "--query"], ["a", "b", "-c", "--query"]),
        (["--query", "q"], []),
    ],
)
def test_texts_may_stand_before_and_after_flags(argv: list[str], texts: list[str]) -> None:
    assert build_parser().parse_args(["rerank", "m", *argv]).texts == texts


def test_unknown_flag_between_texts_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["embed", "m", "a", "--quick", "b"])
    assert "unrecognized arguments: --quick" in capsys.readouterr().err


# info.


@pytest.fixture
def info(engine: Engine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    monkeypatch.setattr(cli_info, "start_engine", lambda config: engine)
    monkeypatch.setattr(engine, "close", lambda: None)

    def run(*flags: str) -> str:
        assert main(["info", "m", *flags]) == 0
        return capsys.readouterr().out

    return run


def test_info_says_what_the_model_is_and_who_decided(info: Callable[..., str], minilm: str) -> None:
    facts = json.loads(info("--json"))
    files = "sentence-transformers files"
    assert facts["model"] == minilm
    assert facts["architecture"] == "BertModel"
    assert (facts["class"], facts["runs"]) == ("BertForEmbedding", "native")
    assert facts["batches"] == {"way": "packed", "rejected": []}
    assert (facts["dtype"], facts["device"]) == ("float32", "cpu")
    assert facts["pooling"]["pooling_type"] == {"value": ["MEAN"], "source": files}
    assert facts["pooling"]["normalize"] == {"value": True, "source": files}
    assert facts["pooling"]["dimensions"]["value"] is None
    assert facts["embedding_size"] == 384
    assert (facts["max_model_len"], facts["vocab_size"]) == (256, 30522)
    assert facts["modules"] == []
    assert "embed" in facts["tasks"]
    assert 22_000_000 < facts["parameters"] < 23_000_000


@pytest.mark.usefixtures("named")
def test_info_shows_the_head_and_who_decided(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", CLASSIFIER, "--json", "--pooler-config", '{"activation": "sigmoid", "logit_sigma": 2}']) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["head"] == {
        "per": "text",
        "layers": [
            {"name": "pre_classifier", "in_features": 32, "out_features": 32, "activation": "relu"},
            {"name": "classifier", "in_features": 32, "out_features": 2, "activation": None},
        ],
        "labels": ["NEGATIVE", "POSITIVE"],
        "logit_mean": 0.0,
        "logit_sigma": 2,
    }
    assert facts["pooling"]["activation"] == {"value": "sigmoid", "source": "user"}
    assert facts["pooling"]["score_pooling_type"] == {"value": ["CLS"], "source": "model class"}
    assert "classify" in facts["tasks"]
    layers = {"grouped": 1}
    assert facts["attention"] == {"causal": False, "sliding_window": None, "softcap": None, "layers": layers}
    assert facts["rerank_template"] is None


@pytest.mark.usefixtures("named")
def test_info_shows_the_template_of_a_reranker(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", RERANKER]) == 0
    shown = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
    assert shown["rerank template"].strip() == "Qwen3-Reranker"
    assert shown["head"].strip() == "rows of the LM head 32 -> 1, per text"
    assert shown["attention"].strip() == "causal (layers: 1 grouped)"


def test_info_is_aligned_text(info: Callable[..., str]) -> None:
    lines = info().splitlines()
    starts = {len(line) - len(line.split("  ", 1)[1].lstrip()) for line in lines}
    assert len(starts) == 1
    assert any(line.startswith("pooling_type") and "MEAN (from: sentence-transformers files)" in line for line in lines)


def test_info_shows_modules_prompts_and_sizes() -> None:
    facts: dict[str, Any] = {
        "model": "m", "architecture": "A", "class": "C", "runs": "transformers", "dtype": "float32",
        "parameters": 12345,
        "batches": {"way": "padded", "rejected": ["packed batches: it takes no position_ids"]},
        "quantization": {"layers": 24, "kept_layers": ["a"], "mean_cosine": 0.99126, "min_cosine": 0.98},
        "device": "cpu", "tasks": ["embed"], "texts_in_chat_template": False,
        "modalities": ["text", "image"], "embedding_size": 256,
        "trained_dimensions": [128, 256],
        "attention": {
            "causal": True, "sliding_window": 512, "softcap": 50.0, "layers": {"triton": 26, "varlen": 2}
        },
        "similarity": "dot",
        "multi_vector": None,
        "sparse": {"made_by": "SPLADE", "size": 10, "max_active_dims": 64, "looked_up": ["queries"]},
        "rerank_template": "T",
        "head": {
            "per": "token", "labels": ["A", "B"], "logit_mean": 1.5, "logit_sigma": 2.0,
            "layers": [{"name": "score", "in_features": 768, "out_features": 2, "activation": "tanh"}],
        },
        "pooling": {"dimensions": {"value": 128, "source": "user"}, "normalize": {"value": False, "source": "user"}},
        "modules": [{"type": "Dense", "path": "2_Dense", "in_features": 768, "out_features": 256}, {"type": "X"}],
        "prompts": {"query": "query: "}, "default_prompt_name": "query", "max_model_len": 512, "vocab_size": 10,
        "max_num_batched_tokens": 4096, "max_num_seqs": 256, "enable_chunked_processing": True,
        "enable_chunked_prefill": True, "enable_prefix_caching": False,
    }  # fmt: skip
    text = cli_info.as_text(facts)
    for words in (
        "C (transformers, in padded batches)",
        "packed batches: it takes no position_ids",
        "12,345",
        "text, image",
        "int8, 24 layers, 1 kept; cosine with the unquantised model: mean 0.9913, lowest 0.9800",
        "up to 4,096 tokens, 256 prompts; longer prompts in chunks",
        "128 (from: user)",
        "no (from: user)",
        "Dense 768 -> 256, X",
        "SPLADE, at most 64; looked up for queries",
        "128, 256",
        "'query: '",
        "causal, sliding window of 512 tokens, scores soft-capped at 50 (layers: 26 triton, 2 varlen)",
        "score 768 -> 2 tanh, per token",
        "A, B",
        "(score - 1.5) / 2",
        "512 tokens; longer ones in windows",
    ):
        assert words in text


# The program.


def program(*argv: str, **arguments: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "anypool", *argv], **arguments)


@pytest.mark.timeout(120)
def test_program_embeds_stdin_and_keeps_stdout_clean(minilm: str, expected: Callable[..., np.ndarray]) -> None:
    process = program(
        "embed", minilm, "--input", "-", stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    out, _ = process.communicate("\n".join(TEXTS).encode(), timeout=100)
    assert process.returncode == 0
    np.testing.assert_allclose(rows(out.decode()), expected(TEXTS), atol=1e-6)


@pytest.mark.timeout(120)
def test_program_stops_quietly_when_its_reader_does(minilm: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    # So little that it is still in Python's buffer when the process ends.
    process = program("embed", minilm, "a", "--dimensions", "2", stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    _, err = process.communicate(timeout=100)
    assert process.returncode == 128 + signal.SIGPIPE
    assert b"rror" not in err
    assert b"Traceback" not in err
