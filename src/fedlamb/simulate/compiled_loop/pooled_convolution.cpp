// A convolution of stride 1, then the largest of each window of 2 x 2, as one pass over each image.
//
// Sizes are fixed when this is compiled: IN channels of HEIGHT x WIDTH pixels, PADDING zeros on each
// side, OUT channels by a KERNEL x KERNEL window. REAL is float or double. What comes out lies as
// (image, row, column, channel); `place` tells which pixel of a window was the largest: 0 to 3, row by
// row, the first of equal ones.

#include <cstdint>
#include <type_traits>
#include <vector>

namespace {

constexpr int64_t TALL = HEIGHT + 2 * PADDING, WIDE = WIDTH + 2 * PADDING, IMAGE = IN * TALL * WIDE;
constexpr int64_t ROWS = (TALL - KERNEL + 1) / 2, COLUMNS = (WIDE - KERNEL + 1) / 2;
constexpr int64_t POOLED = ROWS * COLUMNS * OUT;
constexpr int64_t LANES = 32 / sizeof(REAL);
constexpr int64_t ACROSS = (2 * COLUMNS + LANES - 1) / LANES;  // vectors for a row of the outcome
constexpr int64_t ROOM = (ACROSS + 1) / 2 * 2 * LANES;         // numbers that whole pairs of them hold
constexpr int64_t TAPS = (KERNEL + LANES - 1) / LANES;         // vectors for a row of the kernel

// Channels at a time, as many as registers hold.
constexpr int64_t block() {
  int64_t found = 1;
  for (int64_t n = 2; n * ACROSS <= 20; ++n)
    if (OUT % n == 0) found = n;
  return found;
}
constexpr int64_t BLOCK = block();

using Whole = std::conditional_t<sizeof(REAL) == 4, int32_t, int64_t>;
typedef REAL Vector __attribute__((vector_size(32), aligned(sizeof(REAL))));
typedef Whole Wholes __attribute__((vector_size(32), aligned(sizeof(REAL))));

Vector& at(REAL* place) { return *reinterpret_cast<Vector*>(place); }
const Vector& at(const REAL* place) { return *reinterpret_cast<const Vector*>(place); }

// Numbers first, first + 2 and so on of two vectors.
template <int64_t first>
Vector every_second(const REAL* from) {
#ifdef __clang__
  Vector found;
  for (int64_t i = 0; i < LANES; ++i) found[i] = from[2 * i + first];
  return found;
#else
  Wholes which;
  for (int64_t i = 0; i < LANES; ++i) which[i] = 2 * i + first;
  return __builtin_shuffle(at(from), at(from + LANES), which);
#endif
}

// The images with their padding, channel by channel, and room behind the last: vectors are read
// whole, also those of which the end is not used.
std::vector<REAL> padded(int64_t images, const REAL* x, const int64_t* strides) {
  std::vector<REAL> found(images * IMAGE + (ACROSS + TAPS) * LANES);
  for (int64_t n = 0; n < images; ++n)
    for (int64_t c = 0; c < IN; ++c)
      for (int64_t h = 0; h < HEIGHT; ++h) {
        const REAL* from = x + n * strides[0] + c * strides[1] + h * strides[2];
        REAL* to = &found[n * IMAGE + (c * TALL + h + PADDING) * WIDE + PADDING];
        for (int64_t w = 0; w < WIDTH; ++w) to[w] = from[w * strides[3]];
      }
  return found;
}

// One row of BLOCK channels of the convolution.
void convolve(const REAL* row, const REAL* weight, const REAL* bias, REAL (*out)[ROOM]) {
  Vector sums[BLOCK][ACROSS];
#pragma GCC unroll 16
  for (int64_t o = 0; o < BLOCK; ++o)
#pragma GCC unroll 16
    for (int64_t v = 0; v < ACROSS; ++v) sums[o][v] = bias[o] - Vector{};
  for (int64_t c = 0; c < IN; ++c)
    for (int64_t i = 0; i < KERNEL; ++i)
#pragma GCC unroll 1
      for (int64_t j = 0; j < KERNEL; ++j) {
        const REAL* from = row + (c * TALL + i) * WIDE + j;
        const REAL* by = weight + (c * KERNEL + i) * KERNEL + j;
#pragma GCC unroll 16
        for (int64_t o = 0; o < BLOCK; ++o)
#pragma GCC unroll 16
          for (int64_t v = 0; v < ACROSS; ++v)
            sums[o][v] += by[o * IN * KERNEL * KERNEL] * at(from + v * LANES);
      }
#pragma GCC unroll 16
  for (int64_t o = 0; o < BLOCK; ++o)
#pragma GCC unroll 16
    for (int64_t v = 0; v < ACROSS; ++v) at(out[o] + v * LANES) = sums[o][v];
}

}  // namespace

extern "C" void forward(int64_t images, int64_t threads, const REAL* x, const int64_t* strides,
                        const REAL* weight, const REAL* bias, REAL* y, uint8_t* place) {
  const std::vector<REAL> all = padded(images, x, strides);
#pragma omp parallel for num_threads(threads)
  for (int64_t n = 0; n < images; ++n)
    for (int64_t row = 0; row < ROWS; ++row)
      for (int64_t first = 0; first < OUT; first += BLOCK) {
        REAL upper_row[BLOCK][ROOM], lower_row[BLOCK][ROOM];
        const REAL* image = &all[n * IMAGE + 2 * row * WIDE];
        const REAL* by = weight + first * IN * KERNEL * KERNEL;
        convolve(image, by, bias + first, upper_row);
        convolve(image + WIDE, by, bias + first, lower_row);
        REAL largest[BLOCK][ROOM / 2];
        Whole where[BLOCK][ROOM / 2];
        for (int64_t o = 0; o < BLOCK; ++o)
          for (int64_t v = 0; v < ROOM / 2; v += LANES) {
            const REAL *above = &upper_row[o][2 * v], *under = &lower_row[o][2 * v];
            const Vector a = every_second<0>(above), b = every_second<1>(above);
            const Vector c = every_second<0>(under), d = every_second<1>(under);
            // All bits set, which is -1, where the second is larger, or no number at all.
            const Wholes right = (b > a) | (b != b), right_under = (d > c) | (d != d);
            const Vector upper = right ? b : a, lower = right_under ? d : c;
            const Wholes below = (lower > upper) | (lower != lower);
            at(&largest[o][v]) = below ? lower : upper;
            *reinterpret_cast<Wholes*>(&where[o][v]) = below ? 2 - right_under : -right;
          }
        const int64_t start = n * POOLED + row * COLUMNS * OUT + first;
        for (int64_t column = 0; column < COLUMNS; ++column)
          for (int64_t o = 0; o < BLOCK; ++o) {
            y[start + column * OUT + o] = largest[o][column];
            place[start + column * OUT + o] = static_cast<uint8_t>(where[o][column]);
          }
      }
}

// Of each window only the largest pixel had a part in y: a quarter of the dense gradient's work.
extern "C" void backward(int64_t images, int64_t threads, const REAL* x, const int64_t* strides,
                         const REAL* dy, const uint8_t* place, REAL* dweight, REAL* dbias) {
  const std::vector<REAL> all = padded(images, x, strides);
#pragma omp parallel for num_threads(threads)
  for (int64_t o = 0; o < OUT; ++o) {
    REAL* to = dweight + o * IN * KERNEL * KERNEL;
    for (int64_t k = 0; k < IN * KERNEL * KERNEL; ++k) to[k] = 0;
    dbias[o] = 0;
    for (int64_t n = 0; n < images; ++n)
      for (int64_t c = 0; c < IN; ++c) {
        REAL sum = 0;
        Vector sums[KERNEL][TAPS] = {};
        for (int64_t row = 0; row < ROWS; ++row)
          for (int64_t column = 0; column < COLUMNS; ++column) {
            const int64_t i = n * POOLED + (row * COLUMNS + column) * OUT + o;
            const REAL g = dy[i];
            const REAL* from = &all[n * IMAGE + (c * TALL + 2 * row + (place[i] >> 1)) * WIDE +
                                    2 * column + (place[i] & 1)];
            sum += g;
#pragma GCC unroll 16
            for (int64_t k = 0; k < KERNEL; ++k)
#pragma GCC unroll 16
              for (int64_t t = 0; t < TAPS; ++t) sums[k][t] += g * at(from + k * WIDE + t * LANES);
          }
        for (int64_t k = 0; k < KERNEL; ++k)
          for (int64_t j = 0; j < KERNEL; ++j)
            to[(c * KERNEL + k) * KERNEL + j] += sums[k][j / LANES][j % LANES];
        if (c == 0) dbias[o] += sum;
      }
  }
}
