"""`python -m proofs [IDS]`: run what has not been run with this code, then write the table and the pictures."""

import argparse
import importlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from proofs.page import page
from proofs.proof import Arm, Proof, Results

FILES = (
    "g2_groups",
    "s2_packing",
    "d2_fixed_points",
    "r1_reward",
    "r2_limits",
    "d1_reward_in_disguise",
    "s1_finetuning",
    "e_forgetting",
    "e3_consolidation",
    "g1_arithmetic",
    "p1_frontier",
    "p2_estimators",
    "p4_hacking",
    "i1_rounds",
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
    parser.add_argument(
        "--workers", type=int, default=os.cpu_count(), help="processes of one thread each (default: cores)"
    )
    parser.add_argument("--results", type=Path, default=Path("runs/proofs"), help="where results are kept")
    parser.add_argument("--to", type=Path, default=None, help="the page to write (docs/PROOFS.md)")
    parser.add_argument("--list", action="store_true", help="run nothing")
    options = parser.parse_args()
    every = proofs()
    if unknown := set(options.ids) - {p.id for p in every}:
        parser.error(f"found {', '.join(sorted(unknown))}, expected some of {', '.join(p.id for p in every)}")
    results, seeds = Results(options.results), range(1, options.seeds + 1)
    chosen = [p for p in every if not options.list and (not options.ids or p.id in options.ids)]
    together = [[p.id for p in some] for _, some in groupby(chosen, lambda p: p.run)]  # they share trained models
    work = [(ids, seed, options.results, options.arm) for ids in together for seed in seeds]
    good = _all(work, min(options.workers, len(work)))
    if options.to:
        page(every, results, seeds, options.to)
    return 0 if all(good) else 1


def _all(work: Sequence[Any], workers: int) -> list[bool]:
    """`_run` for the arguments of each part of the work, in other processes where `workers` is more than one.

    Whatever ends this process ends them, in the middle of an arm: a result is written whole or not at all.
    """
    if workers <= 1:
        return [_run(*part) for part in work]
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _one_of_many)
    try:
        return list(pool.map(_run, *zip(*work, strict=True)))
    except BaseException:
        for child in multiprocessing.active_children():
            child.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _one_of_many() -> None:
    """Make this process one that takes a core, and lives no longer than its parent."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's to answer
    parent = multiprocessing.parent_process()
    assert parent
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def _run(ids: Sequence[str], seed: int, directory: Path, names: Sequence[str] | None) -> bool:
    """All arms of some proofs with one seed; whether they came out as they should."""
    every = [(proof, arm) for proof in proofs() if proof.id in ids for arm in proof.arms]
    chosen = [(proof, arm) for proof, arm in every if not names or arm.name in names]
    return all([_judged(proof, arm, seed, Results(directory)) for proof, arm in chosen])  # noqa: C419 - run them all


def _judged(proof: Proof, arm: Arm, seed: int, results: Results) -> bool:
    """Whether an arm comes out as it should, from its result, which is made where there is none; says so."""
    known = results.read(proof, arm, seed)
    if known is None:
        start = time.perf_counter()
        numbers = proof.run(seed, arm.name)
        known = results.write(proof, arm, seed, numbers, time.perf_counter() - start)
    passed = arm.passes(known["numbers"])
    said = ", ".join(f"{n} {v:.5g}" for n, v in known["numbers"].items() if isinstance(v, int | float))
    kind = "control" if arm.control else "arm"
    verdict = "as it should" if passed else "NOT AS IT SHOULD"
    print(f"{proof.id} {kind} '{arm.name}' seed {seed}: {verdict} ({known['seconds']:.0f} s): {said}", flush=True)
    return passed


if __name__ == "__main__":
    from proofs.__main__ import main as importable  # by other processes, as `__main__` is not

    sys.exit(importable())
