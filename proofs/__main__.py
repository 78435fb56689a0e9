"""`python -m proofs [IDS]`: run what has not been run with this code, then write the table and the pictures."""

import argparse
import importlib
import sys
import time
from pathlib import Path

from proofs.page import page
from proofs.proof import Proof, Results

FILES = (
    "g2_groups",
    "s2_packing",
    "d2_fixed_points",
    "r1_reward",
    "r2_limits",
    "d1_reward_in_disguise",
    "s1_finetuning",
    "e_forgetting",
    "p1_frontier",
    "p2_estimators",
)
"""The proofs, the quick ones first."""


def proofs() -> list[Proof]:
    """All of them."""
    modules = [importlib.import_module(f"proofs.{name}") for name in FILES]
    return [proof for module in modules for proof in getattr(module, "PROOFS", None) or [module.PROOF]]


def main() -> int:
    """Exit status 1 where an arm that was run missed a gate, or a control met all of them."""
    parser = argparse.ArgumentParser(prog="python -m proofs", description=__doc__)
    parser.add_argument("ids", nargs="*", help="proofs to run; default: all")
    parser.add_argument("--seeds", type=int, default=3, help="each arm with seeds 1 to this (default 3)")
    parser.add_argument("--arm", action="append", help="only arms of this name; may be given more than once")
    parser.add_argument("--results", type=Path, default=Path("runs/proofs"), help="where results are kept")
    parser.add_argument("--to", type=Path, default=None, help="the page to write (docs/PROOFS.md)")
    parser.add_argument("--list", action="store_true", help="run nothing")
    options = parser.parse_args()
    every = proofs()
    if unknown := set(options.ids) - {p.id for p in every}:
        parser.error(f"found {', '.join(sorted(unknown))}, expected some of {', '.join(p.id for p in every)}")
    results, seeds = Results(options.results), range(1, options.seeds + 1)
    chosen = [p for p in every if not options.list and (not options.ids or p.id in options.ids)]
    good = [_run(proof, seed, results, options.arm) for proof in chosen for seed in seeds]
    if options.to:
        page(every, results, seeds, options.to)
    return 0 if all(good) else 1


def _run(proof: Proof, seed: int, results: Results, names: list[str] | None) -> bool:
    """All arms of a proof with one seed; whether they came out as they should."""
    good = True
    for arm in proof.arms:
        if names and arm.name not in names:
            continue
        known = results.read(proof, arm, seed)
        if known is None:
            start = time.perf_counter()
            numbers = proof.run(seed, arm.name)
            results.write(proof, arm, seed, numbers, time.perf_counter() - start)
            known = {"numbers": numbers, "seconds": time.perf_counter() - start}
        passed = arm.passes(known["numbers"])
        good &= passed
        said = ", ".join(f"{n} {v:.5g}" for n, v in known["numbers"].items() if isinstance(v, int | float))
        kind = "control" if arm.control else "arm"
        verdict = "as it should" if passed else "NOT AS IT SHOULD"
        print(f"{proof.id} {kind} '{arm.name}' seed {seed}: {verdict} ({known['seconds']:.0f} s): {said}", flush=True)
    return good


if __name__ == "__main__":
    sys.exit(main())
