"""Results as tables of text, for the terminal and as Markdown for docs/BENCHMARKS.md."""

from collections.abc import Mapping, Sequence
from typing import Any

Rows = list[dict[str, str]]
"""Column -> text."""


def interval(numbers: Mapping[str, Any]) -> str:
    """A ratio with its 95 % interval if it has one; "-" without a ratio."""
    if numbers.get("ratio") is None:
        return "-"
    bounds = "" if numbers["low"] is None else f" ({numbers['low']:.2f} to {numbers['high']:.2f})"
    return f"{numbers['ratio']:.2f}x{bounds}"


def ratio_cell(numbers: Mapping[str, Any]) -> str:
    """The ratio to a peer, or how its work differs."""
    return f"work differs: {numbers['differs']}" if "differs" in numbers else interval(numbers)


def train_rows(shapes: Mapping[str, Any]) -> Rows:
    """For each shape ours, and each peer with our ratio to it; the fastest peer is marked."""
    rows: Rows = []
    for name, shape in shapes.items():
        rows.append(_train_row(name, f"ingot ({shape['precision']})", shape, ""))
        for peer, numbers in shape["peers"].items():
            marked = peer + (" *" if peer == shape["peer"] else "")
            rows.append(_train_row(name, marked, numbers, ratio_cell(numbers)))
    return rows


def _train_row(shape: str, contender: str, numbers: Mapping[str, Any], ratio: str) -> dict[str, str]:
    fraction = "" if numbers["of_peak"] is None else f" ({100 * numbers['of_peak']:.0f} %)"
    return {
        "shape": shape,
        "who": contender,
        "tok/s": f"{numbers['tok_s']:,}",
        "spread": f"{100 * numbers['spread']:.1f} %",
        "step ms (p10 to p90)": f"{numbers['step_ms']:,.1f} ({numbers['p10_ms']:,.1f} to {numbers['p90_ms']:,.1f})",
        "GFLOP/s (of the GEMM peak)": f"{numbers['gflop_s']:,.0f}{fraction}",
        "peak MB": f"{numbers['peak_bytes'] / 1e6:,.0f}",
        "loss": f"{numbers['loss']:.4f}",
        "ingot is": ratio,
    }


def markdown(rows: Rows) -> str:
    """Rows as a Markdown table."""
    if not rows:
        return ""
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(list(row.values()) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def refusals(shapes: Mapping[str, Any]) -> Sequence[str]:
    """A sentence for each peer without a ratio because its work differs."""
    return [
        f"{name}: {peer} does other work than ingot ({numbers['differs']}), so no ratio to it is given"
        for name, shape in shapes.items()
        for peer, numbers in shape["peers"].items()
        if "differs" in numbers
    ]


def generate_rows(results: Sequence[Mapping[str, Any]]) -> Rows:
    """For each batch size and dtype ours, and each peer with our ratio to it."""
    rows: Rows = []
    for result in results:
        workload = {"batch": str(result["rows"]), "weights": result["dtype"]}
        floor = f"{result['floor_ms']:.1f} ({result['of_floor']:.2f}x)" if result["of_floor"] else ""
        rows.append({**workload, **_generate_row("ingot", result), "memory's floor ms": floor, "ingot is": ""})
        for peer, numbers in result["peers"].items():
            ratio = {"memory's floor ms": "", "ingot is": ratio_cell(numbers)}
            rows.append({**workload, **_generate_row(peer, numbers), **ratio})
    return rows


def _generate_row(contender: str, numbers: Mapping[str, Any]) -> dict[str, str]:
    return {
        "who": contender,
        "tok/s": f"{numbers['tok_s']:,.1f}",
        "spread": f"{100 * numbers['spread']:.1f} %",
        "prompt ms": f"{numbers['first_ms']:,.1f}",
        "ms a step": f"{numbers['token_ms']:,.2f}",
        "peak MB": f"{numbers['peak_bytes'] / 1e6:,.0f}",
    }


def align_rows(methods: Mapping[str, Any]) -> Rows:
    """For each method all contenders; peers with the ratios of ours to them, as shipped and in fp32."""
    rows: Rows = []
    for method, contenders in methods.items():
        for contender, numbers in contenders.items():
            ratios = numbers.get("ratios", {})
            differs = f"work differs: {numbers['differs']}" if "differs" in numbers else ""
            rows.append(
                {
                    "method": method,
                    "who": contender,
                    "ms a step": f"{numbers['step_ms']:,.0f}",
                    "spread": f"{100 * numbers['spread']:.1f} %",
                    "peak MB": f"{numbers['peak_bytes'] / 1e6:,.0f}",
                    "ingot is": interval(ratios["ingot"]) if ratios else differs,
                    "ingot fp32 is": interval(ratios["ingot fp32"]) if ratios else "",
                }
            )
    return rows


def loader_rows(shapes: Mapping[str, Any]) -> Rows:
    """The time of a batch relative to a step."""
    return [
        {
            "shape": name,
            "batch us": f"{row['batch_us']:,.0f}",
            "step ms": f"{row['step_ms']:,.1f}",
            "fraction of the step": f"{100 * row['fraction']:.2f} %",
        }
        for name, row in shapes.items()
    ]


def corpus_rows(result: Mapping[str, Any]) -> Rows:
    """Throughput of the corpus pipeline, ours and the peers'."""
    rows = [{"who": "ingot", "MB/s": f"{result['mb_s']:.1f}", "ingot is": result.get("differs", "")}]
    for peer, numbers in result["peers"].items():
        rows.append({"who": peer, "MB/s": f"{numbers['mb_s']:.1f}", "ingot is": ratio_cell(numbers)})
    return rows


STARTS = {
    "first_step_cold_s": "cold",
    "first_step_warm_s": "warm",
    "first_step_told_cold_s": "cold, backend compiled",
    "first_step_told_warm_s": "warm, backend compiled",
}


def startup_rows(result: Mapping[str, Any]) -> Rows:
    """Seconds to the first step, and of imports."""
    rows = [
        {"what": f"ingot run to the first step, {start}", "seconds": f"{result[key]:.1f}"}
        for key, start in STARTS.items()
        if key in result
    ]
    return rows + [{"what": f"import {name}", "seconds": f"{s:.2f}"} for name, s in result["imports_s"].items()]


def head_rows(result: Mapping[str, Any]) -> Rows:
    """Time and memory of the LM head, chunked and whole."""
    return [
        {"head": variant, "ms": f"{1000 * row['seconds']:,.1f}", "peak MB": f"{row['peak_bytes'] / 1e6:,.0f}"}
        for variant, row in result["rows"].items()
    ]
