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

// Round to the tables' type.
template <typename T>
inline Lanes rounded(Lanes lanes) {
  if constexpr (std::is_same_v<T, float>) return lanes;
  T narrowed[LANES];
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

template <typename T>
inline Lanes take(const Lookup& lookup, const T* token) {
  if (lookup.base >= 0) return __builtin_shuffle(load(token + lookup.base), lookup.order);
  Lanes taken;
  for (int i = 0; i < LANES; ++i) taken[i] = widen(token[lookup.index[i]]);
  return taken;
}

// first: the first token of the first slot. distances: [count], from there, in elements; heads are adjacent.
// out: token_stride and head_stride elements between its tokens and heads.
template <typename T>
struct Tokens {
  const T* first;
  const int64_t* distances;
  int64_t count, heads, dim;
  T* out;
  int64_t token_stride, head_stride;
};

// The elements of a token that a rotation multiplies: `source` by cosines, `partner` by sines.
struct Rotation {
  int64_t width;                          // elements that are rotated; later ones are copied
  const int64_t *source, *partner;        // [width]
  std::vector<Lookup> sources, partners;  // of their whole vectors

  Rotation(int64_t width, const int64_t* source, const int64_t* partner, int64_t dim)
      : width(width), source(source), partner(partner) {
    for (int64_t j = 0; j + LANES <= width; j += LANES) {
      sources.push_back(lookup_of(source + j, dim));
      partners.push_back(lookup_of(partner + j, dim));
    }
  }
};

template <typename T>
void copy(const Tokens<T>& tokens, int threads) {
#pragma omp parallel for num_threads(threads) if (tokens.count * tokens.heads * tokens.dim > SERIAL)
  for (int64_t t = 0; t < tokens.count; ++t) {
    const T* token = tokens.first + tokens.distances[t];
    T* out = tokens.out + t * tokens.token_stride;
    for (int64_t h = 0; h < tokens.heads; ++h)
      std::memcpy(out + h * tokens.head_stride, token + h * tokens.dim, tokens.dim * sizeof(T));
  }
}

// Write the embedded elements of one head of a token.
template <typename T, typename F>
inline void embed_row(const T* token, const F* cosines, const F* sines, const Rotation& rotation, T* out) {
  const int64_t whole = rotation.sources.size() * LANES;
  for (int64_t j = 0; j < whole; j += LANES) {
    const Lanes by_cosine = rounded<F>(take(rotation.sources[j / LANES], token) * load(cosines + j));
    const Lanes by_sine = rounded<F>(take(rotation.partners[j / LANES], token) * load(sines + j));
    store(rounded<F>(by_cosine + by_sine), out + j);
  }
  for (int64_t j = whole; j < rotation.width; ++j) {
    F by_cosine, by_sine, sum;
    narrow(widen(token[rotation.source[j]]) * widen(cosines[j]), by_cosine);
    narrow(widen(token[rotation.partner[j]]) * widen(sines[j]), by_sine);
    narrow(widen(by_cosine) + widen(by_sine), sum);
    narrow(widen(sum), out[j]);
  }
}

template <typename T, typename F>
void embed(const Tokens<T>& tokens, const F* cosines, const F* sines, const Rotation& rotation, int threads) {
  const int64_t width = rotation.width;
#pragma omp parallel for num_threads(threads) if (tokens.count * tokens.heads * tokens.dim > SERIAL)
  for (int64_t t = 0; t < tokens.count; ++t) {
    for (int64_t h = 0; h < tokens.heads; ++h) {
      const T* token = tokens.first + tokens.distances[t] + h * tokens.dim;
      T* out = tokens.out + t * tokens.token_stride + h * tokens.head_stride;
      embed_row(token, cosines + t * width, sines + t * width, rotation, out);
      std::memcpy(out + width, token + width, (tokens.dim - width) * sizeof(T));
    }
  }
}

}  // namespace

// Load tokens as they are, of 2 or 4 bytes an element.
extern "C" void copy_tokens(const void* first, const int64_t* distances, int64_t count, int64_t heads, int64_t dim,
                            void* out, int64_t token_stride, int64_t head_stride, int item_bytes, int threads) {
  const auto as = [&](auto item) {
    using T = decltype(item);
    const Tokens<T> tokens{static_cast<const T*>(first), distances,    count,      heads, dim,
                           static_cast<T*>(out),         token_stride, head_stride};
    copy(tokens, threads);
  };
  item_bytes == 4 ? as(uint32_t()) : as(uint16_t());
}

// Load keys, and embed them. cosines, sines: [count, width]. source, partner: see Rotation. The keys are bfloat16, or
// else float, and so are the tables.
extern "C" void embed_tokens(const void* first, const int64_t* distances, int64_t count, int64_t heads, int64_t dim,
                             void* out, int64_t token_stride, int64_t head_stride, const void* cosines,
                             const void* sines, int64_t width, const int64_t* source, const int64_t* partner,
                             int is_bfloat16, int tables_are_bfloat16, int threads) {
  const Rotation rotation(width, source, partner, dim);
  const auto as = [&](auto item, auto factor) {
    using T = decltype(item);
    using F = decltype(factor);
    const Tokens<T> tokens{static_cast<const T*>(first), distances,    count,      heads, dim,
                           static_cast<T*>(out),         token_stride, head_stride};
    embed(tokens, static_cast<const F*>(cosines), static_cast<const F*>(sines), rotation, threads);
  };
  if (!is_bfloat16) return as(float(), float());
  tables_are_bfloat16 ? as(Bfloat16(), Bfloat16()) : as(Bfloat16(), float());
}
