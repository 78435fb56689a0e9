"""`python -m proofs [IDS]`: run the proofs without a result for the current code; write the table and the figures."""

import argparse
import importlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from proofs.page import page
from proofs.proof import Proof, Results, run_arm

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
    "k1_distillation",
    "k2_tails",
    "k4_on_policy",
    "k5_assistant",
    "i1_rounds",
    "c1_memorisation",
    "c2_filtering",
)
"""Modules of the proofs, fast ones first."""


def proofs() -> list[Proof]:
    modules = [importlib.import_module(f"proofs.{name}") for name in FILES]
    return [proof for module in modules for proof in getattr(module, "PROOFS", None) or [module.PROOF]]


def main() -> int:
    """Exit status 1 if an arm failed a gate, or a control passed all gates."""
    parser = argparse.ArgumentParser(prog="python -m proofs", description=__doc__)
    parser.add_argument("ids", nargs="*", help="proofs to run; default: all")
    parser.add_argument("--seeds", type=int, default=3, help="run each arm with seeds 1 to this (default 3)")
    parser.add_argument("--arm", action="append", help="only arms of this name; may be given more than once")
    parser.add_argument(
        "--workers", type=int, default=os.cpu_count(), help="processes of one thread each (default: cores)"
    )
    parser.add_argument("--results", type=Path, default=Path("runs/proofs"), help="directory of results")
    parser.add_argument("--to", type=Path, default=None, help="the page to write (docs/PROOFS.md)")
    parser.add_argument("--list", action="store_true", help="run nothing")
    options = parser.parse_args()
    all_proofs = proofs()
    if unknown := set(options.ids) - {p.id for p in all_proofs}:
        parser.error(f"found {', '.join(sorted(unknown))}, expected some of {', '.join(p.id for p in all_proofs)}")
    results, seeds = Results(options.results), range(1, options.seeds + 1)
    selected = [p for p in all_proofs if not options.list and (not options.ids or p.id in options.ids)]
    # Proofs with the same `run` share trained models, so one process runs them together.
    groups = [[p.id for p in group] for _, group in groupby(selected, lambda p: p.run)]
    tasks = [(ids, seed, options.results, options.arm) for ids in groups for seed in seeds]
    passed = _run_all(tasks, min(options.workers, len(tasks)))
    if options.to:
        page(all_proofs, results, seeds, options.to)
    return 0 if all(passed) else 1


def _run_all(tasks: Sequence[Any], workers: int) -> list[bool]:
    """`_run` with the arguments of each task, in child processes if `workers` is more than one.

    The children end when this process ends. A result file is written atomically, so an arm that was interrupted leaves
    none.
    """
    if workers <= 1:
        return [_run(*task) for task in tasks]
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _start_worker)
    try:
        return list(pool.map(_run, *zip(*tasks, strict=True)))
    except BaseException:
        for child in multiprocessing.active_children():
            child.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _start_worker() -> None:
    """Limit this process to one thread, and end it when its parent ends."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it
    parent = multiprocessing.parent_process()
    assert parent
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def _run(ids: Sequence[str], seed: int, directory: Path, names: Sequence[str] | None) -> bool:
    """Run all arms of some proofs with one seed; whether all gave the expected outcome."""
    all_arms = [(proof, arm) for proof in proofs() if proof.id in ids for arm in proof.arms]
    selected = [(proof, arm) for proof, arm in all_arms if not names or arm.name in names]
    return all([run_arm(proof, arm, seed, Results(directory)) for proof, arm in selected])  # noqa: C419 - run them all


if __name__ == "__main__":
    from proofs.__main__ import main as importable  # child processes cannot import functions of `__main__`

    sys.exit(importable())
