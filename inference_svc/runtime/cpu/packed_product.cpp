// Products of rows with packed weights: a model's linear layers on a CPU.
//
// Packed weights are panels of columns (`panels.h`). Each weight that is read serves all rows of a block: a product of
// few rows takes as long as its weights take to be read. More rows are taken BLOCK_ROWS at a time, and `inner` a block at
// a time, while the weights of a panel stay in a cache. An element's sum always goes over `inner` in the same order:
// neither other rows nor the number of threads change its bits.
//
// Sources: GotoBLAS (Goto and van de Geijn, 2008) for panels and blocks.

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "kernels.h"
#include "panels.h"

namespace {

constexpr int64_t BLOCK_ROWS = 256;
constexpr int64_t BLOCK_INNER = 2048;         // with PANEL it is a part of the second cache
constexpr int64_t FEW_ROWS = 64;              // fewer take blocks of FEW_INNER: a part of the first cache
constexpr int64_t FEW_INNER = 64;
constexpr int64_t SERIAL = 1 << 18;           // multiplications for which no other thread is woken

// rows: [num_rows, inner]. bias: [columns], or null. out: [num_rows, columns].
template <typename T>
struct Product {
  const T* rows;
  int64_t num_rows, inner, columns;
  const T* weights;
  const T* bias;
  T* out;
};

// Compute the product of rows [first, first + num_rows), of which there are BLOCK_ROWS at most, with one panel.
template <typename T>
void multiply_panel(const Product<T>& product, int64_t first, int64_t num_rows, int64_t panel) {
  const int64_t column = panel * PANEL, num_columns = std::min<int64_t>(PANEL, product.columns - column);
  const T* weights = product.weights + column * product.inner;
  float bias[PANEL] = {}, sums[BLOCK_ROWS * PANEL];
  for (int64_t c = 0; product.bias && c < num_columns; ++c) bias[c] = widen(product.bias[column + c]);
  for (int64_t r = 0; r < num_rows; ++r) std::memcpy(sums + r * PANEL, bias, sizeof bias);
  // Few rows wait for memory: in short blocks it is always read, also while rows multiply with what has been read.
  const int64_t block = num_rows < FEW_ROWS ? FEW_INNER : BLOCK_INNER;
  for (int64_t begin = 0; begin < product.inner; begin += block) {
    const int64_t length = std::min(block, product.inner - begin);
    for (int64_t r = 0; r < num_rows; r += ROWS) {
      add_some<ROWS, true, true>(std::min<int64_t>(ROWS, num_rows - r),
                                 product.rows + (first + r) * product.inner + begin, product.inner,
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

// rows: [num_rows, inner]; weights: packed, with zeros where there is no column; bias: [columns], or null; out:
// [num_rows, columns]. All are contiguous, of float or bfloat16. inner is a multiple of the depth.
extern "C" void multiply_packed(const void* rows, int64_t num_rows, int64_t inner, int64_t columns, const void* weights,
                                const void* bias, void* out, int is_bfloat16, int threads) {
  if (!is_bfloat16)
    return multiply(Product<float>{static_cast<const float*>(rows), num_rows, inner, columns,
                                   static_cast<const float*>(weights), static_cast<const float*>(bias),
                                   static_cast<float*>(out)},
                    threads);
#if defined(__AVX512BF16__)
  multiply(Product<Bfloat16>{static_cast<const Bfloat16*>(rows), num_rows, inner, columns,
                             static_cast<const Bfloat16*>(weights), static_cast<const Bfloat16*>(bias),
                             static_cast<Bfloat16*>(out)},
           threads);
#endif
}
