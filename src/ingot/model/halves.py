"""Matrix products that are faster as two, one for each half of the rows.

oneDNN 3.12, which torch 2.13 multiplies bf16 with on a CPU, looks for the best way to cut a product for matrix tiles
(AMX) with a model of the caches. Its table of what memory gives cores that read the same data has .9 for two of them,
2.28 for one and 2.39 for four (`bw_map_t`, amx_blocking_heuristics.hpp), so where there are just two threads it leaves
nearly square products to one of them. Measured by the threads' own clocks, 2 cores of a Sapphire Rapids Xeon, for
128 to 8,192 rows, 128 to 3,072 columns and 256 to 50,257 in between, two threads share nearly all products but those
of `pays`. With three, four and eight threads all of them work.

Forward and backward of a 124M model, 1,024 tokens, compiled by block, three alternating pairs: 1.74 to 1.88 s in place
of 1.98 to 2.32, 1.20 times as fast (1.08 to 1.34).
"""

import torch
from torch import Tensor


def pays(a_MK: Tensor, b_KN: Tensor) -> bool:
    """Whether a @ b is one that a thread would sit out; one whose rows lie as columns is not, nor is it quick."""
    (rows, inner), columns = a_MK.shape, b_KN.shape[1]
    shared = inner < 512 or not 384 <= columns <= 1024 or not columns <= rows < 1.75 * columns
    return a_MK.dtype == torch.bfloat16 and a_MK.stride(1) == 1 and not shared


def concerned(device: torch.device) -> bool:
    """Whether there are such products, here and now."""
    return device.type == "cpu" and torch.get_num_threads() == 2 and torch.cpu._is_amx_tile_supported()


def product(a_MK: Tensor, b_KN: Tensor) -> Tensor:
    """a @ b, in halves where that pays."""
    if concerned(a_MK.device) and pays(a_MK, b_KN):
        return torch.cat([half_MK @ b_KN for half_MK in a_MK.chunk(2)])
    return a_MK @ b_KN
