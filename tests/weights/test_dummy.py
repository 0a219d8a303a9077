"""Dummy weights: a function of seed, name and position, spread like those of a real model."""

from __future__ import annotations

import pytest
import torch

from tiny_vllm.weights import dummy
from tiny_vllm.weights.dummy import dummy_tensors

CPU = torch.device("cpu")
SHAPES = {"embedding": (256, 1024), "layers.0.input_norm": (4096,), "layers.0.q_bias": (4096,)}


def values(shapes: dict[str, tuple[int, ...]], seed: int = 0) -> dict[str, torch.Tensor]:
    return dict(dummy_tensors(shapes, seed=seed, device=CPU))


def test_matrices_keep_the_size_of_activations() -> None:
    matrix = values(SHAPES)["embedding"]
    # n uniform samples: the mean has a deviation of std/sqrt(n), the variance one of var*sqrt(0.8/n).
    count = matrix.numel()
    assert abs(matrix.mean().item()) < 5 * 1024**-0.5 / count**0.5
    assert matrix.var().item() * 1024 == pytest.approx(1.0, abs=5 * (0.8 / count) ** 0.5)
    assert matrix.unique().numel() > 0.98 * count


def test_rows_and_columns_are_uncorrelated() -> None:
    matrix = values(SHAPES)["embedding"] * 32
    products = matrix @ matrix.T / 1024
    products.fill_diagonal_(0)
    # 32640 pairs of rows, each with a deviation of 1/32: seven deviations are as good as impossible.
    assert products.abs().max() < 7 / 32


def test_norms_are_near_one_and_biases_near_zero() -> None:
    tensors = values(SHAPES)
    norm, bias = tensors["layers.0.input_norm"], tensors["layers.0.q_bias"]
    assert norm.min() >= 0.9 and norm.max() <= 1.1 and norm.std() > 0.05
    assert bias.abs().max() <= 0.02 and bias.std() > 0.01


def test_norms_are_near_one_with_the_offset_of_the_family() -> None:
    tensors = dict(dummy_tensors(SHAPES, seed=0, device=CPU, norm_offset=1.0))
    torch.testing.assert_close(
        tensors["layers.0.input_norm"] + 1.0, values(SHAPES)["layers.0.input_norm"], rtol=0, atol=1e-6
    )


def test_a_tensor_does_not_depend_on_the_others_or_their_order() -> None:
    everything = values(SHAPES)
    for name in reversed(SHAPES):
        assert torch.equal(values({name: SHAPES[name]})[name], everything[name])


def test_a_tensor_does_not_depend_on_how_it_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = values(SHAPES)["embedding"]
    monkeypatch.setattr(dummy, "VALUES_AT_ONCE", 1000)
    assert torch.equal(values(SHAPES)["embedding"], whole)


def test_the_sequence_of_a_seed_never_changes() -> None:
    known = [0.7776736617088318, -0.20406830310821533, -0.4892801344394684, -0.384980171918869]
    assert values({"embedding": (1, 4)}, seed=7)["embedding"].tolist() == [known]
    assert not torch.equal(values(SHAPES, 1)["embedding"], values(SHAPES, 2)["embedding"])


@pytest.mark.gpu
def test_a_gpu_makes_the_same_values() -> None:
    on_gpu = dict(dummy_tensors(SHAPES, seed=3, device=torch.device("cuda")))
    for name, tensor in values(SHAPES, seed=3).items():
        assert torch.equal(on_gpu[name].cpu(), tensor)
