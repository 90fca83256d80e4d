"""A plan to be read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_WIDTH = 14


def as_text(facts: Mapping[str, Any]) -> str:
    """The plan as lines: a name, and what there is to say."""
    work, device, memory, speed, total = (facts[name] for name in ("work", "device", "memory", "speed", "total"))
    group = memory["devices_per_model"]
    per_token = f"{number(work['flop_per_token'])}FLOP per token"
    lines = [
        ("model", f"{facts['model']}, {number(facts['parameters'])}parameters, {facts['dtype']}"),
        (
            "work",
            f"{work['documents']:,} documents of {work['tokens_per_document']:,.0f} tokens ({work['lengths']}): "
            f"{number(work['tokens'])}tokens, {per_token}, {number(work['flop'])}FLOP",
        ),
        ("device", f"{device['name']}: {number(device['flop_per_s'])}FLOP/s ({device['source']})"),
        ("", f"of which {_range(device['share'], _percent)} ({device['share_source']})"),
        ("memory", _memory(memory)),
        ("speed", f"{_range(speed['tokens_per_s_per_device'], _whole)} tokens per second and device (an estimate)"),
        ("time", f"{_range(total['device_hours'], _whole)} device hours"),
    ]
    if group > 1:
        lines.insert(5, ("", f"split over {group} devices, the fewest that hold it; each takes the above"))
    if total["devices"] is not None:
        lines.append(("devices", f"{_range(total['devices'], _whole)} to be done in {total['days']:g} days"))
    if total["cost"] is not None:
        lines.append(("cost", f"{_range(total['cost'], _whole)} at {total['price_per_hour']:g} per device hour"))
    storage = facts["storage"]
    lines += [
        ("vectors", f"of {storage['dimensions']} dimensions: {_sizes(storage['vectors'])}"),
        ("index", _sizes(storage["index"])),
        ("left out", "; ".join(facts["ignored"])),
    ]
    return "\n".join(f"{name:<{_WIDTH}}{text}" for name, text in lines)


def number(value: float) -> str:
    """A number with three digits and the prefix of its unit, or a space where it has none."""
    for size, prefix in ((1e24, "Y"), (1e21, "Z"), (1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= size:
            return f"{value / size:.3g} {prefix}"
    return f"{value:,.0f} "


def size_of(count: float) -> str:
    """Bytes with a decimal unit, as disks are sold."""
    for size, unit in ((1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB")):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count / 1e3:.3g} kB"


def _memory(memory: Mapping[str, Any]) -> str:
    parts = {name: memory[name] for name in ("weights", "activations", "graphs", "cache") if memory[name]}
    listed = ", ".join(f"{name} {size_of(count)}" for name, count in parts.items())
    return f"{size_of(memory['needed'])} of {size_of(memory['limit'])}: {listed}"


def _sizes(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {size_of(count)}" for name, count in sizes.items())


def _range(values: Sequence[float], form: Any) -> str:
    low, high = map(form, values)
    return low if low == high else f"{low} to {high}"


def _whole(value: float) -> str:
    return f"{float(f'{value:.3g}'):,.0f}" if value >= 1 else f"{value:.2g}"


def _percent(value: float) -> str:
    return f"{100 * value:.3g} %"
