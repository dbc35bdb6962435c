"""Triton kernels for the convolutions of many small models at once.

Both are matrix products whose large operand is read out of the images as it is needed, never
written down. Images are padded beforehand, so that a place in them is the sum of a pixel's place
and a place in the window. Pixels lie along the last axis of every tile, so that neighbours are
read together. float32 is multiplied as torch's own convolutions do it: as TensorFloat-32, or,
where `torch.backends.cudnn.allow_tf32` is off, as three of those, which loses next to nothing.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_PROGRAMS = 1024  # that a weight gradient is cut into, so that no part of the card is idle


@triton.jit
def _correlate(
    x, w, out,
    IMAGES: tl.constexpr, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    OUT: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, STRIDE: tl.constexpr,
    ROWS: tl.constexpr, TERMS: tl.constexpr, PIXELS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out[o, p] = sum over k = (c, i, j) of w[o, k] * x[c, p + (i, j)]"""
    model = tl.program_id(1).to(tl.int64)
    p = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    image, pixel = p // (OH * OW), p % (OH * OW)
    corner = image * (C * H * W) + (pixel // OW * W + pixel % OW) * STRIDE
    here = p < IMAGES * OH * OW
    o = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    x += model * IMAGES * C * H * W
    w += model * OUT * C * KH * KW
    total = tl.zeros((ROWS, PIXELS), tl.float32)
    for start in range(0, C * KH * KW, TERMS):
        k = start + tl.arange(0, TERMS)
        window = k // (KH * KW) * (H * W) + k // KW % KH * W + k % KW
        real = k < C * KH * KW
        columns = tl.load(
            x + (corner[None, :] + window[:, None]), mask=real[:, None] & here[None, :], other=0.0
        )
        weights = tl.load(
            w + (o[:, None] * (C * KH * KW) + k[None, :]),
            mask=(o < OUT)[:, None] & real[None, :],
            other=0.0,
        )
        total = tl.dot(weights, columns, total, input_precision=PRECISION)
    place = image * (OUT * OH * OW) + pixel
    tl.store(
        out + model * IMAGES * OUT * OH * OW + (place[None, :] + o[:, None] * (OH * OW)),
        total,
        mask=(o < OUT)[:, None] & here[None, :],
    )


@triton.jit
def _weight_gradient(
    x, dy, parts, MODELS,
    IMAGES: tl.constexpr, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    OUT: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, STRIDE: tl.constexpr,
    ROWS: tl.constexpr, TERMS: tl.constexpr, COLUMNS: tl.constexpr, SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dw[o, k] = sum over pixels p of dy[o, p] * x[c, p + (i, j)]; each part of its own pixels."""
    blocks: tl.constexpr = (OUT + ROWS - 1) // ROWS
    model, part = (tl.program_id(1) // blocks).to(tl.int64), tl.program_id(2)
    o = tl.program_id(1) % blocks * ROWS + tl.arange(0, ROWS)
    k = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    window = k // (KH * KW) * (H * W) + k // KW % KH * W + k % KW
    real = k < C * KH * KW
    x += model * IMAGES * C * H * W
    dy += model * IMAGES * OUT * OH * OW
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, IMAGES * OH * OW, SPLIT * TERMS):
        p = start + part * TERMS + tl.arange(0, TERMS)
        image, pixel = p // (OH * OW), p % (OH * OW)
        here = p < IMAGES * OH * OW
        place = image * (OUT * OH * OW) + pixel
        gradient = tl.load(
            dy + (place[None, :] + o[:, None] * (OH * OW)),
            mask=(o < OUT)[:, None] & here[None, :],
            other=0.0,
        )
        corner = image * (C * H * W) + (pixel // OW * W + pixel % OW) * STRIDE
        columns = tl.load(
            x + (corner[None, :] + window[:, None]), mask=real[:, None] & here[None, :], other=0.0
        )
        total = tl.dot(gradient, tl.trans(columns), total, input_precision=PRECISION)
    tl.store(
        parts + (part * MODELS + model) * (OUT * C * KH * KW)
        + (o[:, None] * (C * KH * KW) + k[None, :]),
        total,
        mask=(o < OUT)[:, None] & real[None, :],
    )  # fmt: skip


def correlate(x: Tensor, w: Tensor, stride: int) -> Tensor:
    """x (models, images, channels, height, width) with w (models, outputs, channels, ...)."""
    sizes = _sizes(x, w, stride)
    models, images, outputs = len(x), sizes["IMAGES"], sizes["OUT"]
    down, across = sizes["OH"], sizes["OW"]
    out = x.new_empty((models, images, outputs, down, across))
    rows = _rows(outputs)
    pixels, warps = (64, 2) if rows == 16 else (128, 4)  # the fastest of 23 tiles on an H200
    grid = (triton.cdiv(images * down * across, pixels), models, triton.cdiv(outputs, rows))
    tile = {"ROWS": rows, "TERMS": 32, "PIXELS": pixels, "num_warps": warps}
    _launch(_correlate, grid, x, w, out, **tile, **sizes)
    return out


def weight_gradient(x: Tensor, dy: Tensor, kernel: tuple[int, int], stride: int) -> Tensor:
    """The gradient of `correlate` by w, for windows of this size; the same bits each time."""
    like = dy.new_empty((len(x), dy.shape[2], x.shape[2], *kernel))
    sizes = _sizes(x, like, stride)
    models, outputs, terms = len(x), sizes["OUT"], like[0, 0].numel()
    rows = _rows(outputs)
    columns, pixels = (32, 64) if terms <= 32 else (64, 16)  # the fastest of 48 tiles on an H200
    across, down = triton.cdiv(terms, columns), triton.cdiv(outputs, rows)
    most = triton.cdiv(sizes["IMAGES"] * sizes["OH"] * sizes["OW"], 8 * pixels)
    split = max(1, min(_PROGRAMS // (models * across * down), most))
    parts = x.new_empty((split, *like.shape))
    tile = {"ROWS": rows, "TERMS": pixels, "COLUMNS": columns, "SPLIT": split, "num_warps": 2}
    grid = (across, models * down, split)
    _launch(_weight_gradient, grid, x, dy, parts, models, **tile, **sizes)
    return parts.sum(dim=0)


def _sizes(x: Tensor, w: Tensor, stride: int) -> dict[str, int]:
    _, images, channels, height, width = x.shape
    _, outputs, _, down, across = w.shape
    after = {"OH": (height - down) // stride + 1, "OW": (width - across) // stride + 1}
    before = {"IMAGES": images, "C": channels, "H": height, "W": width}
    return {**before, "OUT": outputs, **after, "KH": down, "KW": across, "STRIDE": stride}


def _rows(count: int) -> int:
    """The other side of a tile; a product of matrices takes 16 at least."""
    return 16 if count <= 16 else 32 if count <= 32 else 64


def _launch(kernel: Any, grid: tuple[int, ...], first: Tensor, *rest: Any, **numbers: Any) -> None:
    precision = "tf32" if torch.backends.cudnn.allow_tf32 else "tf32x3"
    with torch.cuda.device_of(first):
        kernel[grid](first, *rest, **numbers, PRECISION=precision)
