"""Files of HTTPS that cannot be used are named before a model is loaded."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from anypool.entrypoints.cli import main


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two pairs of a certificate and its key, the first also with an encrypted key, and a text."""
    folder = tmp_path_factory.mktemp("certificates")
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-days", "1", "-subj", "/CN=localhost"]
    for name in ("a", "b"):
        command = [*make, "-nodes", "-keyout", folder / f"{name}.key", "-out", folder / f"{name}.pem"]
        subprocess.run(command, check=True, capture_output=True)
    command = [
        "openssl",
        "rsa",
        "-aes256",
        "-passout",
        "pass:secret",
        "-in",
        folder / "a.key",
        "-out",
        folder / "a.enc",
    ]
    subprocess.run(command, check=True, capture_output=True)
    (folder / "text").write_text("no certificate")
    return folder


@pytest.mark.parametrize(
    ("certificate", "key", "further", "named"),
    [
        ("none", None, [], "none: No such file"),
        ("a.pem", "none", [], "none: No such file"),
        ("text", "a.key", [], "text' with the private key in"),
        ("a.pem", None, [], "cannot be used"),
        ("a.pem", "b.key", [], "belong together"),
        ("a.pem", "a.enc", [], "needs ssl_keyfile_password"),
        ("a.pem", "a.enc", ["--ssl-keyfile-password", "wrong"], "needs ssl_keyfile_password"),
        ("a.pem", "a.key", ["--ssl-ca-certs", "none"], "none: No such file"),
        ("a.pem", "a.key", ["--ssl-ca-certs", "text"], "text' holds no certificates"),
        ("a.pem", "a.enc", ["--ssl-keyfile-password", "secret"], "no-such-model"),
        ("a.pem", "a.key", ["--ssl-ca-certs", "b.pem"], "no-such-model"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(
    files: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    certificate: str,
    key: str | None,
    further: list[str],
    named: str,
) -> None:
    monkeypatch.chdir(files)
    flags = ["--port", "0", "--ssl-certfile", certificate, *([] if key is None else ["--ssl-keyfile", key]), *further]
    assert main(["serve", "./no-such-model", *flags]) == 2
    assert named in capsys.readouterr().err
