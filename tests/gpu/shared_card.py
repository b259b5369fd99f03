"""A vLLM worker that shares its card with another rank's: both fall asleep at once."""

from __future__ import annotations

import torch
from vllm.v1.worker.gpu_worker import Worker


class SharedCardWorker(Worker):
    """`Worker.sleep` fails where free memory fell meanwhile, which another rank's training does.

    Between the barriers both ranks only give memory back.
    """

    def sleep(self, level: int = 1) -> None:
        torch.distributed.barrier()
        super().sleep(level)
        torch.distributed.barrier()
