"""What a run of the benchmark says: Markdown, and a picture."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from anypool.entrypoints.bench.driver import Measured, Results, TextSet
from anypool.entrypoints.bench.texts import describe

_NOTHING = "-"


def as_markdown(results: Results, command: str) -> str:
    """The report.

    Args:
        results: What was measured.
        command: What measured it.
    """
    blocks = [
        f"# {_name(results.plan.model)}",
        "\n".join([f"- CPU: {machine()}", f"- command: `{command}`", _rounds(results)]),
        "## Sides",
        _sides(results),
        *(f"- {side.spec.label} failed: {side.failure}" for side in results.sides if side.failure),
    ]
    for one in results.sets:
        blocks += [f"## {one.name.capitalize()} texts ({describe(one.name)})", *_set(results, one)]
    blocks += _ceilings(results)
    for side in results.sides:
        if side.breakdown is not None:
            blocks += [f"## Where the time of {side.spec.label} goes", _breakdown(side.breakdown)]
    return "\n\n".join(blocks) + "\n"


def _name(model: str) -> str:
    """The end of a path: the last folder alone often says no more than "model"."""
    return "/".join(Path(model).parts[-2:])


def machine() -> str:
    """The CPU's name, and how many cores and hardware threads this process may use of how many there are."""
    fields: dict[str, set[str]] = {}
    for line in _cpuinfo().splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), set()).add(value.strip())
    [model, *_] = [*sorted(fields.get("model name", ())), platform.processor() or platform.machine()]
    threads = os.cpu_count() or 1
    # Of one socket; siblings is how many threads it has.
    cores, siblings = (min(map(int, fields.get(name, ())), default=0) for name in ("cpu cores", "siblings"))
    real = threads * cores // siblings if cores and siblings else threads
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else threads
    return f"{model}, {_plural(real, 'core')}, {_plural(threads, 'thread')}, {usable} of them usable"


def _cpuinfo() -> str:
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return ""


def _rounds(results: Results) -> str:
    rounds = _plural(results.plan.rounds, "round")
    return f"- {rounds}, in which the sides take turns; figures are medians, with the range of all rounds"


def _sides(results: Results) -> str:
    rows = [
        (
            side.spec.label,
            side.dtype or _NOTHING,
            ", ".join(f"{name} {version}" for name, version in side.versions.items()) or _NOTHING,
            _NOTHING if side.startup_s is None else f"{side.startup_s:.1f} s",
            _NOTHING if side.peak_bytes is None else f"{side.peak_bytes / 1e6:,.0f} MB",
        )
        for side in results.sides
    ]
    return table(("side", "computes in", "versions", "start-up", "peak memory"), rows)


def _set(results: Results, one: TextSet) -> list[str]:
    if one.skipped is not None:
        return [f"Left out: {one.skipped}."]
    sides = [side for side in results.sides if side.seconds.get(one.name)]
    ours = next((side for side in sides if side.is_ours), None)
    reference = _reference(results, one.name)
    header = (
        *("side", "tokens/s", "range", f"x {ours.spec.label}" if ours else "ratio", "of GEMM ceiling"),
        *("mean cosine", "lowest cosine", "largest difference"),
    )
    rows = [(*_speed(side, one, ours), *_closeness(side, reference, one.name)) for side in sides]
    named = f", vectors beside those of {reference.spec.label}" if reference else ""
    return [f"{_plural(one.texts, 'text')}, {one.tokens:,} tokens{named}.", table(header, rows)]


def _speed(side: Measured, one: TextSet, ours: Measured | None) -> tuple[str, ...]:
    seconds, median = side.seconds[one.name], one.tokens / side.median_s(one.name)
    share = ceiling_share(side, one)
    return (
        side.spec.label,
        f"{median:,.0f}",
        f"{one.tokens / max(seconds):,.0f} to {one.tokens / min(seconds):,.0f}",
        _NOTHING if ours is None else f"{ours.median_s(one.name) / side.median_s(one.name):.2f}",
        _NOTHING if share is None else f"{share:.0%}",
    )


def ceiling_share(side: Measured, one: TextSet) -> float | None:
    """The part of the machine's fastest products that a side's linear layers reach over a whole run."""
    if not side.flop_per_s or not side.flop_per_token:
        return None
    return one.tokens / side.median_s(one.name) * side.flop_per_token / side.flop_per_s


def _reference(results: Results, name: str) -> Measured | None:
    """sentence-transformers in float32, or else the first side in float32."""
    exact = [side for side in results.sides if side.dtype == "float32" and name in side.vectors]
    return next((side for side in exact if side.spec.name == "sentence-transformers"), exact[0] if exact else None)


def _closeness(side: Measured, reference: Measured | None, name: str) -> tuple[str, str, str]:
    if reference is None or side is reference:
        return (_NOTHING, _NOTHING, _NOTHING)
    vectors_NE, expected_NE = side.vectors[name], reference.vectors[name]
    if vectors_NE.shape != expected_NE.shape:
        return (_NOTHING, _NOTHING, f"shape {list(vectors_NE.shape)}")
    cosines_N = (vectors_NE * expected_NE).sum(-1)
    largest = abs(vectors_NE - expected_NE).max()
    return (f"{cosines_N.mean():.5f}", f"{cosines_N.min():.5f}", f"{largest:.1e}")


def _ceilings(results: Results) -> list[str]:
    rows = [
        (side.spec.label, f"{side.flop_per_s / 1e9:,.0f} GFLOP/s", f"{side.flop_per_token / 1e6:,.1f} MFLOP")
        for side in results.sides
        if side.flop_per_s and side.flop_per_token
    ]
    if not rows:
        return []
    return ["## GEMM ceiling", table(("side", "fastest product here", "linear layers per token"), rows)]


def _breakdown(seconds: dict[str, float]) -> str:
    whole = sum(seconds.values())
    rows = [(name, f"{spent * 1e3:,.1f}", f"{spent / whole:.1%}") for name, spent in seconds.items()]
    return table(("what", "ms", "share"), [*rows, ("all", f"{whole * 1e3:,.1f}", "100.0%")])


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table whose first column is text and whose others are figures, in aligned columns."""
    cells = [list(header), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]

    def line(row: Sequence[str]) -> str:
        padded = [
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        return f"| {' | '.join(padded)} |"

    rule = [("-" * (width - 1) + ":") if i else "-" * width for i, width in enumerate(widths)]
    return "\n".join(map(line, [cells[0], rule, *cells[1:]]))


def draw(results: Results, file: Path) -> None:
    """Bars of tokens per second with their ranges, a panel per set. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    run = [one for one in results.sets if any(side.seconds.get(one.name) for side in results.sides)]
    height = 0.45 * len(results.sides) + 1.2
    figure, panels = pyplot.subplots(1, max(1, len(run)), figsize=(5 * max(1, len(run)) + 1, height), squeeze=False)
    for axes, one in zip(panels[0], run, strict=False):
        _panel(axes, one, [side for side in results.sides if side.seconds.get(one.name)])
    figure.suptitle(f"{_name(results.plan.model)}, {machine()}", fontsize=9)
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def _panel(axes: Any, one: TextSet, sides: Sequence[Measured]) -> None:
    labels = [side.spec.label for side in sides]
    rates = [sorted(one.tokens / seconds for seconds in side.seconds[one.name]) for side in sides]
    medians = [statistics.median(found) for found in rates]
    spread = [
        [median - found[0] for median, found in zip(medians, rates, strict=True)],
        [found[-1] - median for median, found in zip(medians, rates, strict=True)],
    ]
    colors = ["#1f5fa8" if side.is_ours else "#b8b8b8" for side in sides]
    axes.barh(range(len(sides)), medians, xerr=spread, color=colors, error_kw={"linewidth": 1})
    axes.set_yticks(range(len(sides)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.set_title(f"{one.name}: {describe(one.name)}", fontsize=9)
    axes.set_xlabel("tokens per second", fontsize=8)
    axes.tick_params(axis="x", labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
