"""FSDP2: every kind trains sharded over two processes as it does in one."""

import copy

import torch
import torch.distributed as dist
import torch.multiprocessing
from skip_variants import draw
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from fairseq_rskip.residual import KINDS, Place, create_skip

RULES = [(kind, {"shortcut_dropout": 0.0} if kind == "dropout_shortcut" else {}) for kind in KINDS]
RULES.append(("askip", {"adapt": "halting"}))
WORLD = 2


class Block(nn.Module):
    """A branch and its skip connection: what a model shards as one unit."""

    def __init__(self, kind: str, index: int, options: dict):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.skip = create_skip(kind, 4, place=Place(index=index, depth=2), **options)

    def forward(self, x: Tensor) -> Tensor:
        h, carried = self.skip.prepare(x)
        return self.skip(x, torch.tanh(self.linear(h)), carried)


def step(model: nn.Module, x: Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(x).square().mean().backward()
    optimizer.step()


def train_every_kind(rank: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    mesh = dist.init_device_mesh("cpu", (WORLD,))
    for kind, options in RULES:
        torch.manual_seed(0)
        one = nn.Sequential(*(Block(kind, index, options) for index in range(2)))
        sharded = copy.deepcopy(one)
        fully_shard(sharded, mesh=mesh)
        x = draw((6, 4, 4), 1, torch.float32)
        step(one, x)
        step(sharded, x.chunk(WORLD, 1)[rank])
        for (name, expected), actual in zip(
            one.named_parameters(), sharded.parameters(), strict=True
        ):
            torch.testing.assert_close(
                actual.full_tensor(), expected, msg=lambda m, w=f"{kind} {name}": f"{w}: {m}"
            )
    dist.destroy_process_group()


def test_every_kind_trains_under_fsdp2_over_gloo(tmp_path, stock_operators):
    torch.multiprocessing.spawn(train_every_kind, (str(tmp_path / "store"),), WORLD)
