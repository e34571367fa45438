"""How fast the machine computes and reads memory at this moment: a virtual machine may change its state within minutes.

`state()` is timed beside the rows of a measurement, so that numbers of different turns can be told apart.
"""

from __future__ import annotations

import time
from functools import cache

import torch

SIDE = 768
READ = 256 * 2**20
REPEATS = 3


@cache
def _operands() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(SIDE, SIDE, generator=generator), torch.ones(READ // 4)


def state() -> dict[str, float]:
    """Return `gflops`, the speed of a product of float32 matrices, and `read_gbs`, of a sum over 256 MiB in GB/s.

    Both use the threads of torch, and are the best of three times.
    """
    matrix, many = _operands()
    product, total = [], []
    for _ in range(REPEATS):
        start = time.perf_counter()
        matrix @ matrix
        product.append(time.perf_counter() - start)
        start = time.perf_counter()
        many.sum()
        total.append(time.perf_counter() - start)
    return {"gflops": round(2 * SIDE**3 / min(product) / 1e9, 1), "read_gbs": round(READ / min(total) / 1e9, 1)}


if __name__ == "__main__":
    print(state())
