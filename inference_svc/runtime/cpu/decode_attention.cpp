// Attention of one new token per sequence over its KV in place: the kernel of decode steps on a CPU.
//
// For one layer it takes all sequences of a step in one call. A sequence's visible tokens are divided into
// splits of SPLIT tokens; each (sequence, key head, split) is a task, and the query heads that share a key head
// are computed together, so that keys and values are read from memory once. A split goes by tiles of TILE
// tokens: scores, then an online softmax, then the weighted sum of values. Splits are merged in the end. A
// sequence's result depends on this sequence alone: neither the other sequences nor the number of threads
// change how it is divided. The new tokens may be written here, too, before they attend.
//
// Sources: FlashAttention and Flash-Decoding (Dao et al.) for the arithmetic; PagedAttention (vLLM, SOSP'23) for
// page tables.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "attention.h"

namespace {

constexpr int TOKENS = 4;                // a block of scores is of so many tokens
constexpr int HEADS = LANES / TOKENS;    // and so many query heads: together they fill one vector
constexpr int64_t SPLIT = 1024;          // tokens
constexpr int64_t TILE = 128;            // tokens; small enough that what is read stays in a cache
constexpr int64_t ROW = TILE + LANES;    // scores of a query head: blocks may be longer than their tile
constexpr int64_t AHEAD = 2 * TOKENS;    // tokens: how far ahead keys are fetched
constexpr int64_t SERIAL = 1 << 15;      // elements of keys for which no other thread is woken

// group: query heads that share a key head. softcap: 0 if there is none.
struct Call {
  int64_t kv_heads, group, dim, value_dim;
  float scale, softcap;
  int64_t rows() const { return (group + HEADS - 1) / HEADS * HEADS; }  // query heads, in whole blocks
  int64_t result_size() const { return 2 + value_dim; }                 // of a query head: see attend_split
  int64_t task_size() const { return rows() * result_size(); }
};

template <typename T>
inline void fetch(const T* row, int64_t size) {  // into the first cache; harmless behind the end of memory
  for (int64_t i = 0; i < size; i += 64 / sizeof(T)) __builtin_prefetch(row + i);
}

// Add neighbouring pieces of HALF lanes: of 2n pieces in two vectors become n in one.
template <int HALF, size_t... I>
inline Lanes fold(Lanes a, Lanes b, std::index_sequence<I...>) {
  return __builtin_shuffle(a, b, Ints{int32_t(I / HALF * 2 * HALF + I % HALF)...}) +
         __builtin_shuffle(a, b, Ints{int32_t(I / HALF * 2 * HALF + I % HALF + HALF)...});
}

// Return a vector with the sum of vectors[i] in lane reversed(i); `reversed` reverses an index's bits.
template <int N>
inline Lanes sums_of(Lanes (&vectors)[LANES]) {
  for (int i = 0; i < N / 2; ++i)
    vectors[i] = fold<N / 2>(vectors[i], vectors[i + N / 2], std::make_index_sequence<LANES>());
  if constexpr (N > 2) return sums_of<N / 2>(vectors);
  return vectors[0];
}

constexpr int reversed(int index) {
  int result = 0;
  for (int bit = 1; bit < LANES; bit *= 2) result = result * 2 + (index & bit ? 1 : 0);
  return result;
}

// Compute scores of TOKENS tokens and HEADS query heads; [HEADS, TOKENS] in a vector.
// keys: of each token; queries: [HEADS, dim]. J numbers the pairs of head and token. (Packs, and not loops: a
// compiler keeps an array in registers only if its indices are constants.)
template <typename T, size_t... J>
inline Lanes score(const T* const (&keys)[TOKENS], const float* queries, int64_t dim, std::index_sequence<J...>) {
  Lanes products[LANES] = {};
  for (int64_t i = 0; i < dim; i += LANES) {
    const Lanes key[TOKENS] = {load(keys[0] + i), load(keys[1] + i), load(keys[2] + i), load(keys[3] + i)};
    ((products[reversed(J)] += load(queries + J / TOKENS * dim + i) * key[J % TOKENS]), ...);
  }
  return sums_of<LANES>(products);
}

// Add weighted values of a tile's tokens to the sums of HEADS query heads, for N vectors of their elements.
// weights: [HEADS, ROW]; sums: of the first head, `stride` to the next one. J numbers the pairs of head and vector.
template <size_t N, typename T, size_t... J>
inline void add_values(const T* values, int64_t token_stride, int64_t count, const float* weights, float* sums,
                       int64_t stride, std::index_sequence<J...>) {
  Lanes total[] = {load(sums + J / N * stride + J % N * LANES)...};
  for (int64_t t = 0; t < count; ++t, values += token_stride)
    ((total[J] += weights[J / N * ROW + t] * load(values + J % N * LANES)), ...);
  (store(total[J], sums + J / N * stride + J % N * LANES), ...);
}

// Attend one key head's query heads to tokens [begin, end).
// query: [group, dim]. results: for each query head, rounded up to whole blocks: greatest score, sum of weights,
// [value_dim] weighted sum of values.
template <typename T>
void attend_split(const Part& part, const Call& call, const T* query, int64_t head, int64_t begin, int64_t end,
                  float* results) {
  const int64_t dim = call.dim, value_dim = call.value_dim, size = call.result_size(), rows = call.rows();
  const T* keys = reinterpret_cast<const T*>(part.keys) + head * part.key_head;
  const T* values = reinterpret_cast<const T*>(part.values) + head * part.value_head;
  std::vector<float> memory(rows * (dim + ROW), 0.0f);
  float* queries = memory.data();        // [rows, dim], scaled; missing heads are 0
  float* scores = queries + rows * dim;  // [rows, ROW]
  for (int64_t i = 0; i < call.group * dim; ++i) queries[i] = widen(query[i]) * call.scale;
  std::fill(results, results + rows * size, 0.0f);
  for (int64_t h = 0; h < rows; ++h) results[h * size] = NOTHING;
  for (int64_t tile = begin; tile < end; tile += TILE) {
    const int64_t count = std::min(TILE, end - tile);
    for_each_run(part, tile, count, [&](int64_t from, int64_t slot, int64_t length) {
      for (int64_t t = 0; t < length; t += TOKENS) {
        const T* block[TOKENS];  // behind the last token it is repeated, for scores that are overwritten
        for (int u = 0; u < TOKENS; ++u) {
          const int64_t place = slot + std::min(t + u, length - 1);
          block[u] = keys + place * part.key_token;
          // With two places that are read in turns, the processor does not foresee which lines come next.
          fetch(block[u] + AHEAD * part.key_token, dim);
          fetch(values + place * part.value_token, value_dim);
        }
        for (int64_t h = 0; h < rows; h += HEADS) {
          float found[LANES];
          store(score(block, queries + h * dim, dim, std::make_index_sequence<LANES>()), found);
          for (int u = 0; u < HEADS; ++u)
            std::memcpy(scores + (h + u) * ROW + from + t, found + u * TOKENS, TOKENS * sizeof(float));
        }
      }
    });
    for (int64_t h = 0; h < call.group; ++h) {
      float* row = scores + h * ROW;
      float* result = results + h * size;
      if (call.softcap > 0)
        for (int64_t t = 0; t < count; t += LANES) store(capped(load(row + t), call.softcap), row + t);
      std::fill(row + count, row + ROW, NOTHING);
      Lanes largest = all(result[0]), sums = {};
      for (int64_t t = 0; t < count; t += LANES) largest = larger(largest, load(row + t));
      const float most = std::max(result[0], largest_of(largest));
      for (int64_t t = 0; t < count; t += LANES) {
        const Lanes weights = exp_of(load(row + t) - most);
        store(weights, row + t);
        sums += weights;
      }
      const float fade = exp_of(result[0] - most);  // for what was added before this tile
      result[0] = most;
      result[1] = result[1] * fade + sum_of(sums);
      if (fade != 1.0f)
        for (int64_t i = 0; i < value_dim; i += LANES) store(load(result + 2 + i) * fade, result + 2 + i);
    }
    for_each_run(part, tile, count, [&](int64_t from, int64_t slot, int64_t length) {
      const T* run = values + slot * part.value_token;
      for (int64_t h = 0; h < rows; h += HEADS) {
        const float* weights = scores + h * ROW + from;
        float* sums = results + h * size + 2;
        int64_t i = 0;
        for (; i + 4 * LANES <= value_dim; i += 4 * LANES)
          add_values<4>(run + i, part.value_token, length, weights, sums + i, size,
                        std::make_index_sequence<HEADS * 4>());
        for (; i < value_dim; i += LANES)
          add_values<1>(run + i, part.value_token, length, weights, sums + i, size, std::make_index_sequence<HEADS>());
      }
    });
  }
}

// Merge the splits of one query head; a sink takes weight, but has no value.
template <typename T>
void merge(const Call& call, const float* results, int64_t num_splits, int64_t stride, const float* sink, T* out) {
  float most = sink ? *sink : NOTHING;
  for (int64_t s = 0; s < num_splits; ++s) most = std::max(most, results[s * stride]);
  std::vector<float> sums(call.value_dim, 0.0f);
  float weight = sink ? exp_of(*sink - most) : 0.0f;
  for (int64_t s = 0; s < num_splits; ++s) {
    const float* result = results + s * stride;
    const float fade = exp_of(result[0] - most);
    weight += fade * result[1];
    for (int64_t i = 0; i < call.value_dim; ++i) sums[i] += fade * result[2 + i];
  }
  for (int64_t i = 0; i < call.value_dim; ++i) narrow(sums[i] / weight, out[i]);
}

template <typename T>
void attend(const Part* parts, int64_t num_parts, const Call& call, const T* query, const float* sinks,
            float* scratch, T* out, int threads) {
  struct Task {
    int64_t part, head, begin, end;
  };
  std::vector<Task> tasks;
  std::vector<int64_t> firsts;  // by part, its first task
  int64_t work = 0;             // elements of keys
  for (int64_t p = 0; p < num_parts; ++p) {
    work += (parts[p].end - parts[p].first) * call.kv_heads * call.dim;
    firsts.push_back(int64_t(tasks.size()));
    for (int64_t head = 0; head < call.kv_heads; ++head)
      for (int64_t begin = parts[p].first; begin < parts[p].end; begin += SPLIT)
        tasks.push_back({p, head, begin, std::min(begin + SPLIT, parts[p].end)});
  }
  firsts.push_back(int64_t(tasks.size()));
  const int64_t heads = call.kv_heads * call.group, stride = call.task_size();
#pragma omp parallel num_threads(threads) if (work > SERIAL)
  {
#pragma omp for schedule(dynamic)
    for (size_t t = 0; t < tasks.size(); ++t) {
      const Task& task = tasks[t];
      const T* rows = query + (task.part * heads + task.head * call.group) * call.dim;
      attend_split(parts[task.part], call, rows, task.head, task.begin, task.end, scratch + int64_t(t) * stride);
    }
#pragma omp for
    for (int64_t row = 0; row < num_parts * heads; ++row) {
      const int64_t p = row / heads, head = row % heads;
      const int64_t num_splits = (firsts[p + 1] - firsts[p]) / call.kv_heads;
      const float* results =
          scratch + (firsts[p] + head / call.group * num_splits) * stride + head % call.group * call.result_size();
      merge(call, results, num_splits, stride, sinks ? sinks + head : nullptr, out + row * call.value_dim);
    }
  }
}

// Copy the row of the token with this index.
template <typename T>
void copy_row(const NewRows& rows, int64_t index, int64_t kv_heads, T* target, int64_t head_stride) {
  const T* row = static_cast<const T*>(rows.first) + index * rows.token;
  for (int64_t head = 0; head < kv_heads; ++head)
    std::memcpy(target + head * head_stride, row + head * rows.head, rows.size * sizeof(T));
}

template <typename T>
void write(const Part* parts, int64_t num_parts, int64_t kv_heads, const NewRows& key, const NewRows& value,
           const NewRows& unrotated_key, const NewRows& unrotated_value) {
  for (int64_t p = 0; p < num_parts; ++p) {
    const Part& part = parts[p];
    for_each_run(part, part.end - 1, 1, [&](int64_t, int64_t slot, int64_t) {
      copy_row(key, p, kv_heads, reinterpret_cast<T*>(part.keys) + slot * part.key_token, part.key_head);
      copy_row(value, p, kv_heads, reinterpret_cast<T*>(part.values) + slot * part.value_token, part.value_head);
    });
    if (!part.key_row) continue;
    copy_row(unrotated_key, p, kv_heads, reinterpret_cast<T*>(part.key_row), unrotated_key.size);
    copy_row(unrotated_value, p, kv_heads, reinterpret_cast<T*>(part.value_row), unrotated_value.size);
  }
}

}  // namespace

// Write one layer's new tokens, one of each part: as attention reads them to the part's last position, and as they are
// before RoPE to its write buffer. All are of float or bfloat16. Nothing here can fail.
extern "C" void write_tokens(const Part* parts, int64_t num_parts, int64_t kv_heads, const NewRows* key,
                             const NewRows* value, const NewRows* unrotated_key, const NewRows* unrotated_value,
                             int is_bfloat16) {
  const auto write_rows = is_bfloat16 ? write<Bfloat16> : write<float>;
  write_rows(parts, num_parts, kv_heads, *key, *value, *unrotated_key, *unrotated_value);
}

// Return how many floats of scratch memory `attend_decode` needs for these parts.
extern "C" int64_t scratch_size(const Part* parts, int64_t num_parts, int64_t kv_heads, int64_t group,
                                int64_t value_dim) {
  int64_t num_splits = 0;
  for (int64_t p = 0; p < num_parts; ++p) num_splits += (parts[p].end - parts[p].first + SPLIT - 1) / SPLIT;
  return num_splits * kv_heads * Call{kv_heads, group, 0, value_dim, 0, 0}.task_size();
}

// query: [parts, kv_heads * group, dim]; out: [parts, kv_heads * group, value_dim]; both contiguous, of float or
// bfloat16, as keys and values are. dim and value_dim are multiples of 16. sinks: [kv_heads * group] float, or null.
// scratch: as above. Nothing here can fail.
extern "C" void attend_decode(const Part* parts, int64_t num_parts, int64_t kv_heads, int64_t group, int64_t dim,
                              int64_t value_dim, float scale, float softcap, const float* sinks, const void* query,
                              float* scratch, void* out, int is_bfloat16, int threads) {
  const Call call{kv_heads, group, dim, value_dim, scale, softcap};
  if (is_bfloat16)
    attend(parts, num_parts, call, static_cast<const Bfloat16*>(query), sinks, scratch, static_cast<Bfloat16*>(out),
           threads);
  else
    attend(parts, num_parts, call, static_cast<const float*>(query), sinks, scratch, static_cast<float*>(out), threads);
}
