"""Renders the results of `python -m benchmarks all` as docs/BENCHMARKS.md."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import tables
from benchmarks.machine import load_warning, one_line
from ingot.core.artifact import atomic_write

HEAD = """# Benchmarks

Written by `make {target}`. ingot and the peers alternate over {repetitions} repetitions, and each measurement is a
process of its own. Numbers are medians; `spread` is (largest - smallest) / median of the repetitions. `ingot is` is the
ratio of tokens per second, ingot's to the peer's, with its 95 % interval (Student's t over the logarithms of the
repetitions' ratios). It is given only if parameters, FLOPs and the losses of the first steps agree. The fastest peer is
marked *. [bench.md](bench.md) defines the shapes and shows how to measure. Quote ratios, since absolute numbers depend
on the machine. An H100: [BENCHMARKS-GPU.md](BENCHMARKS-GPU.md).

Machine: {machine}.
"""

MODES = {
    "as shipped": "Peers as shipped: fp32.",
    "autocast": "Peers with bf16 autocast switched on.",
    "fp32": "ingot in fp32, peers as shipped.",
}


def page(results: Mapping[str, Any], target: str) -> str:
    """The page as Markdown.

    Args:
        results: as `commands.everything` returns them.
        target: the target of `make` that writes the page.
    """
    parts = [HEAD.format(target=target, repetitions=results["repetitions"], machine=one_line(results["machine"]))]
    if warning := load_warning(results["machine"]):
        parts.append(f"{warning}\n")
    parts.append("## Training\n")
    for mode, shapes in results["train"]["modes"].items():
        parts.append(f"{MODES[mode]}\n\n{tables.markdown(tables.train_rows(shapes))}\n")
    executions = {s["execution"] for shapes in results["train"]["modes"].values() for s in shapes.values()}
    parts.append("Execution of ingot: " + "; ".join(sorted(executions)) + ".\n")
    generated = results["generate"]
    parts.append(
        f"## Generation\n\nShape {generated['shape']}, greedy, prompts of {generated['prompt']} tokens. The floor is "
        f"bytes of weights / memory bandwidth, for a step of one row, both measured in turns. In fp32 with matrix "
        f"tiles ingot reads three bytes of four.\n\n"
        f"{tables.markdown(tables.generate_rows(generated['rows']))}\n"
    )
    parts.append(f"## Start-up\n\n{tables.markdown(tables.startup_rows(results['startup']))}\n")
    if "data" in results:
        parts.append(f"## Data\n\n{tables.markdown(tables.loader_rows(results['data']['loader']))}\n")
        parts.append(f"The corpus pipeline:\n\n{tables.markdown(tables.corpus_rows(results['data']['corpus']))}\n")
    if "align" in results:
        parts.append(f"## Post-training\n\n{tables.markdown(tables.align_rows(results['align']['methods']))}\n")
    if "head" in results:
        parts.append(f"## The LM head, chunked and whole\n\n{tables.markdown(tables.head_rows(results['head']))}\n")
    with_peers = [results[part] for part in ("train", "generate", "align") if part in results]
    skipped = {name: why for part in with_peers for name, why in part["skipped"].items()}
    parts += [f"Left out: {why}.\n" for why in skipped.values()]
    return "\n".join(parts)


def write_page(results: Mapping[str, Any], path: Path, target: str) -> None:
    """Write the page atomically."""
    atomic_write(path, page(results, target))
