"""`python -m benchmarks align`: a step of dpo, grpo and ppo, generation included, ours and trl's alternately.

Both sides start from the same weights with the same pairs or prompts, make the same number of updates a step, and learn
from the same number of tokens: no id ends a completion, so all are as long as asked for. Of dpo, whose data are fixed,
the losses of the first steps must agree too. What cannot be made equal is each side's own method: trl's value function
is a second model as large as the policy, ours a head on it.

trl is measured as it is shipped (autocast to bf16, activations computed again in the backward pass) and, since that is
not its fastest here, without the latter, and in fp32 without it. Ours reads what the reference says of a pair from a
column, which a stage writes once before training; trl does it in every step unless told otherwise, so for dpo both ways
stand beside each other.
"""

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks import compare
from benchmarks.contenders import Contender, Say, ours
from benchmarks.process import Kept, Result
from benchmarks.shapes import Shape
from benchmarks.train import LEAST, Measured, alternate, prepared

METHODS = ("dpo", "grpo", "ppo")
SIZES: dict[str, dict[str, int]] = {
    "A1": {"prompt": 16, "new": 32, "pairs": 32, "rollouts": 64, "group": 8, "epochs": 4},
    "tiny": {"prompt": 4, "new": 8, "pairs": 4, "rollouts": 8, "group": 4, "epochs": 2},
}
"""By shape: tokens of a prompt and of an answer; pairs of a step (dpo); completions of a step (grpo, ppo), and of a
prompt (grpo); updates of a step (ppo)."""
PLAIN = {"gradient_checkpointing": False}


def contenders(method: str, theirs: Sequence[Contender]) -> list[Contender]:
    """Ours as shipped and in fp32; the peer as shipped and tuned."""
    found = [ours("align"), ours("align", "ingot fp32", precision="fp32")]
    if method == "dpo":
        found.append(ours("align", "ingot, reference in the step", annotated=False))
    for peer in theirs:
        found += [
            peer,
            peer.told(f"{peer.name}, activations kept", tuned=PLAIN),
            peer.told(f"{peer.name} fp32, activations kept", tuned={**PLAIN, "bf16": False}),
        ]
        if method == "dpo":
            found.append(peer.told(f"{peer.name}, reference known", tuned={**PLAIN, "precompute_ref_log_probs": True}))
    return found


def measured(
    shape: Shape,
    methods: Sequence[str],
    theirs: Sequence[Contender],
    repetitions: int,
    seconds: float,
    kept: Kept,
    say: Say,
) -> dict[str, Measured]:
    """All contenders at each method."""
    found = {}
    with prepared(shape) as job:
        loop = {"backend": "torch"} if shape.name == "tiny" else {}  # which would take longer than all else
        more = {"precision": "auto", "seconds": seconds, "least": LEAST, "loop": loop, **SIZES[shape.name]}
        for method in methods:
            everybody = contenders(method, theirs)
            told = {**job, **more, "method": method}
            found[method] = alternate(everybody, told, repetitions, kept, say)
            for name, results in found[method].items():
                say(f"{method}, {name}: {1000 * statistics.median(r['step_s'] for r in results):,.0f} ms a step")
    return found


def summary(found: Measured) -> dict[str, Any]:
    """One method: each contender's numbers, and of each peer's the ratio of its step to each of ours."""
    rows = {name: _numbers(results) for name, results in found.items()}
    for name, results in found.items():
        if name.startswith("ingot"):
            continue
        differs = next((d for r in results if (d := difference(found["ingot"][0], r))), None)
        if differs:
            rows[name]["differs"] = differs
            continue
        rows[name]["ratios"] = {own: _ratio(results, found[own]) for own in found if own.startswith("ingot")}
    return rows


def difference(mine: Result, theirs: Result) -> str | None:
    """What makes the work of two steps another: model, updates, tokens, torch; where data are fixed, losses."""
    for what, words in (("updates", "updates of a step"), ("learned", "learned tokens of an update")):
        if mine[what] != theirs[what]:
            return f"{words}: {theirs[what]:,g} against our {mine[what]:,g}"
    flops = {"flops_per_token": 0}  # the same follows from parameters, updates and tokens
    both = (mine["precision"], theirs["precision"])
    band = compare.BAND_BF16 if "bf16" in both else compare.BAND_FP32
    return compare.difference({**mine, **flops}, {**theirs, **flops}, band)


def _ratio(theirs: Sequence[Result], mine: Sequence[Result]) -> dict[str, float | None]:
    return compare.parts(compare.ratio([r["step_s"] for r in theirs], [r["step_s"] for r in mine]))


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
