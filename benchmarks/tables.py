"""Results as tables of words: for the terminal, and as Markdown for docs/BENCHMARKS.md."""

from collections.abc import Mapping, Sequence
from typing import Any

Rows = list[dict[str, str]]
"""Column -> text."""


def interval(numbers: Mapping[str, Any]) -> str:
    """A ratio with its 95 % interval, as far as there is one."""
    if numbers.get("ratio") is None:
        return "-"
    ends = "" if numbers["low"] is None else f" ({numbers['low']:.2f} to {numbers['high']:.2f})"
    return f"{numbers['ratio']:.2f}x{ends}"


def train_rows(shapes: Mapping[str, Any]) -> Rows:
    """Ours, and below it each peer with our ratio to it; the fastest is marked."""
    rows: Rows = []
    for name, shape in shapes.items():
        rows.append(_train_row(name, f"ingot ({shape['precision']})", shape, ""))
        for peer, numbers in shape["peers"].items():
            ours = f"work differs: {numbers['differs']}" if "differs" in numbers else interval(numbers)
            rows.append(_train_row(name, peer + (" *" if peer == shape["peer"] else ""), numbers, ours))
    return rows


def _train_row(shape: str, who: str, numbers: Mapping[str, Any], ours: str) -> dict[str, str]:
    share = "" if numbers["of_peak"] is None else f" ({100 * numbers['of_peak']:.0f} %)"
    return {
        "shape": shape,
        "who": who,
        "tok/s": f"{numbers['tok_s']:,}",
        "spread": f"{100 * numbers['spread']:.1f} %",
        "step ms (p10 to p90)": f"{numbers['step_ms']:,.1f} ({numbers['p10_ms']:,.1f} to {numbers['p90_ms']:,.1f})",
        "GFLOP/s (of the GEMM peak)": f"{numbers['gflop_s']:,.0f}{share}",
        "peak MB": f"{numbers['peak_bytes'] / 1e6:,.0f}",
        "loss": f"{numbers['loss']:.4f}",
        "ingot is": ours,
    }


def markdown(rows: Rows) -> str:
    """The same as a Markdown table."""
    if not rows:
        return ""
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(list(row.values()) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def refusals(shapes: Mapping[str, Any]) -> Sequence[str]:
    """A sentence for each peer whose work was another, so that no ratio was formed."""
    return [
        f"{name}: {peer} does other work than ingot ({numbers['differs']}), so no ratio to it is given"
        for name, shape in shapes.items()
        for peer, numbers in shape["peers"].items()
        if "differs" in numbers
    ]


def generate_rows(found: Sequence[Mapping[str, Any]]) -> Rows:
    """Ours by batch and precision, and each peer beside it."""
    rows: Rows = []
    for row in found:
        own = {"batch": str(row["rows"]), "weights": row["dtype"]}
        floor = f"{row['floor_ms']:.1f} ({row['of_floor']:.2f}x)" if row["of_floor"] else ""
        rows.append({**own, **_generate_row("ingot", row), "memory's floor ms": floor, "ingot is": ""})
        for peer, numbers in row["peers"].items():
            ours = f"work differs: {numbers['differs']}" if "differs" in numbers else interval(numbers)
            rows.append({**own, **_generate_row(peer, numbers), "memory's floor ms": "", "ingot is": ours})
    return rows


def _generate_row(who: str, numbers: Mapping[str, Any]) -> dict[str, str]:
    return {
        "who": who,
        "tok/s": f"{numbers['tok_s']:,.1f}",
        "spread": f"{100 * numbers['spread']:.1f} %",
        "prompt ms": f"{numbers['first_ms']:,.1f}",
        "ms a step": f"{numbers['token_ms']:,.2f}",
        "peak MB": f"{numbers['peak_bytes'] / 1e6:,.0f}",
    }


def align_rows(methods: Mapping[str, Any]) -> Rows:
    """All contenders by method; beside a peer how many times as fast ours is, as shipped and in fp32."""
    rows: Rows = []
    for method, contenders in methods.items():
        for who, numbers in contenders.items():
            ratios = numbers.get("ratios", {})
            differs = f"work differs: {numbers['differs']}" if "differs" in numbers else ""
            rows.append(
                {
                    "method": method,
                    "who": who,
                    "ms a step": f"{numbers['step_ms']:,.0f}",
                    "spread": f"{100 * numbers['spread']:.1f} %",
                    "peak MB": f"{numbers['peak_bytes'] / 1e6:,.0f}",
                    "ingot is": interval(ratios["ingot"]) if ratios else differs,
                    "ingot fp32 is": interval(ratios["ingot fp32"]) if ratios else "",
                }
            )
    return rows


def loader_rows(found: Mapping[str, Any]) -> Rows:
    """What a batch costs."""
    return [
        {
            "shape": name,
            "batch us": f"{row['batch_us']:,.0f}",
            "step ms": f"{row['step_ms']:,.1f}",
            "share of the step": f"{100 * row['share']:.2f} %",
        }
        for name, row in found.items()
    ]


def corpus_rows(found: Mapping[str, Any]) -> Rows:
    """Megabytes a second."""
    rows = [{"who": "ingot", "MB/s": f"{found['mb_s']:.1f}", "ingot is": found.get("differs", "")}]
    for peer, numbers in found["peers"].items():
        ours = f"work differs: {numbers['differs']}" if "differs" in numbers else interval(numbers)
        rows.append({"who": peer, "MB/s": f"{numbers['mb_s']:.1f}", "ingot is": ours})
    return rows


def startup_rows(found: Mapping[str, Any]) -> Rows:
    """Seconds to the first step, and of imports."""
    told = {"first_step_told_cold_s": "cold, told to compile", "first_step_told_warm_s": "warm, told to compile"}
    names = {"first_step_cold_s": "cold", "first_step_warm_s": "warm", **told}
    rows = [
        {"what": f"ingot run to the first step, {words}", "seconds": f"{found[name]:.1f}"}
        for name, words in names.items()
        if name in found
    ]
    return rows + [{"what": f"import {name}", "seconds": f"{s:.2f}"} for name, s in found["imports_s"].items()]


def head_rows(found: Mapping[str, Any]) -> Rows:
    """The head in chunks and whole."""
    return [
        {"head": way, "ms": f"{1000 * row['seconds']:,.1f}", "peak MB": f"{row['peak_bytes'] / 1e6:,.0f}"}
        for way, row in found["rows"].items()
    ]
