"""Which model runs a job and how, so that another run can tell whether it would go on with the same."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

# Settings that change how fast texts are run, how much memory that takes, or what is shown, and no vector.
_NO_MATTER = frozenset(
    "max_num_batched_tokens max_num_seqs max_queued_tokens max_queue_s enable_chunked_prefill enable_prefix_caching "
    "block_size kv_cache_memory_fraction gpu_memory_utilization stuck_after_s download_dir served_model_name "
    "enforce_eager use_tqdm_on_load".split()
)
_SAMPLE = 1 << 16


def engine_identity(model: str, engine_args: Mapping[str, Any]) -> dict[str, Any]:
    """What another run must have in common, as JSON.

    A model of the hub is known by its name and revision, a local one by what its files hold at their ends.

    Args:
        model: A folder, a `.gguf` file or a hub id.
        engine_args: The fields of `EngineConfig` that are given.
    """
    settings = {name: _plain(value) for name, value in sorted(engine_args.items()) if name not in _NO_MATTER}
    return {"model": model, "model_files": _fingerprint(Path(model).expanduser()), "engine": settings}


def _fingerprint(path: Path) -> str | None:
    """A digest of the files' names, sizes, first and last bytes; None where there are none here."""
    if not path.exists():
        return None
    files = [path] if path.is_file() else sorted(one for one in path.rglob("*") if one.is_file())
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.relative_to(path)} {size}\n".encode())
        with file.open("rb") as opened:
            digest.update(opened.read(_SAMPLE))
            opened.seek(max(0, size - _SAMPLE))
            digest.update(opened.read(_SAMPLE))
    return digest.hexdigest()


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return _plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)
