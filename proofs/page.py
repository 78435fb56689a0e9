"""`docs/PROOFS.md`: a row for each proof, from the results that are there."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from ingot.core.artifact import atomic_write
from proofs.proof import Arm, Gate, Numbers, Proof, Results

HEAD = """# Proofs

Small experiments whose answer is known beforehand, by a closed form, by enumeration, or because what is learned was
made by hand. Every seed must meet every gate; a control is the same experiment with one thing broken, and must miss
one. Numbers are those of the seed nearest to its gate. `make proofs` runs them (it can be stopped, and goes on) and
writes this page; "not run" means: not with the code as it is.

| | Claim | Known answer | Measured (worst seed) | Controls | Seeds |
|---|---|---|---|---|---|
"""


def page(proofs: Sequence[Proof], results: Results, seeds: Sequence[int], to: Path) -> None:
    """Write the table, and below it notes and pictures (files beside the page)."""
    table, below = [], []
    for proof in proofs:
        found = {
            arm.name: [r["numbers"] for seed in seeds if (r := results.read(proof, arm, seed))] for arm in proof.arms
        }
        run = [arm for arm in proof.arms if found[arm.name]]
        cells = [_cell([a for a in proof.arms if a.control == control], found) for control in (False, True)]
        whole = all(found.values())
        counts = sorted({len(n) for n in found.values()})
        said = "–" if not run else "-".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
        table.append(f"| {proof.id} | {proof.claim} | {proof.answer} | {cells[0]} | {cells[1]} | {said} |")
        notes = [proof.note, *dict.fromkeys(_why(gate) for arm in proof.arms for gate in arm.gates)]
        if any(notes) or (proof.figure and whole):
            below.append("\n\n".join((f"## {proof.id}", *filter(None, notes))))
        if proof.figure and whole:
            picture = to.parent / "proofs" / f"{proof.id}.svg"
            atomic_write(picture, proof.figure(found))
            below.append(f"![{proof.claim}](proofs/{proof.id}.svg)")
    atomic_write(to, HEAD + "\n".join(table) + "\n" + "".join(f"\n{part}\n" for part in below))


def _why(gate: Gate) -> str:
    """Why a gate is where it is, where it says."""
    return f"{gate}: {gate.why}." if gate.why else ""


def _cell(arms: Sequence[Arm], found: Mapping[str, Sequence[Numbers]]) -> str:
    """What some arms measured, gate by gate."""
    return "<br>".join(_arm(arm, found[arm.name]) for arm in arms) or "–"


def _arm(arm: Arm, every: Sequence[Numbers]) -> str:
    if not every:
        return f"{arm.name}: not run"
    numbers = ", ".join(f"{arm.worst(every, gate):.4g} ({gate})" for gate in arm.gates)
    passed = all(arm.passes(numbers) for numbers in every)
    verdict = {(True, True): "misses", (True, False): "**meets its gates**", (False, False): "**missed**"}
    said = verdict.get((arm.control, passed), "")
    return f"{arm.name}{' ' + said if said else ''}: {numbers}"
