"""Products on packed weights equal those on the weights themselves; a copy is made where it pays."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from taut.models.cpu import cpu_matmul, packed_weights
from taut.models.cpu.cpu_matmul import CpuMatmul, decoding, linear
from taut.models.cpu.packed_weights import PAYS, STAYS, PackedWeights, has_mkl_packed

ROOM = 2**30
EVERY = CpuMatmul(
    "mkl; packed for few rows small, few rows large, some rows shallow, some rows deep, "
    "bf16 few rows, bf16 some rows, bf16 many rows"
)
pytestmark = pytest.mark.skipif(not has_mkl_packed(), reason="this PyTorch has no MKL")


@pytest.fixture(autouse=True)
def _packed() -> Iterator[None]:
    before = cpu_matmul.active()
    cpu_matmul.use(EVERY)
    yield
    cpu_matmul.use(before)


@pytest.fixture
def packings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The dtype of each weight that is packed."""
    made: list[str] = []

    def noting(name: str, pack: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def noted(*arguments: object) -> Tensor:
            made.append(name)
            return pack(*arguments)

        return noted

    for name in ("float32", "bf16"):
        pack = getattr(packed_weights, f"pack_{name}")
        monkeypatch.setattr(packed_weights, f"pack_{name}", noting(name, pack))
    return made


def layer(inputs: int = 256, outputs: int = 128) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(inputs, outputs)


def settled(num_rows: int) -> PackedWeights:
    """Room for copies, after as many steps with this number of rows as float32 waits for."""
    packed = PackedWeights(ROOM)
    for _ in range(STAYS + 1):
        packed.expect(PAYS, num_rows)
    return packed


def product(packed: PackedWeights, x: Tensor, of: nn.Linear) -> Tensor:
    with torch.no_grad(), decoding(packed):
        return linear(x, of.weight, of.bias)


@pytest.mark.parametrize("num_rows", [5, 16, 64, 200])
def test_a_float32_product_is_float32s(num_rows: int, packings: list[str]) -> None:
    of, x = layer(), torch.randn(1, num_rows, 256)
    found = product(settled(num_rows), x, of)
    assert packings == ["float32"]
    wanted = (x.double() @ of.weight.double().T + of.bias.double()).detach()
    assert found.shape == (1, num_rows, 128) and found.dtype == torch.float32
    assert float((found - wanted).abs().max()) < 1e-5


@pytest.mark.skipif(not cpu_matmul.has_bf16(), reason="no bf16 arithmetic to pack for")
@pytest.mark.parametrize("is_autocast", [False, True])
@pytest.mark.parametrize("num_rows", [1, 9, 64, 300])
def test_a_bf16_product_is_bf16s(num_rows: int, is_autocast: bool, packings: list[str]) -> None:
    """Of narrow weights, or by autocast of wide ones; for any number of rows with one copy."""
    of, packed = layer(), PackedWeights(ROOM)
    of = of if is_autocast else of.bfloat16()
    packed.expect(PAYS)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_autocast):
        for rows in (num_rows, 17):
            x = torch.randn(1, rows, 256, dtype=of.weight.dtype)
            found = product(packed, x, of)
            with torch.no_grad():
                wanted = of(x)
            assert found.dtype == wanted.dtype == torch.bfloat16
            # one step of bf16: the sums are in float32 in another order
            torch.testing.assert_close(found, wanted, rtol=2**-7, atol=2**-9)
    assert packings == ["bf16"]


def test_float32_waits_for_a_number_of_rows_that_stays(packings: list[str]) -> None:
    packed, of = PackedWeights(ROOM), layer()
    counts = []
    for num_rows in (*[9] * (STAYS + 3), *[8] * STAYS, 9, *[8] * (STAYS + 2)):
        packed.expect(PAYS, num_rows)
        product(packed, torch.randn(num_rows, 256), of)
        counts.append(len(packings))
    assert counts == [*[0] * STAYS, 1, 1, 1, *[1] * STAYS, 1, *[1] * STAYS, 2, 2]
    assert packed.num_bytes == 4 * of.weight.numel(), "the copy for nine rows is gone"


@pytest.mark.parametrize("narrow", [False, True])
def test_nothing_is_packed_for_few_steps(narrow: bool, packings: list[str]) -> None:
    packed, of = PackedWeights(ROOM), layer()
    of = of.bfloat16() if narrow else of
    for _ in range(STAYS + 3):
        packed.expect(PAYS - 1, 9)
        product(packed, torch.randn(9, 256, dtype=of.weight.dtype), of)
    assert not packings


def test_a_copy_is_used_to_the_last_step(packings: list[str]) -> None:
    packed, of, x = settled(9), layer(), torch.randn(9, 256)
    first = product(packed, x, of)
    packed.expect(1, 9)
    assert torch.equal(product(packed, x, of), first) and len(packings) == 1


def test_copies_take_no_more_memory_than_they_may(packings: list[str]) -> None:
    first, second, x = layer(), layer(), torch.randn(9, 256)
    packed = settled(9)
    packed.limit = 4 * first.weight.numel() + 1
    for of in (first, second, first):
        torch.testing.assert_close(product(packed, x, of), of(x).detach(), rtol=1e-5, atol=1e-5)
    assert len(packings) == 1 and packed.num_bytes == 4 * first.weight.numel()


def test_what_cannot_be_packed_is_left_alone(packings: list[str]) -> None:
    x, of, packed = torch.randn(9, 256), layer(), settled(9)
    with torch.no_grad(), decoding(packed):
        linear(x.double(), of.weight.double())
        linear(x, of.weight.detach() * 2)  # no parameter: another in each call
        linear(x, nn.Parameter(torch.randn(8, 256)))  # small
        linear(torch.randn(3, 256), of.weight)  # another number of rows
    with decoding(packed):
        assert linear(x, of.weight).requires_grad
    cpu_matmul.use(CpuMatmul("mkl"))
    product(packed, x, of)
    assert not packings
