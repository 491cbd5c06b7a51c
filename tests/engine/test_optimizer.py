"""Weight decay where it belongs, every trained parameter once, and the options that were asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shardwise.config.schema import Optimizer
from shardwise.engine.optimizer import build_optimizer, parameter_groups
from shardwise.errors import ConfigError
from tests.tasks import Toy


class RMSNorm(nn.Module):
    """As language models bring their own: known as a norm by its name alone. Two dimensions, to be sure of that."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 4))


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.conv = nn.Conv2d(1, 2, 3)
        self.norm = nn.LayerNorm(4)
        self.own_norm = RMSNorm()
        self.batch_norm = nn.BatchNorm2d(2)
        self.attention = nn.MultiheadAttention(4, 2)
        self.embedding = nn.Embedding(5, 4)
        self.scale = nn.Parameter(torch.ones(()))
        self.token = nn.Parameter(torch.zeros(4))
        self.rel_bias = nn.Parameter(torch.zeros(3, 3))
        self.frozen = nn.Linear(4, 4).requires_grad_(False)


def names_by_decay(model: nn.Module, weight_decay: float = 0.1) -> dict[float, set[str]]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        group["weight_decay"]: {names[id(parameter)] for parameter in group["params"]}
        for group in parameter_groups(model, weight_decay)
    }


def test_matrices_decay_and_norms_biases_and_vectors_do_not() -> None:
    assert names_by_decay(Odd()) == {
        0.1: {
            "linear.weight",
            "conv.weight",
            "attention.in_proj_weight",
            "attention.out_proj.weight",
            "embedding.weight",
        },
        0.0: {
            "linear.bias",
            "conv.bias",
            "norm.weight",
            "norm.bias",
            "own_norm.weight",
            "batch_norm.weight",
            "batch_norm.bias",
            "attention.in_proj_bias",
            "attention.out_proj.bias",
            "scale",
            "token",
            "rel_bias",
        },
    }


def test_frozen_parameters_are_left_out() -> None:
    model = Odd()
    every = set.union(*names_by_decay(model).values())
    assert every == {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert not any(name.startswith("frozen") for name in every)


def test_a_tied_weight_is_updated_once() -> None:
    model = Toy(vocabulary=7, width=4, layers=2, tied=True)
    held = [id(parameter) for group in parameter_groups(model, 0.1) for parameter in group["params"]]
    assert held.count(id(model.head.weight)) == 1
    assert sorted(held) == sorted(id(parameter) for parameter in model.parameters())


def test_a_weight_that_two_kinds_of_modules_share_is_in_one_group_only() -> None:
    """PyTorch refuses a parameter in two groups; the first module that has it decides."""
    linear: Any = nn.Linear(4, 2, bias=False)
    norm = RMSNorm()
    norm.weight = linear.weight
    for order, decay in (((linear, norm), 0.1), ((norm, linear), 0.0)):
        groups = parameter_groups(nn.Sequential(*order), 0.1)
        assert [(group["weight_decay"], len(group["params"])) for group in groups] == [(decay, 1)]


def test_a_group_with_nothing_in_it_is_left_out() -> None:
    assert [group["weight_decay"] for group in parameter_groups(nn.LayerNorm(3), 0.1)] == [0.0]
    assert [group["weight_decay"] for group in parameter_groups(nn.Linear(3, 3, bias=False), 0.1)] == [0.1]


@pytest.mark.parametrize(
    ("options", "kind", "settings"),
    [
        ({"name": "adamw"}, torch.optim.AdamW, {"betas": (0.9, 0.999), "eps": 1e-8}),
        ({"name": "adamw", "betas": [0.8, 0.95], "eps": 1e-6}, torch.optim.AdamW, {"betas": (0.8, 0.95), "eps": 1e-6}),
        (
            {"name": "adam", "betas": [0.7, 0.9]},
            torch.optim.Adam,
            {"betas": (0.7, 0.9), "decoupled_weight_decay": False},
        ),
        ({"name": "sgd", "momentum": 0.9}, torch.optim.SGD, {"momentum": 0.9, "nesterov": False}),
    ],
)
def test_each_optimizer_gets_the_options_that_were_asked_for(
    options: dict[str, Any], kind: type[torch.optim.Optimizer], settings: dict[str, Any]
) -> None:
    # The rate is the scaled one, and not the one in the file.
    optimizer = build_optimizer(nn.Linear(3, 3), Optimizer(**options, lr=5.0, weight_decay=0.2), lr=0.5)
    assert type(optimizer) is kind
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.2, 0.0]
    for group in optimizer.param_groups:
        assert group["lr"] == 0.5
        assert {key: group[key] for key in settings} == settings


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd"])
def test_a_step_moves_the_weights_as_the_plain_optimizer_would(name: str) -> None:
    """Without decay the groups make no difference, so PyTorch's own on all parameters is the reference."""
    torch.manual_seed(0)
    model = Toy(vocabulary=7, width=4, layers=1, tied=True)
    twin = Toy(vocabulary=7, width=4, layers=1, tied=True)
    twin.load_state_dict(model.state_dict())
    plain = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}[name]
    ours = build_optimizer(model, Optimizer(name=name, weight_decay=0.0), lr=0.01)
    theirs = plain(twin.parameters(), lr=0.01, weight_decay=0.0)
    for _ in range(3):
        for network, optimizer in ((model, ours), (twin, theirs)):
            optimizer.zero_grad()
            network(torch.arange(6).view(2, 3)).square().sum().backward()
            optimizer.step()
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_decay_shrinks_a_matrix_and_leaves_a_bias() -> None:
    layer = nn.Linear(3, 3)
    nn.init.ones_(layer.weight)
    nn.init.ones_(layer.bias)
    optimizer = build_optimizer(layer, Optimizer(name="adamw", weight_decay=0.5), lr=0.1)
    for parameter in layer.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert torch.equal(layer.weight, torch.full((3, 3), 1 - 0.1 * 0.5))
    assert torch.equal(layer.bias, torch.ones(3))


# ---------------------------------------------------------------- muon, which has AdamW beside it


def muon(model: nn.Module, blocks: list[nn.Module], **options: Any) -> torch.optim.Optimizer:
    return build_optimizer(model, Optimizer(name="muon", weight_decay=0.1, **options), lr=0.02, blocks=blocks)


def test_muon_takes_the_matrices_of_the_blocks_and_adamw_all_else() -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(5, 4)
            self.layers = nn.ModuleList([Odd()])
            self.layers[0].table = nn.Parameter(torch.zeros(3, 3))
            self.head = nn.Linear(4, 5)

    model = Whole()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    optimizer = muon(model, list(model.layers), betas=[0.8, 0.95], eps=1e-6, muon_momentum=0.9)
    given = {True: {"momentum": 0.9, "adjust_lr_fn": "match_rms_adamw"}, False: {"betas": (0.8, 0.95), "eps": 1e-6}}
    decays: dict[bool, dict[str, float]] = {True: {}, False: {}}
    for group in optimizer.param_groups:
        assert {"lr": group["lr"]} | {key: group[key] for key in given[group["muon"]]} == {"lr": 0.02} | given[
            group["muon"]
        ]
        decays[group["muon"]] |= {names[id(parameter)]: group["weight_decay"] for parameter in group["params"]}
    assert decays[True] == {
        "layers.0.linear.weight": 0.1,
        "layers.0.attention.in_proj_weight": 0.1,
        "layers.0.attention.out_proj.weight": 0.1,
    }
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert decays[False].keys() == trained - decays[True].keys()
    assert decays[False]["head.weight"] == 0.1
    assert decays[False]["layers.0.own_norm.weight"] == decays[False]["head.bias"] == 0.0


@pytest.mark.parametrize("tied", [True, False])
def test_a_step_of_muon_is_that_of_pytorchs_muon_and_adamw(tied: bool) -> None:
    torch.manual_seed(0)
    model, twin = (Toy(vocabulary=7, width=4, layers=2, tied=tied) for _ in range(2))
    twin.load_state_dict(model.state_dict())
    ours = muon(model, list(model.layers))
    named = dict(twin.named_parameters())
    hidden = [f"layers.{layer}.inner.{place}.weight" for layer in (0, 1) for place in (1, 3)]
    matrices = {"embedding.weight", "head.weight"} & named.keys()
    theirs = [
        torch.optim.Muon(
            [named.pop(name) for name in hidden], lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW([named.pop(name) for name in matrices], lr=0.02, weight_decay=0.1),
        torch.optim.AdamW(named.values(), lr=0.02, weight_decay=0.0),
    ]
    for _ in range(3):
        for network, optimizers in ((model, [ours]), (twin, theirs)):
            network.zero_grad()
            network(torch.arange(6).view(2, 3)).square().sum().backward()
            for optimizer in optimizers:
                optimizer.step()
    for (name, mine), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine, other), name


def test_muon_of_a_model_that_is_nothing_but_such_matrices_needs_no_adamw() -> None:
    layer, twin = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
    twin.load_state_dict(layer.state_dict())
    ours = muon(layer, [layer])
    theirs = torch.optim.Muon(twin.parameters(), lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    layer.weight.grad, twin.weight.grad = torch.eye(3), torch.eye(3)
    ours.step()
    theirs.step()
    assert torch.equal(layer.weight, twin.weight)


def test_muon_says_that_there_is_nothing_for_it() -> None:
    with pytest.raises(ConfigError, match=r"blocks have no matrices .* Use training\.optimizer\.name: adamw"):
        muon(nn.Linear(3, 3), [])
