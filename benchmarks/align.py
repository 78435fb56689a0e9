"""`python -m benchmarks align`: complete steps of dpo, grpo and ppo, generation included, ours and trl's alternately.

Both sides start from the same weights and the same pairs or prompts, make the same number of updates per step, and
train on the same number of tokens: no id ends a completion, so all have the maximum length. For dpo, whose data are
fixed, the losses of the first steps must agree too. The value functions differ: trl's is a second model as large as the
policy, ours is a head on the policy.

trl is measured as shipped (bf16 autocast, activations recomputed in the backward pass), and tuned, because that is not
its fastest mode on a CPU: without recomputation, and in fp32 without recomputation. Ours reads the reference's
log-probabilities of a pair from a column that a stage writes once before training. trl computes them in every step by
default, so dpo is measured both ways on both sides.
"""

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks import compare
from benchmarks.contenders import Contender, Log, ours
from benchmarks.process import Result, ResultCache
from benchmarks.shapes import Shape
from benchmarks.train import MIN_STEPS, Measured, alternate, prepared_job

METHODS = ("dpo", "grpo", "ppo")
SIZES: dict[str, dict[str, int]] = {
    "A1": {"prompt": 16, "new": 32, "pairs": 32, "rollouts": 64, "group": 8, "epochs": 4},
    "tiny": {"prompt": 4, "new": 8, "pairs": 4, "rollouts": 8, "group": 4, "epochs": 2},
}
"""By shape: tokens of a prompt and of an answer; pairs per step (dpo); completions per step (grpo, ppo) and per prompt
(grpo); updates per step (ppo)."""
NO_RECOMPUTATION = {"gradient_checkpointing": False}


def contenders(method: str, theirs: Sequence[Contender]) -> list[Contender]:
    """Ours as shipped and in fp32; the peers as shipped and tuned."""
    variants = [ours("align"), ours("align", "ingot fp32", precision="fp32")]
    if method == "dpo":
        variants.append(ours("align", "ingot, reference in the step", annotated=False))
    for peer in theirs:
        variants += [
            peer,
            peer.variant(f"{peer.name}, activations kept", tuned=NO_RECOMPUTATION),
            peer.variant(f"{peer.name} fp32, activations kept", tuned={**NO_RECOMPUTATION, "bf16": False}),
        ]
        if method == "dpo":
            tuned = {**NO_RECOMPUTATION, "precompute_ref_log_probs": True}
            variants.append(peer.variant(f"{peer.name}, reference known", tuned=tuned))
    return variants


def measure_methods(
    shape: Shape,
    methods: Sequence[str],
    theirs: Sequence[Contender],
    repetitions: int,
    seconds: float,
    cache: ResultCache,
    log: Log,
) -> dict[str, Measured]:
    """Measure all contenders with each method."""
    measured = {}
    with prepared_job(shape) as job:
        loop = {"backend": "torch"} if shape.name == "tiny" else {}  # compiling would dominate the tiny shape
        settings = {"precision": "auto", "seconds": seconds, "least": MIN_STEPS, "loop": loop, **SIZES[shape.name]}
        for method in methods:
            method_job = {**job, **settings, "method": method}
            measured[method] = alternate(contenders(method, theirs), method_job, repetitions, cache, log)
            for name, results in measured[method].items():
                log(f"{method}, {name}: {1000 * statistics.median(r['step_s'] for r in results):,.0f} ms per step")
    return measured


def summary(measured: Measured) -> dict[str, Any]:
    """One method: the numbers of each contender, and the ratios of each peer's step time to each of ours."""
    rows = {name: _numbers(results) for name, results in measured.items()}
    for name, results in measured.items():
        if name.startswith("ingot"):
            continue
        differs = next((d for r in results if (d := difference(measured["ingot"][0], r))), None)
        if differs:
            rows[name]["differs"] = differs
            continue
        rows[name]["ratios"] = {own: _ratio(results, measured[own]) for own in measured if own.startswith("ingot")}
    return rows


def difference(mine: Result, theirs: Result) -> str | None:
    """How the work of two steps differs: in the model, updates, tokens, torch, or losses for dpo; None if equal."""
    for key, words in (("updates", "updates of a step"), ("learned", "learned tokens of an update")):
        if mine[key] != theirs[key]:
            return f"{words}: {theirs[key]:,g} against our {mine[key]:,g}"
    flops = {"flops_per_token": 0}  # not measured: equal parameters, updates and tokens imply equal FLOPs
    precisions = (mine["precision"], theirs["precision"])
    band = compare.BAND_BF16 if "bf16" in precisions else compare.BAND_FP32
    return compare.difference({**mine, **flops}, {**theirs, **flops}, band)


def _ratio(theirs: Sequence[Result], mine: Sequence[Result]) -> dict[str, float | None]:
    return compare.ratio_columns(compare.ratio([r["step_s"] for r in theirs], [r["step_s"] for r in mine]))


def _numbers(results: Sequence[Result]) -> dict[str, Any]:
    times = [r["step_s"] for r in results]
    return {
        "step_ms": round(1000 * statistics.median(times), 2),
        "spread": round(compare.spread(times), 4),
        "updates": results[0]["updates"],
        "learned": results[0]["learned"],
        "losses": [round(loss, 4) for loss in results[0]["losses"]],
        "precision": results[0]["precision"],
        "parameters": results[0]["parameters"],
        "peak_bytes": round(statistics.median(r["peak_bytes"] for r in results)),
        "repetitions": len(results),
        "versions": results[0]["versions"],
    }
