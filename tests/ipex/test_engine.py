"""The archived engine trains as the native one does. Its own environment: make test-ipex."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from payload.core.errors import ExitCode
from tests.support.launching import losses, mpirun, run, summary, train, train_program

pytestmark = pytest.mark.ipex

IPEX = "engine.kind=ipex"


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        # The same arithmetic in another order.
        ("fp32", 1e-5),
        # bf16 has 8 bits of mantissa: one rounding is 0.4 %.
        ("bf16", 4e-3),
    ],
)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_losses_equal_those_of_the_native_engine(
    num_ranks: int, dtype: str, tolerance: float, tmp_path: Path, tiny_config: Path
) -> None:
    precision = f"precision.dtype={dtype}"
    train(tmp_path / "native", tiny_config, precision, num_ranks=num_ranks)
    train(tmp_path / "ipex", tiny_config, precision, IPEX, num_ranks=num_ranks)

    native, ipex = losses(tmp_path / "native"), losses(tmp_path / "ipex")

    assert ipex == pytest.approx(native, rel=tolerance)
    assert native[-1] < native[0]
    assert summary(tmp_path / "ipex")["ranks_identical"] is True


def test_the_ccl_backend_trains_where_it_is_installed_and_else_says_how_to_get_it(
    tmp_path: Path, tiny_config: Path
) -> None:
    program = train_program(tmp_path / "ccl", tiny_config, IPEX, "distributed.backend=ccl")
    result = run(mpirun(2, *program))
    if importlib.util.find_spec("oneccl_bindings_for_pytorch") is None:
        assert result.returncode == ExitCode.CONFIG
        assert "oneccl_bind_pt" in result.stderr + result.stdout
    else:
        assert result.returncode == ExitCode.OK, result.stderr
        assert summary(tmp_path / "ccl")["ranks_identical"] is True
