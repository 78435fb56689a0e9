"""Memory and traffic of a model in parts (ZeRO, Rajbhandari et al. 2020, arXiv:1910.02054), as torch's FSDP2 has them.

At rest every rank has a part of everything. Blocks are gathered one by one, and the next while one is used; what is in
no block (embedding, head, last norm) is gathered for the whole pass. So no stage of ZeRO reaches the published minimum:
stages 1 and 2 also keep their own part of the weights beside the gathered ones.

Tests compare both functions with what four ranks allocate and send.

Symbols: N shards, P bytes of all weights, G of all gradients, M of all moments, B of a block, E of the rest.
"""

from dataclasses import replace

from ingot.plan.memory import Memory


def sharded_state(state: Memory, blocks: int, rest: float, shard: int, zero: int, narrow: float = 1.0) -> Memory:
    """Bytes of the training state on one rank at the peak of a backward pass, after its first update.

    Args:
        state: that of the whole model.
        blocks: number of blocks, L.
        rest: fraction of the parameters that are in no block, E / P.
        shard: N.
        zero: stage of ZeRO.
        narrow: bytes of a block's gathered weight for each of a stored one: 1/2 for bf16.

    weights: P / N and what is gathered: E and all blocks with stages 1 and 2, two blocks with stage 3.
    gradients: G with stage 1; else G / N, those of the rest (E), and of two blocks that wait to be summed.
    moments: M / N.
    """
    if shard == 1:
        return state
    block = (1 - rest) / blocks
    gathered = rest + narrow * min(1 - rest, (blocks if zero < 3 else 2) * block)
    waiting = 1.0 if zero == 1 else min(1.0, 1 / shard + rest + 2 * block)
    return replace(
        state,
        weights=round(state.weights * (1 / shard + gathered)),
        gradients=round(state.gradients * waiting),
        moments=state.moments // shard,
        master=state.master // shard,
    )


def wire_bytes(
    weights: int,
    gradients: int,
    rest: float,
    replicate: int,
    shard: int,
    zero: int,
    micro_batches: int,
    narrow: float = 1.0,
) -> int:
    """Bytes that a rank sends for one update; it receives as many.

    Ring algorithms send (n - 1) / n of a tensor to gather or to sum and cut it, twice that to sum it on all ranks.

    Args:
        weights: P.
        gradients: G.
        rest: E / P.
        replicate, shard, zero: the mesh.
        micro_batches: passes of an update.
        narrow: as for `sharded_state`.
    """

    def ring(ranks: int) -> float:
        return (ranks - 1) / ranks

    if shard == 1:
        return round(2 * ring(replicate) * gradients)
    passes = 1 if zero == 1 else micro_batches
    gathers = passes * (rest + narrow * (1 - rest) * (2 if zero == 3 else 1))  # 3: again for the backward pass
    sums = passes * (ring(shard) + 2 * ring(replicate) / shard)
    return round(gathers * ring(shard) * weights + sums * gradients)
