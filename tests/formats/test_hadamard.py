"""The rotation."""

from __future__ import annotations

import pytest
import torch

from hf_kvcache.errors import ConfigError
from hf_kvcache.formats import hadamard

DIMS = [4, 16, 24, 64, 80, 96, 112, 128, 192, 256]


@pytest.mark.parametrize("dim", DIMS)
def test_it_is_its_own_inverse_and_keeps_lengths(dim: int) -> None:
    x = torch.randn(7, 3, dim)
    turned = hadamard.rotate(x)
    # log2(D) <= 8 butterflies round by 2^-24 each, forth and back: 16 * 2^-24 ~ 1e-6 of the vector's length.
    bound = 2e-6 * x.norm(dim=-1, keepdim=True)
    assert ((hadamard.rotate(turned) - x).abs() <= bound).all()
    assert torch.allclose(turned.norm(dim=-1), x.norm(dim=-1), rtol=1e-6)
    assert not torch.allclose(turned, x)


@pytest.mark.parametrize("dim", DIMS)
def test_the_product_with_a_matrix_agrees(dim: int) -> None:
    x = torch.randn(5, dim)
    assert ((hadamard.rotate_matmul(x) - hadamard.rotate(x)).abs() <= 4e-6 * x.norm(dim=-1, keepdim=True)).all()


@pytest.mark.parametrize("dim", DIMS)
def test_the_same_vector_gives_the_same_bits_however_it_is_batched(dim: int) -> None:
    x = torch.randn(2, 3, 40, dim)
    whole = hadamard.rotate(x)
    single = torch.stack([hadamard.rotate(x[:, :, t]) for t in range(40)], dim=2)
    pieces = torch.cat([hadamard.rotate(x[:, :, :7]), hadamard.rotate(x[:, :, 7:])], dim=2)
    strided = hadamard.rotate(x.transpose(1, 2)).transpose(1, 2)
    for other in (single, pieces, strided):
        assert torch.equal(whole, other)


def test_an_outlier_is_spread_over_its_block_only() -> None:
    x = torch.zeros(80)
    x[3] = 16.0
    turned = hadamard.rotate(x)  # blocks of 16
    assert torch.allclose(turned[:16].abs(), torch.full((16,), 4.0))
    assert (turned[16:] == 0).all()


@pytest.mark.parametrize("dim", [1, 2, 6, 50, 127])
def test_a_dim_that_cannot_be_rotated_is_refused_with_the_way_out(dim: int) -> None:
    with pytest.raises(ConfigError, match=f"head_dim={dim} .*rotate.*False"):
        hadamard.rotate(torch.zeros(dim))
