// Products of a few rows with a panel of columns, in registers: what this package's matrix kernels are made of.
//
// A panel is PANEL neighbouring columns of a matrix, [inner / DEPTH, PANEL, DEPTH], so that it lies in the order in
// which it is read, without a gap. ROWS rows and one panel are multiplied at a time; their sums fill the processor's
// registers, and each number of the panel that is read serves all rows.

#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#include "lanes.h"

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace {

constexpr int VECTORS = 2;                 // of a panel's columns
constexpr int PANEL = VECTORS * LANES;     // columns
constexpr int ROWS = LANES == 16 ? 8 : 6;  // with VECTORS they fill the registers

// Bytes by which a panel is fetched ahead of its use, at its end from the next one. A processor that fetches by itself stops
// at the end of a page, and one that waits for memory does not multiply. (One with narrow vectors reads a lone row's weights
// faster without: measured on Zen 3.)
constexpr int64_t AHEAD = 4096, LINE = 64;
constexpr int FETCHING_ROWS = LANES == 16 ? 1 : 2;  // fewer rows fetch nothing

// How a processor multiplies: DEPTH neighbours of a row with as many numbers of each of a vector's columns.
template <typename T>
struct Multiply;

template <>
struct Multiply<float> {
  static constexpr int DEPTH = 1;
  typedef Lanes Columns;
  typedef float Number;
  static inline Columns load(const float* panel) { return ::load(panel); }
  static inline Number broadcast(const float* row) { return *row; }
  static inline void add(Lanes& sum, Columns columns, Number number) { sum += columns * number; }
};

#if defined(__AVX512BF16__)
template <>
struct Multiply<Bfloat16> {
  static constexpr int DEPTH = 2;
  typedef __m512bh Columns;
  typedef __m512bh Number;
  static inline Columns load(const Bfloat16* panel) { return (Columns)_mm512_loadu_si512(panel); }
  static inline Number broadcast(const Bfloat16* row) {
    int32_t pair;
    std::memcpy(&pair, row, sizeof pair);
    return (Number)_mm512_set1_epi32(pair);
  }
  static inline void add(Lanes& sum, Columns columns, Number number) {
    sum = (Lanes)_mm512_dpbf16_ps((__m512)sum, columns, number);
  }
};
#endif

// Add the products of some rows with a piece of a panel to their sums, [rows, PANEL], or set the sums to them. length: of
// the piece. is_far: whether the panel is read from memory, and so has to be fetched.
// R numbers the rows, J the pairs of row and vector. (Packs, and not loops: a compiler keeps an array in registers
// only if its indices are constants.)
template <bool is_far, bool adds, typename T, size_t... R, size_t... J>
void add_block(const T* rows, int64_t stride, const T* panel, int64_t length, float* sums,
               std::index_sequence<R...>, std::index_sequence<J...>) {
  using By = Multiply<T>;
  Lanes total[] = {adds ? load(sums + J * LANES) : Lanes{}...};
  for (int64_t i = 0; i < length; i += By::DEPTH, panel += PANEL * By::DEPTH) {
    if constexpr (is_far && sizeof...(R) >= FETCHING_ROWS) {
      const char* ahead = reinterpret_cast<const char*>(panel) + AHEAD;
      for (size_t line = 0; line < VECTORS * sizeof(Lanes); line += LINE) __builtin_prefetch(ahead + line);
    }
    const typename By::Columns columns[] = {By::load(panel), By::load(panel + LANES * By::DEPTH)};
    const typename By::Number numbers[] = {By::broadcast(rows + R * stride + i)...};
    (By::add(total[J], columns[J % VECTORS], numbers[J / VECTORS]), ...);
  }
  (store(total[J], sums + J * LANES), ...);
}

// As `add_block`, for a number of rows that is not known in advance, of 1 to N.
template <int N, bool is_far, bool adds, typename T>
void add_some(int64_t num_rows, const T* rows, int64_t stride, const T* panel, int64_t length, float* sums) {
  if (num_rows == N)
    return add_block<is_far, adds>(rows, stride, panel, length, sums, std::make_index_sequence<N>(),
                                   std::make_index_sequence<N * VECTORS>());
  if constexpr (N > 1) add_some<N - 1, is_far, adds>(num_rows, rows, stride, panel, length, sums);
}

}  // namespace
