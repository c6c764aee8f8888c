// Attention of several new tokens per sequence over its KV in place: the kernel of prefill on a CPU.
//
// A task is one key head's query heads and a block of new tokens: BLOCK rows of queries at most. It goes over the
// visible tokens by tiles of TILE tokens, whose keys and values are packed as panels (`panels.h`) once for all rows.
// Then, for a few rows at a time: scores, an online softmax, and the weighted sum of values. What no row of them sees
// is not computed. Tiles begin at multiples of TILE: a token's result depends on its own sequence alone, and not on
// how many tokens are computed with it.
//
// Sources: FlashAttention (Dao et al.) for the arithmetic; PagedAttention (vLLM, SOSP'23) for page tables.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "attention.h"
#include "panels.h"

namespace {

constexpr int64_t TILE = 256;        // tokens
constexpr int64_t BLOCK = 768;       // rows of queries, for which a tile is packed once
constexpr int64_t LEAST_BLOCK = 64;  // where there are more threads than larger blocks
constexpr int64_t SERIAL = 1 << 15;  // multiplications for which no other thread is woken

// heads: of queries. scale: more than 0. softcap: 0 if there is none.
// query: [tokens, heads, dim]; out: [tokens, heads, value_dim].
template <typename T>
struct Call {
  int64_t kv_heads, group, dim, value_dim;
  float scale, softcap;
  const float* sinks;
  const T* query;
  T* out;
  int64_t heads() const { return kv_heads * group; }
  int64_t value_panels() const { return (value_dim + PANEL - 1) / PANEL; }
};

// One key head's query heads, and new tokens [begin, end) of a part, whose first one is the call's `row`-th token.
struct Task {
  const Part* part;
  int64_t row, head, begin, end;
};

// The position of a part's new token, and the first one that it sees.
inline int64_t position_of(const Part& part, int64_t token) { return part.end - part.num_tokens + token; }
inline int64_t first_of(const Part& part, int64_t token) {
  return part.firsts ? reinterpret_cast<const int64_t*>(part.firsts)[token] : part.first;
}

// Copy tokens [begin, end) of a tile to panels of TILE tokens' keys, [TILE / PANEL, dim, PANEL].
template <typename T>
void pack_keys(const Task& task, const Call<T>& call, int64_t begin, int64_t end, T* panels) {
  constexpr int DEPTH = Multiply<T>::DEPTH;
  const Part& part = *task.part;
  const T* keys = reinterpret_cast<const T*>(part.keys) + task.head * part.key_head;
  for_each_run(part, begin, end - begin, [&](int64_t from, int64_t slot, int64_t length) {
    for (int64_t t = 0; t < length; ++t) {
      const int64_t column = begin % TILE + from + t;
      const T* key = keys + (slot + t) * part.key_token;
      T* target = panels + column / PANEL * PANEL * call.dim + column % PANEL * DEPTH;
      for (int64_t i = 0; i < call.dim; i += DEPTH) std::memcpy(target + i * PANEL, key + i, DEPTH * sizeof(T));
    }
  });
}

// Copy tokens [begin, end) of a tile to panels of their values, [value_dim / PANEL, TILE, PANEL].
template <typename T>
void pack_values(const Task& task, const Call<T>& call, int64_t begin, int64_t end, T* panels) {
  constexpr int DEPTH = Multiply<T>::DEPTH;
  const Part& part = *task.part;
  const T* values = reinterpret_cast<const T*>(part.values) + task.head * part.value_head;
  for_each_run(part, begin, end - begin, [&](int64_t from, int64_t slot, int64_t length) {
    for (int64_t t = 0; t < length; ++t) {
      const int64_t inner = begin % TILE + from + t;
      const T* value = values + (slot + t) * part.value_token;
      for (int64_t i = 0; i < call.value_dim; i += LANES) {  // which value_dim is a multiple of
        T* target = panels + i / PANEL * PANEL * TILE + inner / DEPTH * DEPTH * PANEL + i % PANEL * DEPTH;
        for (int64_t lane = 0; lane < LANES; ++lane) target[lane * DEPTH + inner % DEPTH] = value[i + lane];
      }
    }
  });
}

// The running softmax of a row.
struct Softmax {
  float most = NOTHING, sum = 0.0f;
};

// Call visit(column, offset of its scores) for each vector of columns.
template <typename Visit>
inline void for_each_vector(int64_t num_panels, Visit visit) {
#pragma GCC unroll 2
  for (int64_t p = 0; p < num_panels; ++p)
    for (int64_t c = 0; c < PANEL; c += LANES) visit(p * PANEL + c, p * ROWS * PANEL + c);
}

// Turn a row's scores of a tile to weights; columns outside of [begin, end) are not seen.
// scores: [panels, ROWS, PANEL], of the row's first panel, are used up; weights: [TILE]. Returns the factor of what was
// summed up.
template <typename T>
float weigh(float* scores, const Call<T>& call, int64_t begin, int64_t end, int64_t num_panels, Softmax& row,
            T* weights) {
  if (begin >= end) {
    std::fill(weights, weights + num_panels * PANEL, T{});
    return 1.0f;
  }
  float scale = call.scale;
  if (call.softcap > 0) {
    for_each_vector(num_panels, [&](int64_t, int64_t at) {
      store(capped(load(scores + at) * scale, call.softcap), scores + at);
    });
    scale = 1.0f;
  }
  if (begin > 0 || end < num_panels * PANEL)
    for_each_vector(num_panels, [&](int64_t first, int64_t at) {
      if (first >= begin && first + LANES <= end) return;
      Ints column;
      for (int i = 0; i < LANES; ++i) column[i] = int32_t(first + i);
      const auto is_seen = (column >= int32_t(begin)) & (column < int32_t(end));
      store(is_seen ? load(scores + at) : all(NOTHING), scores + at);
    });
  Lanes largest = all(NOTHING), sums = {};
  for_each_vector(num_panels, [&](int64_t, int64_t at) { largest = larger(largest, load(scores + at)); });
  const float most = std::max(row.most, largest_of(largest) * scale);
  const Lanes factor = all(scale * LOG2_E), least = all(most * LOG2_E);
  for_each_vector(num_panels, [&](int64_t first, int64_t at) {
    const Lanes weight = exp2_of(load(scores + at) * factor - least);
    sums += weight;
    store(weight, weights + first);
  });
  const float fade = exp_of(row.most - most);
  row.most = most;
  row.sum = row.sum * fade + sum_of(sums);
  return fade;
}

template <typename T>
void attend_block(const Task& task, const Call<T>& call) {
  constexpr int DEPTH = Multiply<T>::DEPTH;
  const Part& part = *task.part;
  const int64_t dim = call.dim, group = call.group, num_rows = (task.end - task.begin) * group;
  const int64_t value_panels = call.value_panels(), sums_size = value_panels * ROWS * PANEL;  // of ROWS rows
  std::vector<T> queries(num_rows * dim), keys(TILE * dim), values(value_panels * PANEL * TILE), weights(ROWS * TILE);
  std::vector<float> sums((num_rows + ROWS - 1) / ROWS * sums_size), scores(ROWS * TILE);
  std::vector<Softmax> softmax(num_rows);
  const auto offset_of = [&](int64_t row) {  // of a query head in the call's tensors, in heads
    return (task.row + row / group) * call.heads() + task.head * group + row % group;
  };
  for (int64_t r = 0; r < num_rows; ++r)
    std::memcpy(queries.data() + r * dim, call.query + offset_of(r) * dim, dim * sizeof(T));
  const int64_t first = first_of(part, task.begin), end = position_of(part, task.end - 1) + 1;
  for (int64_t tile = first / TILE * TILE; tile < end; tile += TILE) {
    const int64_t from = std::max(tile, first), to = std::min(tile + TILE, end);
    if (to - from < TILE)  // what is not seen has the weight 0, and must be a number
      std::fill(values.begin(), values.end(), T{});
    pack_keys(task, call, from, to, keys.data());
    pack_values(task, call, from, to, values.data());
    for (int64_t r = 0; r < num_rows; r += ROWS) {
      const int64_t some = std::min<int64_t>(ROWS, num_rows - r);
      const int64_t last_token = task.begin + (r + some - 1) / group;
      const int64_t num_columns = std::min(TILE, position_of(part, last_token) + 1 - tile);
      if (num_columns <= 0 || first_of(part, task.begin + r / group) >= tile + TILE) continue;
      const int64_t num_panels = (num_columns + PANEL - 1) / PANEL;
      for (int64_t p = 0; p < num_panels; ++p)
        add_some<ROWS, false, false>(some, queries.data() + r * dim, dim, keys.data() + p * PANEL * dim, dim,
                                     scores.data() + p * ROWS * PANEL);
      float* const totals = sums.data() + r / ROWS * sums_size;
      for (int64_t i = 0; i < some; ++i) {
        const int64_t token = task.begin + (r + i) / group;
        const int64_t seen_from = std::max<int64_t>(0, first_of(part, token) - tile);
        const int64_t seen_to = std::min(TILE, position_of(part, token) + 1 - tile);
        const float fade = weigh(scores.data() + i * PANEL, call, seen_from, seen_to, num_panels, softmax[r + i],
                                 weights.data() + i * TILE);
        if (fade != 1.0f)
          for (int64_t p = 0; p < value_panels; ++p)
            for (int64_t c = 0; c < PANEL; c += LANES) {
              float* total = totals + (p * ROWS + i) * PANEL + c;
              store(load(total) * fade, total);
            }
      }
      for (int64_t p = 0; p < value_panels; ++p)
        add_some<ROWS, false, true>(some, weights.data(), TILE, values.data() + p * PANEL * TILE,
                                    (num_columns + DEPTH - 1) / DEPTH * DEPTH, totals + p * ROWS * PANEL);
    }
  }
  for (int64_t r = 0; r < num_rows; ++r) {  // a sink takes weight, but has no value
    const float* sink = call.sinks ? call.sinks + task.head * group + r % group : nullptr;
    const float most = sink ? std::max(softmax[r].most, *sink) : softmax[r].most;
    const float fade = exp_of(softmax[r].most - most);
    const float weight = softmax[r].sum * fade + (sink ? exp_of(*sink - most) : 0.0f);
    const float* totals = sums.data() + r / ROWS * sums_size + r % ROWS * PANEL;
    T* out = call.out + offset_of(r) * call.value_dim;
    for (int64_t i = 0; i < call.value_dim; ++i)
      narrow(totals[i / PANEL * ROWS * PANEL + i % PANEL] * fade / weight, out[i]);
  }
}

// Divide a call into tasks of `block` rows at most.
template <typename T>
std::vector<Task> divide(const Part* parts, int64_t num_parts, const Call<T>& call, int64_t block) {
  std::vector<Task> tasks;
  const int64_t block_tokens = std::max<int64_t>(1, block / call.group);
  int64_t row = 0;
  for (const Part* part = parts; part < parts + num_parts; ++part) {
    for (int64_t head = 0; head < call.kv_heads; ++head)
      for (int64_t begin = 0; begin < part->num_tokens; begin += block_tokens)
        tasks.push_back({part, row + begin, head, begin, std::min(begin + block_tokens, part->num_tokens)});
    row += part->num_tokens;
  }
  return tasks;
}

template <typename T>
void attend(const Part* parts, int64_t num_parts, const Call<T>& call, int threads) {
  int64_t work = 0, block = BLOCK;
  for (const Part* part = parts; part < parts + num_parts; ++part)
    work += part->num_tokens * (part->end - part->first) * call.heads() * call.dim;
  std::vector<Task> tasks = divide(parts, num_parts, call, block);
  while (threads > 1 && block > LEAST_BLOCK && int64_t(tasks.size()) < 3 * threads)
    tasks = divide(parts, num_parts, call, block /= 2);
#pragma omp parallel for num_threads(threads) schedule(dynamic) if (work > SERIAL)
  for (size_t t = 0; t < tasks.size(); ++t) attend_block(tasks[t], call);
}

}  // namespace

// query: [tokens, kv_heads * group, dim], the parts' new tokens one after another; out: [tokens, kv_heads * group,
// value_dim]; both contiguous, of float or bfloat16, as keys and values are; bfloat16 if `panel_depth` has it. dim and
// value_dim are multiples of 16. sinks: [kv_heads * group] float, or null.
extern "C" void attend_prefill(const Part* parts, int64_t num_parts, int64_t kv_heads, int64_t group, int64_t dim,
                               int64_t value_dim, float scale, float softcap, const float* sinks, const void* query,
                               void* out, int is_bfloat16, int threads) {
  if (!is_bfloat16)
    return attend(parts, num_parts,
                  Call<float>{kv_heads, group, dim, value_dim, scale, softcap, sinks,
                              static_cast<const float*>(query), static_cast<float*>(out)},
                  threads);
#if defined(__AVX512BF16__)
  attend(parts, num_parts,
         Call<Bfloat16>{kv_heads, group, dim, value_dim, scale, softcap, sinks, static_cast<const Bfloat16*>(query),
                        static_cast<Bfloat16*>(out)},
         threads);
#endif
}
