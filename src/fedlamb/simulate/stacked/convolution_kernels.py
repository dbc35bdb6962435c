"""Triton kernels for the convolutions of many small models at once.

All are matrix products whose large operand is read out of the images as it is needed, never
written down. A square of SIDE × SIDE pixels of the result, neighbours whose windows overlap, is
computed from the one patch of pixels that its windows cover: reading, not multiplying, is what
takes the time. The channels of a pixel lie side by side, so that a row of a patch is one line in
memory; a patch's terms are numbered k = (row, column, channel), and the results of a square
n = (pixel of the square, output). float32 is multiplied as torch's own convolutions do it: as
TensorFloat-32, or, where `torch.backends.cudnn.allow_tf32` is off, as three of those, which loses
next to nothing.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_PROGRAMS = 1024  # that a weight gradient is cut into, so that no part of the card is idle


@triton.jit
def _patches(
    x, p, k, here, real,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr,
    TALL: tl.constexpr, WIDE: tl.constexpr, STEP: tl.constexpr,
    TOP: tl.constexpr, LEFT: tl.constexpr,
):  # fmt: skip
    """The terms k of the patches p = (image, down, across), STEP pixels apart."""
    image, place = p // (DOWN * ACROSS), p % (DOWN * ACROSS)
    y, z = place // ACROSS * STEP - TOP, place % ACROSS * STEP - LEFT
    i, r = k // (WIDE * C), k % (WIDE * C)
    inside = here[:, None] & real[None, :]
    if TOP > 0 or (DOWN - 1) * STEP + TALL > H:
        row = y[:, None] + i[None, :]
        inside &= (row >= 0) & (row < H)
    if LEFT > 0 or (ACROSS - 1) * STEP + WIDE > W:
        column = z[:, None] + (r // C)[None, :]
        inside &= (column >= 0) & (column < W)
    # Of neighbouring terms all are read or none, so that they can be read together.
    if C % 2 == 0:
        inside = tl.max_constancy(inside, [1, 4 if C % 4 == 0 else 2])
    corner = ((image * H + y) * W + z) * C
    return tl.load(x + (corner[:, None] + (i * (W * C) + r)[None, :]), mask=inside, other=0.0)


@triton.jit
def _weight(
    k, q, o,
    C: tl.constexpr, OUT: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    """Where among (outputs, channels, rows, columns) the weight lies by which a patch's term k
    enters the output o of its square's pixel q, and whether there is one."""
    c = k % C
    i = k // ((KW + SIDE - 1) * C) - q // SIDE
    j = k // C % (KW + SIDE - 1) - q % SIDE
    inside = (i >= 0) & (i < KH) & (j >= 0) & (j < KW) & (o < OUT) & (q < SIDE * SIDE)
    return ((o * C + c) * KH + i) * KW + j, inside


@triton.jit
def _spread(
    w, out,
    C: tl.constexpr, OUT: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, SIDE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, K: tl.constexpr, BACK: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """The weights of a square as a matrix (n, k). BACK: w turned round, in and out swapped."""
    model = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    n, k = at // K, at % K
    term, inside = _weight(k, n // ROWS, n % ROWS, C, OUT, KH, KW, SIDE)
    if BACK:
        o, c, place = term // (C * KH * KW), term // (KH * KW) % C, term % (KH * KW)
        term = (c * OUT + o + 1) * (KH * KW) - 1 - place
    found = tl.load(w + model * (OUT * C * KH * KW) + term, mask=inside, other=0.0)
    tl.store(out + model * (COLUMNS * K) + at, found, mask=at < COLUMNS * K)


@triton.jit
def _larger(best, place, other, number):
    """As torch compares them: the first of equals, and what is no number goes through."""
    better = (other > best) | ((other == best) & (number < place)) | (other != other)
    return tl.where(better, other, best), tl.where(better, number, place)


@triton.jit
def _correlate(
    x, w, out, places,
    IMAGES: tl.constexpr, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr,
    OUT: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    STEP: tl.constexpr, TOP: tl.constexpr, LEFT: tl.constexpr,
    SIDE: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr, POOL: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TERMS: tl.constexpr, PIXELS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """square[p, n] = sum over k of patch[p, k] * w[n, k]; with POOL only its largest is kept,
    and which it is."""
    WIDE: tl.constexpr = KW + SIDE - 1
    TALL: tl.constexpr = KH + SIDE - 1
    K: tl.constexpr = TALL * WIDE * C
    blocks: tl.constexpr = (SIDE * SIDE * ROWS + COLUMNS - 1) // COLUMNS
    model = tl.program_id(1).to(tl.int64)
    x += model * (IMAGES * H * W * C)
    w += model * (blocks * COLUMNS * K)
    p = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    here = p < IMAGES * DOWN * ACROSS
    n = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((PIXELS, COLUMNS), tl.float32)
    for start in range(0, K, TERMS):
        k = start + tl.arange(0, TERMS)
        real = k < K
        tile = _patches(x, p, k, here, real, H, W, C, DOWN, ACROSS, TALL, WIDE, STEP, TOP, LEFT)
        weights = tl.load(w + (n[None, :] * K + k[:, None]), mask=real[:, None], other=0.0)
        total = tl.dot(tile, weights, total, input_precision=PRECISION)
    out += model * (IMAGES * OH * OW * OUT)
    if POOL:
        square = tl.reshape(total, (PIXELS, SIDE * SIDE, ROWS))
        number = tl.arange(0, SIDE * SIDE)[None, :, None]
        number = tl.broadcast_to(number, (PIXELS, SIDE * SIDE, ROWS))
        best, place = tl.reduce((square, number), 1, _larger)
        o = tl.arange(0, ROWS)
        at = p[:, None] * OUT + o[None, :]
        kept = here[:, None] & (o < OUT)[None, :]
        tl.store(out + at, best, mask=kept)
        tl.store(places + model * (IMAGES * OH * OW * OUT) + at, place.to(tl.uint8), mask=kept)
    else:
        image, place = p // (DOWN * ACROSS), p % (DOWN * ACROSS)
        q, o = n // ROWS, n % ROWS
        y = (place // ACROSS * SIDE)[:, None] + (q // SIDE)[None, :]
        z = (place % ACROSS * SIDE)[:, None] + (q % SIDE)[None, :]
        kept = here[:, None] & ((o < OUT) & (q < SIDE * SIDE))[None, :] & (y < OH) & (z < OW)
        at = ((image[:, None] * OH + y) * OW + z) * OUT + o[None, :]
        tl.store(out + at, total, mask=kept)


@triton.jit
def _weight_gradient(
    x, dy, places, parts, MODELS,
    IMAGES: tl.constexpr, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr,
    OUT: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    STEP: tl.constexpr, TOP: tl.constexpr, LEFT: tl.constexpr, POOL: tl.constexpr,
    ROWS: tl.constexpr, TERMS: tl.constexpr, PIXELS: tl.constexpr, SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """part[k, n] = sum over p of patch[p, k] * dy[p, n], each part of its own pixels; a weight's
    gradient is the sum of what lies there. With POOL, dy counts for the pixel that places say."""
    SIDE: tl.constexpr = 2 if POOL else 1
    WIDE: tl.constexpr = KW + SIDE - 1
    TALL: tl.constexpr = KH + SIDE - 1
    blocks: tl.constexpr = (OUT + ROWS - 1) // ROWS
    model, part = (tl.program_id(1) // blocks).to(tl.int64), tl.program_id(2)
    first = tl.program_id(1) % blocks * ROWS
    x += model * (IMAGES * H * W * C)
    dy += model * (IMAGES * OH * OW * OUT)
    places += model * (IMAGES * OH * OW * OUT)
    k = tl.program_id(0) * TERMS + tl.arange(0, TERMS)
    real = k < TALL * WIDE * C
    total = tl.zeros((TERMS, SIDE * SIDE * ROWS), tl.float32)
    for start in range(0, IMAGES * OH * OW, SPLIT * PIXELS):
        p = start + part * PIXELS + tl.arange(0, PIXELS)
        here = p < IMAGES * OH * OW
        tile = _patches(x, p, k, here, real, H, W, C, OH, OW, TALL, WIDE, STEP, TOP, LEFT)
        o = first + tl.arange(0, ROWS)
        at = p[:, None] * OUT + o[None, :]
        kept = here[:, None] & (o < OUT)[None, :]
        gradient = tl.load(dy + at, mask=kept, other=0.0)
        if POOL:
            place = tl.load(places + at, mask=kept, other=SIDE * SIDE)
            largest = place[:, None, :] == tl.arange(0, SIDE * SIDE)[None, :, None]
            spread = tl.where(largest, gradient[:, None, :], 0.0)
            gradient = tl.reshape(spread, (PIXELS, SIDE * SIDE * ROWS))
        total = tl.dot(tl.trans(tile), gradient, total, input_precision=PRECISION)
    n = tl.arange(0, SIDE * SIDE * ROWS)
    q = n // ROWS
    term, inside = _weight(
        k[:, None], q[None, :], (first + n % ROWS)[None, :], C, OUT, KH, KW, SIDE
    )
    parts += ((part * (SIDE * SIDE) + q) * MODELS + model)[None, :] * (OUT * C * KH * KW)
    tl.store(parts + term, total, mask=inside & real[:, None])


def correlate(x: Tensor, w: Tensor, stride: int, padding: tuple[int, int]) -> Tensor:
    """x (models, images, height, width, channels), w (models, outputs, channels, down, across)."""
    return _correlated(x, w, _Sizes.of(x, w.shape[1], w.shape[3:], stride, padding))[0]


def input_gradient(dy: Tensor, w: Tensor, padding: tuple[int, int]) -> Tensor:
    """The gradient of `correlate` by x, for stride 1: a correlation, too."""
    kernel = w.shape[3:]
    around = kernel[0] - 1 - padding[0], kernel[1] - 1 - padding[1]
    return _correlated(dy, w, _Sizes.of(dy, w.shape[2], kernel, 1, around), back=True)[0]


def weight_gradient(
    x: Tensor, dy: Tensor, kernel: tuple[int, int], stride: int, padding: tuple[int, int]
) -> Tensor:
    """The gradient of `correlate` by w, for windows of this size; the same bits each time."""
    return _by_weights(x, dy, dy, _Sizes.of(x, dy.shape[4], kernel, stride, padding))


def pooled(x: Tensor, w: Tensor, padding: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """`correlate` with stride 1 and a pool of 2 × 2: the largest of four, and which it is."""
    return _correlated(x, w, _Sizes.of(x, w.shape[1], w.shape[3:], 1, padding, pool=True))


def pooled_weight_gradient(
    x: Tensor, dy: Tensor, places: Tensor, kernel: tuple[int, int], padding: tuple[int, int]
) -> Tensor:
    """The gradient of `pooled` by w; the same bits each time."""
    return _by_weights(x, dy, places, _Sizes.of(x, dy.shape[4], kernel, 1, padding, pool=True))


class _Sizes(NamedTuple):
    """What a kernel is made for; the names are those of its parameters."""

    IMAGES: int
    H: int
    W: int
    C: int
    OUT: int
    OH: int
    OW: int
    KH: int
    KW: int
    STEP: int
    """Pixels between two patches."""
    TOP: int
    LEFT: int
    POOL: bool

    @staticmethod
    def of(
        x: Tensor, outputs: int, kernel: Any, stride: int, padding: tuple[int, int],
        pool: bool = False,
    ) -> "_Sizes":  # fmt: skip
        _, images, height, width, channels = x.shape
        down = (height + 2 * padding[0] - kernel[0]) // stride + 1
        across = (width + 2 * padding[1] - kernel[1]) // stride + 1
        after = (down // 2, across // 2) if pool else (down, across)
        step = 2 if pool else stride
        (down, across), (tall, wide), (top, left) = after, kernel, padding
        return _Sizes(
            images, height, width, channels, outputs, down, across, tall, wide, step, top, left,
            pool,
        )  # fmt: skip

    def terms(self, side: int) -> int:
        """Of a patch."""
        return (self.KH + side - 1) * (self.KW + side - 1) * self.C


def _correlated(x: Tensor, w: Tensor, sizes: _Sizes, back: bool = False) -> tuple[Tensor, Tensor]:
    models, outputs = len(x), sizes.OUT
    # A square's results are as many columns; with more than 64, squares gain nothing.
    joined = sizes.STEP == 1 and 4 * outputs <= 64 and max(sizes.KH, sizes.KW) > 1
    side = 2 if sizes.POOL or joined else 1
    down, across = (
        (sizes.OH, sizes.OW) if sizes.POOL else (-(-sizes.OH // side), -(-sizes.OW // side))
    )
    rows = _power(outputs) if sizes.POOL else outputs
    columns = 4 * rows if sizes.POOL else min(64, _power(side**2 * rows))
    blocks = triton.cdiv(side**2 * rows, columns)
    terms = sizes.terms(side)
    matrix = w.new_empty((models, blocks * columns, terms))
    about = {"C": sizes.C, "OUT": outputs, "KH": sizes.KH, "KW": sizes.KW}
    with torch.cuda.device_of(x):
        _spread[(triton.cdiv(matrix[0].numel(), 1024), models)](
            w, matrix, **about, SIDE=side, ROWS=rows, COLUMNS=blocks * columns, K=terms, BACK=back,
            SIZE=1024,
        )  # fmt: skip
    out = x.new_empty((models, sizes.IMAGES, sizes.OH, sizes.OW, outputs))
    places = torch.empty_like(out, dtype=torch.uint8) if sizes.POOL else out
    pixels, large = 128, columns * terms > 2**15  # the fastest of a dozen tiles on an H200
    grid = (triton.cdiv(sizes.IMAGES * down * across, pixels), models, blocks)
    step = sizes.STEP if sizes.POOL else side * sizes.STEP
    _launch(
        _correlate, grid, x, matrix, out, places, **sizes._replace(STEP=step)._asdict(),
        SIDE=side, DOWN=down, ACROSS=across, ROWS=rows, COLUMNS=columns,
        TERMS=16 if terms <= 64 else 32, PIXELS=pixels, num_warps=8 if large else 4,
    )  # fmt: skip
    return out, places


def _by_weights(x: Tensor, dy: Tensor, places: Tensor, sizes: _Sizes) -> Tensor:
    """Each part has its own pixels, and with a pool its own of the four."""
    models, side = len(x), 2 if sizes.POOL else 1
    rows = _power(sizes.OUT) if sizes.POOL else min(64, _power(sizes.OUT))
    terms, pixels = 64, 32
    across, blocks = triton.cdiv(sizes.terms(side), terms), triton.cdiv(sizes.OUT, rows)
    most = triton.cdiv(sizes.IMAGES * sizes.OH * sizes.OW, 8 * pixels)
    split = max(1, min(_PROGRAMS // (models * across * blocks), most))
    parts = x.new_empty((split * side**2, models, sizes.OUT, sizes.C, sizes.KH, sizes.KW))
    _launch(
        _weight_gradient, (across, models * blocks, split), x, dy, places, parts, models,
        **sizes._asdict(), ROWS=rows, TERMS=terms, PIXELS=pixels, SPLIT=split, num_warps=2,
    )  # fmt: skip
    return parts.sum(dim=0)


def _power(count: int) -> int:
    """The least side of a tile that holds so many; a product of matrices takes 16 at least."""
    found: int = max(16, triton.next_power_of_2(count))
    return found


def _launch(kernel: Any, grid: tuple[int, ...], first: Tensor, *rest: Any, **numbers: Any) -> None:
    precision = "tf32" if _one_is_enough() else "tf32x3"
    with torch.cuda.device_of(first):
        # No pipeline: what it takes in registers and instructions costs more than it saves.
        kernel[grid](first, *rest, **numbers, PRECISION=precision, num_stages=1)


def _one_is_enough() -> bool:
    setting: Any = torch.backends.cudnn
    try:
        allowed: bool = setting.allow_tf32
    except RuntimeError:  # set through torch's newer interface, beside which this is not read
        return bool(setting.conv.fp32_precision == "tf32")
    return allowed
