"""A Triton kernel for the products of the matrices of many models at once.

float32 is multiplied as three products of TensorFloat-32, which loses next to nothing.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _product(
    a, b, out,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    A_MODEL: tl.constexpr, A_ROW: tl.constexpr, A_COLUMN: tl.constexpr,
    B_MODEL: tl.constexpr, B_ROW: tl.constexpr, B_COLUMN: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TERMS: tl.constexpr,
):  # fmt: skip
    """out[m, n] = sum over k of a[m, k] * b[k, n]"""
    across: tl.constexpr = (N + COLUMNS - 1) // COLUMNS
    tiles: tl.constexpr = (M + ROWS - 1) // ROWS * across
    model = (tl.program_id(0) // tiles).to(tl.int64)  # of one axis, since others end at 65,535
    tile = tl.program_id(0) % tiles
    m = tile // across * ROWS + tl.arange(0, ROWS)
    n = tile % across * COLUMNS + tl.arange(0, COLUMNS)
    a += model * A_MODEL
    b += model * B_MODEL
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, K, TERMS):
        k = start + tl.arange(0, TERMS)
        left = tl.load(
            a + (m[:, None] * A_ROW + k[None, :] * A_COLUMN),
            mask=(m < M)[:, None] & (k < K)[None, :],
            other=0.0,
        )
        right = tl.load(
            b + (k[:, None] * B_ROW + n[None, :] * B_COLUMN),
            mask=(k < K)[:, None] & (n < N)[None, :],
            other=0.0,
        )
        total = tl.dot(left, right, total, input_precision="tf32x3")
    out += model * (M * N)
    tl.store(out + (m[:, None] * N + n[None, :]), total, mask=(m < M)[:, None] & (n < N)[None, :])


def product(a: Tensor, b: Tensor) -> Tensor:
    """a (models, m, k) times b (models, k, n), of any strides."""
    models, m, k = a.shape
    n = b.shape[2]
    out = a.new_empty((models, m, n))
    # The fastest, or nearly, of a dozen tiles or more for each of eight products on an H200.
    turned = a.stride(1) == 1
    rows, columns = (_side(m, 32), _side(n, 64)) if turned else (_side(m, 64), _side(n, 32))
    terms = _side(k, 32 if turned else 64)
    grid = (triton.cdiv(m, rows) * triton.cdiv(n, columns) * models,)
    (a_model, a_row, a_column), (b_model, b_row, b_column) = a.stride(), b.stride()
    with torch.cuda.device_of(a):
        _product[grid](
            a, b, out, M=m, N=n, K=k, A_MODEL=a_model, A_ROW=a_row, A_COLUMN=a_column,
            B_MODEL=b_model, B_ROW=b_row, B_COLUMN=b_column, ROWS=rows, COLUMNS=columns,
            TERMS=terms, num_warps=2 if turned else 4, num_stages=3,
        )  # fmt: skip
    return out


def _side(count: int, most: int) -> int:
    found: int = min(most, max(16, triton.next_power_of_2(count)))
    return found
