"""Invalid arguments of kernels are rejected in Python: C++ does not check them."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launching import REPO, rank_env
from tests.support.waiting import DEADLINE_S


@pytest.mark.processes
@pytest.mark.parametrize(
    "optimize",
    [
        "",
        pytest.param("1", marks=pytest.mark.seeds),
        pytest.param("2", marks=pytest.mark.slow),
    ],
)
def test_tensors_that_do_not_fit_are_refused_also_when_python_removes_asserts(
    built: Path, optimize: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _MISFITS, str(built)],
        env=rank_env(PYTHONOPTIMIZE=optimize),
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "all refused"


def test_no_check_of_a_kernels_arguments_is_an_assert() -> None:
    for name in ("library.py", "update.py"):
        source = (REPO / "payload" / "kernels" / name).read_text(encoding="utf-8")
        assert not [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Assert)]


_MISFITS = """
import sys
from pathlib import Path
import torch
from payload.train.__main__ import exit_now
from payload.kernels import update
from payload.kernels.library import Library
from payload.kernels.bf16_copies import Bf16Copies

library = Library(Path(sys.argv[1]))
half, full, ids = torch.bfloat16, torch.float32, torch.int64

def t(*size, dtype=full):
    return torch.zeros(size, dtype=dtype)

def pieces(tensor):
    return tensor.repeat_interleave(2, dim=-1)[..., ::2]

qkv, out, sums = t(2, 8, 3, 2, 4, dtype=half), t(2, 8, 2, 4, dtype=half), t(2, 2, 8)
calls = {"attention_forward": [
    t(2, 8, 2, 2, 4, dtype=half), t(2, 8, 3, 2, 3, dtype=half), qkv.double(), pieces(qkv),
    t(8, 3, 2, 4, dtype=half),
]}
refused = [(library.attention_forward, (each,), {}) for each in calls["attention_forward"]]
refused += [
    (library.attention_backward, arguments, {})
    for arguments in [
        (qkv, out[:1], sums, out), (qkv, out, sums[:1], out), (qkv, out, sums, out[:, :4]),
        (qkv, out.float(), sums, out), (qkv, out, sums.half(), out), (qkv, out, sums, out.float()),
        (qkv.float(), out, sums, out), (qkv, pieces(out), sums, out),
    ]
]
logits, targets = t(2, 5, 8, dtype=half), t(5, dtype=ids)
for bad in (
    (logits, targets[:4], 12), (logits, targets.int(), 12), (logits, targets + 12, 12),
    (logits, targets - 1, 12), (logits, targets - 101, 12), (logits, targets, 17),
    (logits, targets, 8), (logits.half(), targets, 12), (pieces(logits), targets, 12),
):
    words = {"vocabulary": bad[2], "grad_scale": 1.0}
    refused.append((library.cross_entropy, (list(bad[0]), bad[1]), words))
words = {"vocabulary": 24, "grad_scale": 1.0}
refused.append((library.cross_entropy, ([*logits, logits[0, :4]], targets), words))
x, grad = t(6, 4, dtype=half), t(6, 3, dtype=half)
refused += [
    (library.gelu_forward, (x.double(),), {}), (library.gelu_forward, (pieces(x),), {}),
    (library.gelu_backward, (x, x[:3]), {}), (library.gelu_backward, (x, x.float()), {}),
    (library.gelu_backward, (x.float(), x), {}),
    (library.sum_rows, (x.double(),), {}), (library.sum_rows, (x.t(),), {}),
    (library.widen_add, (x, t(5, 4)), {}), (library.widen_add, (x, x), {}),
    (library.widen_add, (x.float(), t(6, 4)), {}), (library.widen_add, (x, pieces(t(6, 4))), {}),
]
refused += [
    (library.weight_gradient, arguments, {"add": True})
    for arguments in [
        (grad, x[:5], t(3, 4)), (grad, x, t(4, 4)), (grad, x, t(3, 5)), (grad.float(), x, t(3, 4)),
        (grad, x.float(), t(3, 4)), (grad, x, t(3, 4, dtype=half)), (pieces(grad), x, t(3, 4)),
        (grad, x, t(4, 3).t()),
    ]
]
rows = t(3, 4)
refused += [
    (library.add_rows, arguments, {})
    for arguments in [
        (t(5, 4), torch.tensor([0, 1, 5]), rows), (t(5, 4), torch.tensor([0, -1, 2]), rows),
        (t(5, 4), torch.tensor([0, 1]), rows), (t(5, 3), torch.tensor([0, 1, 2]), rows),
        (t(5, 4), torch.tensor([0, 1, 2]).int(), rows), (t(5, 4), torch.tensor([[0, 1, 2]]), rows),
        (t(5, 4), torch.tensor([0, 1, 2]), rows.bfloat16()),
        (t(5, 4, dtype=half), torch.tensor([0, 1, 2]), rows),
        (t(4, 5).t(), torch.tensor([0, 1, 2]), rows),
    ]
]
wide, norm = t(6, 4), t(4)
refused += [
    (library.add_norm_forward, arguments, {"eps": 1e-5})
    for arguments in [
        (wide.bfloat16(), None, norm, norm), (wide, x[:5], norm, norm), (wide, wide, norm, norm),
        (wide, x, norm[:3], norm), (wide, x, norm, norm[:3]), (wide, x, norm.bfloat16(), norm),
        (wide.t(), None, t(6), t(6)),
    ]
]
saved = (wide, t(6), t(6))
refused += [
    (library.add_norm_backward, arguments, {"adds": True})
    for arguments in [
        (saved, norm[:3], wide, x), (saved, norm, wide[:5], x), (saved, norm, wide, x[:5]),
        (saved, norm, wide, wide.double()), (saved, norm, x, x),
        ((wide, t(5), t(6)), norm, wide, x), ((wide, t(6), t(5)), norm, wide, x),
        ((x, t(6), t(6)), norm, wide, x),
    ]
]
others = (x.half(), pieces(x), pieces(wide), wide.double())
refused += [(library.sum_squares, ([each],), {}) for each in others]

def adamw(**state):
    weight = torch.nn.Parameter(t(6, 4))
    weight.grad = state.pop("grad", t(6, 4))
    optimizer = torch.optim.AdamW([weight])
    optimizer.state[weight] = {
        "step": torch.tensor(1.0), "exp_avg": t(6, 4), "exp_avg_sq": t(6, 4), **state
    }
    copies = Bf16Copies()
    copies._copies[weight] = state.get("copy", t(6, 4, dtype=half))
    return lambda: update.adamw(optimizer, grad_scale=1.0, library=library, copies=copies)

refused += [
    (adamw(**state), (), {})
    for state in [
        {"exp_avg": t()}, {"exp_avg": t(5, 4)}, {"exp_avg_sq": x}, {"exp_avg_sq": pieces(wide)},
        {"copy": t(6, 3, dtype=half)}, {"copy": t(6, 4)}, {"exp_avg": t(6, 4, dtype=half)},
    ]
]
adamw()()
for function, arguments, words in refused:
    try:
        function(*arguments, **words)
    except ValueError:
        continue
    print(f"{function} took {[getattr(each, 'shape', each) for each in arguments]} {words}")
    exit_now(1)
print("all refused")
exit_now(0)
"""
