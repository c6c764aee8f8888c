// Products of rows with packed weights: a model's linear layers on a CPU.
//
// Packed weights are [panels, inner / DEPTH, PANEL, DEPTH]: a panel is PANEL neighbouring columns of the product, and
// lies in the order in which it is read, from memory to registers, without a gap. A block of ROWS rows and one panel
// is summed in registers, so that each weight that is read serves all rows of the block: a product of few rows takes
// as long as its weights take to be read. More rows are taken BLOCK_ROWS at a time, and `inner` BLOCK_INNER at a
// time, while the weights of a panel stay in a cache. An element's sum always goes over `inner` in the same order:
// neither other rows nor the number of threads change its bits.
//
// Sources: GotoBLAS (Goto and van de Geijn, 2008) for panels and blocks.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>

#include "lanes.h"

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace {

constexpr int VECTORS = 2;                    // of a panel's columns
constexpr int PANEL = VECTORS * LANES;        // columns
constexpr int ROWS = LANES == 16 ? 8 : 6;     // with VECTORS they fill the processor's registers
constexpr int64_t BLOCK_ROWS = 64;
constexpr int64_t BLOCK_INNER = 2048;         // with PANEL it is a part of the second cache
constexpr int64_t AHEAD = 2048;               // bytes: how far ahead weights are fetched
constexpr int64_t SERIAL = 1 << 18;           // multiplications for which no other thread is woken

// rows: [num_rows, inner], `stride` elements apart. bias: [columns], or null. out: [num_rows, columns].
template <typename T>
struct Product {
  const T* rows;
  int64_t num_rows, stride, inner, columns;
  const T* weights;
  const T* bias;
  T* out;
};

// How a processor multiplies: DEPTH neighbours of a row with as many weights of each of a vector's columns.
template <typename T>
struct Multiply;

template <>
struct Multiply<float> {
  static constexpr int DEPTH = 1;
  typedef Lanes Weights;
  typedef float Number;
  static inline Weights load(const float* weights) { return ::load(weights); }
  static inline Number broadcast(const float* row) { return *row; }
  static inline void add(Lanes& sum, Weights weights, Number number) { sum += weights * number; }
};

#if defined(__AVX512BF16__)
template <>
struct Multiply<Bfloat16> {
  static constexpr int DEPTH = 2;
  typedef __m512bh Weights;
  typedef __m512bh Number;
  static inline Weights load(const Bfloat16* weights) { return (Weights)_mm512_loadu_si512(weights); }
  static inline Number broadcast(const Bfloat16* row) {
    int32_t pair;
    std::memcpy(&pair, row, sizeof pair);
    return (Number)_mm512_set1_epi32(pair);
  }
  static inline void add(Lanes& sum, Weights weights, Number number) {
    sum = (Lanes)_mm512_dpbf16_ps((__m512)sum, weights, number);
  }
};
#endif

// Add the products of some rows with a piece of a panel to their sums, [rows, PANEL]. length: of the piece.
// IS_FIRST: they are fetched ahead, and the next rows will find them in a cache.
// R numbers the rows, J the pairs of row and vector. (Packs, and not loops: a compiler keeps an array in registers
// only if its indices are constants.)
template <bool IS_FIRST, typename T, size_t... R, size_t... J>
void add_block(const T* rows, int64_t stride, const T* weights, int64_t length, float* sums,
               std::index_sequence<R...>, std::index_sequence<J...>) {
  using By = Multiply<T>;
  Lanes total[] = {load(sums + J * LANES)...};
  for (int64_t i = 0; i < length; i += By::DEPTH, weights += PANEL * By::DEPTH) {
    if constexpr (IS_FIRST)
      for (size_t byte = 0; byte < PANEL * By::DEPTH * sizeof(T); byte += 64)
        __builtin_prefetch(reinterpret_cast<const char*>(weights) + AHEAD + byte);
    const typename By::Weights piece[] = {By::load(weights), By::load(weights + LANES * By::DEPTH)};
    const typename By::Number numbers[] = {By::broadcast(rows + R * stride + i)...};
    (By::add(total[J], piece[J % VECTORS], numbers[J / VECTORS]), ...);
  }
  (store(total[J], sums + J * LANES), ...);
}

// As `add_block`, for a number of rows that is not known in advance, of 1 to N.
template <int N, bool IS_FIRST, typename T>
void add_some(int64_t num_rows, const T* rows, int64_t stride, const T* weights, int64_t length, float* sums) {
  if (num_rows == N)
    return add_block<IS_FIRST>(rows, stride, weights, length, sums, std::make_index_sequence<N>(),
                               std::make_index_sequence<N * VECTORS>());
  if constexpr (N > 1) add_some<N - 1, IS_FIRST>(num_rows, rows, stride, weights, length, sums);
}

// Compute the product of rows [first, first + num_rows), of which there are BLOCK_ROWS at most, with one panel.
template <typename T>
void multiply_panel(const Product<T>& product, int64_t first, int64_t num_rows, int64_t panel) {
  const int64_t column = panel * PANEL, num_columns = std::min<int64_t>(PANEL, product.columns - column);
  const T* weights = product.weights + column * product.inner;
  float bias[PANEL] = {}, sums[BLOCK_ROWS * PANEL];
  for (int64_t c = 0; product.bias && c < num_columns; ++c) bias[c] = widen(product.bias[column + c]);
  for (int64_t r = 0; r < num_rows; ++r) std::memcpy(sums + r * PANEL, bias, sizeof bias);
  for (int64_t begin = 0; begin < product.inner; begin += BLOCK_INNER) {
    const int64_t length = std::min(BLOCK_INNER, product.inner - begin);
    for (int64_t r = 0; r < num_rows; r += ROWS) {
      const auto add = r == 0 ? add_some<ROWS, true, T> : add_some<ROWS, false, T>;
      add(std::min<int64_t>(ROWS, num_rows - r), product.rows + (first + r) * product.stride + begin, product.stride,
          weights + begin * PANEL, length, sums + r * PANEL);
    }
  }
  for (int64_t r = 0; r < num_rows; ++r) {
    T products[PANEL];
    for (int64_t c = 0; c < PANEL; ++c) narrow(sums[r * PANEL + c], products[c]);
    std::memcpy(product.out + (first + r) * product.columns + column, products, num_columns * sizeof(T));
  }
}

template <typename T>
void multiply(const Product<T>& product, int threads) {
  const int64_t num_panels = (product.columns + PANEL - 1) / PANEL;
  const int64_t num_blocks = (product.num_rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
#pragma omp parallel for num_threads(threads) if (product.num_rows * product.inner * product.columns > SERIAL)
  for (int64_t task = 0; task < num_blocks * num_panels; ++task) {
    const int64_t first = task / num_panels * BLOCK_ROWS;
    multiply_panel(product, first, std::min(BLOCK_ROWS, product.num_rows - first), task % num_panels);
  }
}

}  // namespace

// Return how many columns are a panel.
extern "C" int64_t panel_columns() { return PANEL; }

// Return how many neighbours of a row are multiplied at once: the DEPTH of packed weights; 0: the processor has no
// instruction for this dtype. (Of those with AMX, oneDNN multiplies many rows by it, several times as fast.)
extern "C" int64_t panel_depth(int is_bfloat16) {
  if (!is_bfloat16) return Multiply<float>::DEPTH;
#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
  return Multiply<Bfloat16>::DEPTH;
#else
  return 0;
#endif
}

// rows: [num_rows, inner], `stride` elements apart; weights: packed, with zeros where there is no column; bias: [columns],
// or null; out: [num_rows, columns], contiguous. All are of float or bfloat16. inner is a multiple of the depth.
extern "C" void multiply_packed(const void* rows, int64_t num_rows, int64_t stride, int64_t inner, int64_t columns,
                                const void* weights, const void* bias, void* out, int is_bfloat16, int threads) {
  if (!is_bfloat16)
    return multiply(Product<float>{static_cast<const float*>(rows), num_rows, stride, inner, columns,
                                   static_cast<const float*>(weights), static_cast<const float*>(bias),
                                   static_cast<float*>(out)},
                    threads);
#if defined(__AVX512BF16__)
  multiply(Product<Bfloat16>{static_cast<const Bfloat16*>(rows), num_rows, stride, inner, columns,
                             static_cast<const Bfloat16*>(weights), static_cast<const Bfloat16*>(bias),
                             static_cast<Bfloat16*>(out)},
           threads);
#endif
}
