// What the attention kernels have in common: where a sequence's KV lies, and the arithmetic of softmax.

#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <utility>

#include "kernels.h"
#include "lanes.h"

namespace {

constexpr float NOTHING = -std::numeric_limits<float>::infinity();  // a score that is not seen

typedef int32_t Ints __attribute__((vector_size(LANES * sizeof(float))));

inline Lanes larger(Lanes a, Lanes b) { return a > b ? a : b; }
inline Lanes all(float number) { return number - Lanes{}; }

// Combine all lanes to one number: each step joins those whose indices differ in one bit.
template <int BIT, size_t... I>
inline Lanes swapped(Lanes x, std::index_sequence<I...>) {
  return __builtin_shuffle(x, Ints{int32_t(I ^ BIT)...});
}
template <int BIT = LANES / 2, typename Join>
inline float joined(Lanes x, Join join) {
  const Lanes other = swapped<BIT>(x, std::make_index_sequence<LANES>());
  if constexpr (BIT > 1) return joined<BIT / 2>(join(x, other), join);
  return join(x, other)[0];
}
inline float largest_of(Lanes x) { return joined(x, larger); }
inline float sum_of(Lanes x) { return joined(x, [](Lanes a, Lanes b) { return a + b; }); }

constexpr float LOG2_E = 1.44269504f;

// 2^x for x <= 0, to about 2 units in the last place: 2^n 2^r with r in [-1/2, 1/2]. 0 if it is no normal float, 1 for 0.
inline Lanes exp2_of(Lanes x) {
  const Lanes t = larger(x, all(-127.0f));
  const Lanes rounded = t + 12582912.0f;  // so large a number has no digits left behind the point
  const Lanes r = t - (rounded - 12582912.0f);
  Lanes p = all(1.5345811824e-4f);  // a polynomial that is the nearest to 2^r
  p = p * r + 1.3399931218e-3f;
  p = p * r + 9.6184889578e-3f;
  p = p * r + 5.5503287770e-2f;
  p = p * r + 2.4022646891e-1f;
  p = p * r + 6.9314720574e-1f;
  p = p * r + 1.0f;
  return p * (Lanes)(((Bits)rounded << 23) + (127u << 23));  // 2^n by its bits, which are 0 for n = -127
}
inline Lanes exp_of(Lanes x) { return exp2_of(x * LOG2_E); }
inline float exp_of(float x) { return exp_of(all(x))[0]; }

inline Lanes capped(Lanes x, float softcap) {  // softcap * tanh(x / softcap)
  const Lanes twice = x * (2.0f / softcap);
  const Lanes e = exp_of(twice < Lanes{} ? twice : -twice);
  const Lanes size = softcap * (1.0f - e) / (1.0f + e);
  return twice < Lanes{} ? -size : size;
}

// Call visit(offset in the tile, slot, number of tokens) for each run of tokens that lie side by side.
template <typename Visit>
inline void for_each_run(const Part& part, int64_t tile, int64_t count, Visit visit) {
  if (!part.pages) return visit(0, tile, count);
  const int32_t* pages = reinterpret_cast<const int32_t*>(part.pages);
  for (int64_t done = 0; done < count;) {
    const int64_t number = (tile + done) / part.page_tokens, offset = (tile + done) % part.page_tokens;
    const int64_t length = std::min(count - done, part.page_tokens - offset);
    visit(done, pages[number] * part.page_tokens + offset, length);
    done += length;
  }
}

}  // namespace
