"""What the process that ranks are forked from has done before: imports, and every kernel of the tests loaded.

It runs on one thread, so that a fork finds no lock held and no pool of threads that its child would lack.
"""

import torch
import torch._dynamo  # noqa: F401  (building any optimizer imports it)
import torch.distributed.fsdp  # noqa: F401

import tq.train.experiments.ranks  # noqa: F401
from tq import Codec

torch.set_num_threads(1)
for bits, dtypes in ((4, (torch.float32, torch.bfloat16, torch.float16)), (2, ()), (3, ()), (8, (torch.float16,))):
    for dtype in (torch.float32, *dtypes):
        Codec(bits).decode(Codec(bits).encode(torch.ones(128, dtype=dtype)))
