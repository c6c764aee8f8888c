// Loads tokens: copies them out of slots to where a sequence has them, and embeds keys on the way.
//
//     out[j] = token[source[j]] * cosines[j] + token[partner[j]] * sines[j]      for the first `width` elements
//
// Each element is read and written once. Both products are rounded to the tables' type, then their sum, then the
// result to the tokens' type, as torch does it: a fused multiply-add would differ in the last bit.
//
// `source` and `partner` are permutations. Where LANES neighbours of one come from elements that are no further than
// LANES apart, they are a vector of the token, shuffled; so are halves and interleaved pairs. Others are taken one by
// one.

#pragma GCC optimize("fp-contract=off")

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "lanes.h"

namespace {

constexpr int64_t SERIAL = 1 << 17;  // elements for which no other thread is woken

typedef int32_t Order __attribute__((vector_size(LANES * sizeof(float))));

// The tokens of one component; `token_kernel.py` fills it in, field by field. Distances and strides are in elements.
struct Copy {
  const char* slots;                             // the first token of slot 0; its heads are adjacent
  const int64_t* distances;                      // [count], of each token from it
  char* out;
  const int64_t* rows;                           // [count], where each token goes; null: in order
  int64_t count, heads, dim, row_stride, head_stride;
  int64_t item_bytes;                            // 2 or 4; keys of two bytes are bfloat16
  const void *cosines, *sines;                   // [count, width]; null: tokens are copied as they are
  int64_t factor_bytes;                          // of the tables: 2, bfloat16, or 4
  int64_t width;                                 // elements that are rotated; later ones are copied
  const int64_t *source, *partner;               // [width], the elements that cosines and sines multiply

  const char* token(int64_t t, int64_t head) const { return slots + (distances[t] + head * dim) * item_bytes; }
  char* target(int64_t t, int64_t head) const {
    return out + ((rows ? rows[t] : t) * row_stride + head * head_stride) * item_bytes;
  }
  bool is_large() const { return count * heads * dim > SERIAL; }
};

// Round to the tables' type.
template <typename F>
inline Lanes rounded(Lanes lanes) {
  if constexpr (std::is_same_v<F, float>) return lanes;
  F narrowed[LANES];
  store(lanes, narrowed);
  return load(narrowed);
}

// Where LANES neighbouring elements of a result are in a token.
struct Lookup {
  int64_t base;          // the vector of the token that has them; -1: they are further apart
  Order order;           // their places in it
  const int64_t* index;  // their elements
};

Lookup lookup_of(const int64_t* index, int64_t dim) {
  const auto [least, most] = std::minmax_element(index, index + LANES);
  Lookup lookup{*most - *least < LANES ? std::min(*least, dim - LANES) : -1, {}, index};
  for (int i = 0; i < LANES && lookup.base >= 0; ++i) lookup.order[i] = int32_t(index[i] - lookup.base);
  return lookup;
}

std::vector<Lookup> lookups_of(const int64_t* index, const Copy& copy) {
  std::vector<Lookup> lookups;
  for (int64_t j = 0; j + LANES <= copy.width; j += LANES) lookups.push_back(lookup_of(index + j, copy.dim));
  return lookups;
}

template <typename T>
inline Lanes take(const Lookup& lookup, const T* token) {
  if (lookup.base >= 0) return __builtin_shuffle(load(token + lookup.base), lookup.order);
  Lanes taken;
  for (int i = 0; i < LANES; ++i) taken[i] = widen(token[lookup.index[i]]);
  return taken;
}

void copy_tokens(const Copy& copy, int threads) {
#pragma omp parallel for num_threads(threads) if (copy.is_large())
  for (int64_t t = 0; t < copy.count; ++t)
    for (int64_t h = 0; h < copy.heads; ++h)
      std::memcpy(copy.target(t, h), copy.token(t, h), copy.dim * copy.item_bytes);
}

// Copy tokens of type T, and embed them by tables of type F.
template <typename T, typename F>
void embed_tokens(const Copy& copy, int threads) {
  const std::vector<Lookup> sources = lookups_of(copy.source, copy), partners = lookups_of(copy.partner, copy);
  const int64_t width = copy.width, whole = sources.size() * LANES;
#pragma omp parallel for num_threads(threads) if (copy.is_large())
  for (int64_t t = 0; t < copy.count; ++t) {
    const F* cosines = static_cast<const F*>(copy.cosines) + t * width;
    const F* sines = static_cast<const F*>(copy.sines) + t * width;
    for (int64_t h = 0; h < copy.heads; ++h) {
      const T* token = reinterpret_cast<const T*>(copy.token(t, h));
      T* out = reinterpret_cast<T*>(copy.target(t, h));
      for (int64_t j = 0; j < whole; j += LANES) {
        const Lanes by_cosine = rounded<F>(take(sources[j / LANES], token) * load(cosines + j));
        const Lanes by_sine = rounded<F>(take(partners[j / LANES], token) * load(sines + j));
        store(rounded<F>(by_cosine + by_sine), out + j);
      }
      for (int64_t j = whole; j < width; ++j) {
        F by_cosine, by_sine, sum;
        narrow(widen(token[copy.source[j]]) * widen(cosines[j]), by_cosine);
        narrow(widen(token[copy.partner[j]]) * widen(sines[j]), by_sine);
        narrow(widen(by_cosine) + widen(by_sine), sum);
        narrow(widen(sum), out[j]);
      }
      std::memcpy(out + width, token + width, (copy.dim - width) * sizeof(T));
    }
  }
}

}  // namespace

extern "C" void load_tokens(const Copy* copies, int64_t num_copies, int threads) {
  for (const Copy* copy = copies; copy < copies + num_copies; ++copy) {
    if (!copy->cosines) copy_tokens(*copy, threads);
    else if (copy->item_bytes == 4) embed_tokens<float, float>(*copy, threads);
    else if (copy->factor_bytes == 4) embed_tokens<Bfloat16, float>(*copy, threads);
    else embed_tokens<Bfloat16, Bfloat16>(*copy, threads);
  }
}
