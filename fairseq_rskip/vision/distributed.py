"""The processes that torchrun started; one process where it did not."""

import dataclasses
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import UserError


@dataclasses.dataclass(frozen=True)
class Group:
    """This process's rank among ``world`` processes, and its device."""

    rank: int
    world: int
    device: torch.device

    @property
    def first(self) -> bool:
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """The sum of ``values`` over all processes, in place."""
        if self.world > 1:
            dist.all_reduce(values)
        return values

    def least(self, value: int) -> int:
        """The least of all processes' ``value``."""
        if self.world == 1:
            return value
        least = torch.tensor(value, device=self.device)
        dist.all_reduce(least, dist.ReduceOp.MIN)
        return int(least)

    def broadcast_buffers(self, module: nn.Module) -> None:
        """Give every process the first one's buffers (running statistics)."""
        if self.world > 1:
            for buffer in module.buffers():
                dist.broadcast(buffer, 0)


def join(device: str) -> Group:
    """Join the group that torchrun's environment describes, on ``auto``, ``cpu`` or ``cuda``. Raises ``UserError``."""
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: there is no CUDA GPU here, or this torch cannot use it; expected cpu or auto")
    chosen = torch.device("cpu")
    if device != "cpu" and torch.cuda.is_available():
        local, gpus = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
        if local >= gpus:
            raise UserError(f"process {local} has no GPU: expected at most {gpus} processes on this machine")
        chosen = torch.device("cuda", local)
        torch.cuda.set_device(chosen)
    world = int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("nccl" if chosen.type == "cuda" else "gloo", timeout=timedelta(minutes=30))
    return Group(int(os.environ.get("RANK", 0)), world, chosen)


def leave(group: Group) -> None:
    if group.world > 1:
        dist.destroy_process_group()
