"""Writes `docs/PROOFS.md`: a row for each proof, from the available results."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from ingot.core.artifact import atomic_write
from proofs.proof import Arm, Gate, Numbers, Proof, Results

HEAD = """# Proofs

Small experiments whose answer is known beforehand: from a closed form, by enumeration, or because the data were
generated from it. Every seed must pass every gate. A control is the same experiment with one thing broken, and must
fail a gate. Numbers are those of the seed that is nearest to the gate. `make proofs` runs the proofs (it resumes after
an interruption) and writes this page. "not run" means that there is no result for the current code.

Left out: K3, that a student of a teacher's layers needs no more steps than one of labels alone. On reversed letters it
needs more ([numbers](stages/distill.md#features-and-relations)), on text it ends lower.

| | Claim | Known answer | Measured (worst seed) | Controls | Seeds |
|---|---|---|---|---|---|
"""


def page(proofs: Sequence[Proof], results: Results, seeds: Sequence[int], to: Path, head: str = HEAD) -> None:
    """Write the table, and below it notes and figures; figures are files in `proofs/` beside the page."""
    table, sections = [], []
    for proof in proofs:
        by_arm = {
            arm.name: [r["numbers"] for seed in seeds if (r := results.read(proof, arm, seed))] for arm in proof.arms
        }
        cells = [_cell([a for a in proof.arms if a.control == control], by_arm) for control in (False, True)]
        complete = all(by_arm.values())
        counts = sorted({len(n) for n in by_arm.values()})
        seed_counts = "-".join(map(str, dict.fromkeys((counts[0], counts[-1])))) if counts[-1] else "–"
        table.append(f"| {proof.id} | {proof.claim} | {proof.answer} | {cells[0]} | {cells[1]} | {seed_counts} |")
        notes = [proof.note, *dict.fromkeys(_reason(gate) for arm in proof.arms for gate in arm.gates)]
        if any(notes) or (proof.figure and complete):
            sections.append("\n\n".join((f"## {proof.id}", *filter(None, notes))))
        if proof.figure and complete:
            picture = to.parent / "proofs" / f"{proof.id}.svg"
            atomic_write(picture, proof.figure(by_arm))
            sections.append(f"![{proof.claim}](proofs/{proof.id}.svg)")
    atomic_write(to, head + "\n".join(table) + "\n" + "".join(f"\n{section}\n" for section in sections))


def _reason(gate: Gate) -> str:
    """The reason for a gate's bounds; empty if it has none."""
    return f"{gate}: {gate.why}." if gate.why else ""


def _cell(arms: Sequence[Arm], by_arm: Mapping[str, Sequence[Numbers]]) -> str:
    """The measurements of some arms, gate by gate."""
    return "<br>".join(_arm(arm, by_arm[arm.name]) for arm in arms) or "–"


def _arm(arm: Arm, by_seed: Sequence[Numbers]) -> str:
    if not by_seed:
        return f"{arm.name}: not run"
    worst = ", ".join(f"{arm.worst(by_seed, gate):.4g} ({gate})" for gate in arm.gates)
    passed = all(arm.passes(numbers) for numbers in by_seed)
    outcomes = {(True, True): "misses", (True, False): "**meets its gates**", (False, False): "**missed**"}
    outcome = outcomes.get((arm.control, passed), "")
    return f"{arm.name}{' ' + outcome if outcome else ''}: {worst}"
