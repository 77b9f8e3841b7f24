"""Compute the numbers of ``factory_values.pt`` with the code of wdlctc/hyper-connection-factory.

    PYTHONPATH=CHECKOUT python tests/peers/make_factory_values.py

``test_factory.py`` reads the file; only this script needs the repository, which no package index
has. Its ``hcfactory`` was that of commit c1562d7 in connections/depth_attention.py and hyper.py,
db00c55 in connections/dense.py, and 412aeba in all other files.

Each of its wirings joins three layers of two sublayers ``tanh(norm(x) W_k)``, with the repository's
RMSNorm where its model has one. All parameters are drawn, and what the repository converts to fp32
is converted to float64.
"""

import functools
from pathlib import Path
from typing import Any

import torch
from hcfactory.connections import build_connection, hyper
from hcfactory.model import ModelConfig, RMSNorm
from torch import Tensor, nn

FILE = Path(__file__).with_name("factory_values.pt")
DIM = 12
LAYERS = 3

# name -> the repository's name of the connection, its arguments
WIRINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "prenorm": ("prenorm", {}),
    "postnorm": ("postnorm", {}),
    "attnres": ("attnres", {}),
    "attnres-blocks": ("attnres", {"block_size": 2}),
    "attnres-partial-block": ("attnres", {"block_size": 4}),
    "mhar": ("mhar", {"heads": 4}),
    "mhar-blocks": ("mhar", {"heads": 4, "block_size": 2}),
    "dar": ("dar", {}),
    "dar-gate": ("dar", {"gate": "zero"}),
    "denseformer": ("denseformer", {}),
    "muddformer": ("muddformer", {"qkv": False}),
    "hc": ("hc", {"n": 3}),
    "hc-static": ("hc", {"n": 3, "dynamic": False}),
    "frac": ("frac", {"m": 3}),
    "frac-static": ("frac", {"m": 3, "dynamic": False}),
    "mhc": ("mhc", {"n": 3}),
    "mhc-sinkhorn-without-eps": ("mhc", {"n": 3}),
    "laurel": ("laurel", {"rank": 2}),
}


class Sublayer(nn.Module):
    """``tanh(norm(x) W)``."""

    def __init__(self, norm: nn.Module, weight: Tensor):
        super().__init__()
        self.norm, self.weight = norm, weight

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(x) @ self.weight)


def draw(shape: tuple[int, ...], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def draw_parameters(module: nn.Module) -> None:
    with torch.no_grad():
        for k, parameter in enumerate(module.parameters()):
            parameter.copy_(0.5 * draw(parameter.shape, 100 + k))
        if isinstance(module, hyper.ManifoldHyperConnection):  # its head is then a sum
            module.head_alpha.zero_()
            module.head_bias.zero_()


def sublayers(shared: dict[str, Tensor], has_norm: bool) -> list[Sublayer]:
    made = []
    for gain, weight in zip(shared["gains"], shared["weights"], strict=True):
        norm = RMSNorm(DIM).double() if has_norm else nn.Identity()
        if has_norm:
            norm.weight.data.copy_(gain)
        made.append(Sublayer(norm, weight))
    return made


def values(name: str, shared: dict[str, Tensor]) -> dict[str, Any]:
    """The parameters of a wiring by name, its output, and the gradient of its input."""
    connection, options = WIRINGS[name]
    config = ModelConfig(
        n_layer=LAYERS, d_model=DIM, connection=connection, connection_kwargs=options
    )
    module = build_connection(config).double()
    draw_parameters(module)
    x = shared["input"].clone().requires_grad_()
    y = module(x, sublayers(shared, module.sublayer_prenorm))
    (gradient,) = torch.autograd.grad(y, x, shared["upstream"])
    parameters = {key: value.detach().clone() for key, value in module.named_parameters()}
    return {"parameters": parameters, "output": y.detach(), "input_gradient": gradient}


def main() -> None:
    torch.Tensor.float = torch.Tensor.double
    shared = {
        "input": draw((2, 3, DIM), 1),
        "upstream": draw((2, 3, DIM), 2),
        "weights": 0.5 * draw((2 * LAYERS, DIM, DIM), 3),
        "gains": 1 + 0.5 * draw((2 * LAYERS, DIM), 4),
    }
    wirings = {}
    sinkhorn = hyper._sinkhorn_rows_first
    for name in WIRINGS:
        without_eps = name == "mhc-sinkhorn-without-eps"
        hyper._sinkhorn_rows_first = (
            functools.partial(sinkhorn, eps=0.0) if without_eps else sinkhorn
        )
        wirings[name] = values(name, shared)
    torch.save({**shared, "wirings": wirings}, FILE)
    print(f"{FILE}: {len(wirings)} wirings, {FILE.stat().st_size} bytes")


if __name__ == "__main__":
    main()
