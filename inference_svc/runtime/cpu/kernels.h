// The kernels that operators call; each is described where it is defined.

#pragma once

#include <cstdint>

// The KV of a sequence in a layer, and its new tokens: a row of int64 numbers that Python writes; strides are in elements.
struct Part {
  int64_t keys, values;          // addresses of slot 0
  int64_t pages;                 // address of the int32 page numbers; 0: a token's slot is its position
  int64_t page_tokens;           // tokens on a page
  int64_t first, end;            // positions of the visible tokens
  int64_t key_head, key_token;   // strides of keys
  int64_t value_head, value_token;
  int64_t num_tokens;            // new ones, the last of these positions; 1 in decode steps
  int64_t firsts;                // address of the int64 first position that each new token sees; 0: `first`
  int64_t key_row, value_row;    // addresses in a write buffer, [kv_heads, dim] each; 0: nothing is written there
};

// New tokens' rows: one token of each part, whose heads have `size` elements side by side; strides are in elements.
struct NewRows {
  const void* first;
  int64_t token, head, size;
};


extern "C" void attend_decode(const Part* parts, int64_t num_parts, int64_t kv_heads, int64_t group, int64_t dim,
                              int64_t value_dim, float scale, float softcap, const float* sinks, const void* query,
                              float* scratch, void* out, int is_bfloat16, int threads);
extern "C" void write_tokens(const Part* parts, int64_t num_parts, int64_t kv_heads, const NewRows* key,
                             const NewRows* value, const NewRows* unrotated_key, const NewRows* unrotated_value,
                             int is_bfloat16);
extern "C" int64_t scratch_size(const Part* parts, int64_t num_parts, int64_t kv_heads, int64_t group,
                                int64_t value_dim);
extern "C" void attend_prefill(const Part* parts, int64_t num_parts, int64_t kv_heads, int64_t group, int64_t dim,
                               int64_t value_dim, float scale, float softcap, const float* sinks, const void* query,
                               void* out, int is_bfloat16, int threads);
extern "C" void multiply_packed(const void* rows, int64_t num_rows, int64_t inner, int64_t columns, const void* weights,
                                const void* bias, void* out, int is_bfloat16, int threads);
