// Operators of torch for this package's kernels: they are called without Python in between.
//
// `operators.py` declares them, and says why there are operators. Only torch's stable interface (of 2.11) is used, so
// that this file compiles with every later version, too.

#define TORCH_TARGET_VERSION (((0ULL + 2) << 56) | ((0ULL + 11) << 48))

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <vector>

#include "kernels.h"

namespace {

using torch::headeronly::ScalarType;
using torch::headeronly::toString;
using torch::stable::Tensor;

int num_threads() { return int(torch::stable::get_num_threads()); }
bool is_bfloat16(const Tensor& tensor) { return tensor.scalar_type() == ScalarType::BFloat16; }
Tensor in_order(const Tensor& tensor) { return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor); }
const void* address(const std::optional<Tensor>& tensor) { return tensor ? tensor->const_data_ptr() : nullptr; }

// states: [..., features]; packed: [panels, pieces, panel, depth]; bias: [columns]. Return [..., columns].
Tensor multiply(const Tensor& states, const Tensor& packed, const std::optional<Tensor>& bias, int64_t columns) {
  const auto sizes = states.sizes();
  const int64_t depth = packed.size(3), inner = packed.size(1) * depth;
  const int64_t missing = sizes.size() ? inner - sizes[sizes.size() - 1] : -1;
  // The kernel would read behind the end of memory where torch's product raises.
  STD_TORCH_CHECK(states.scalar_type() == packed.scalar_type() && missing >= 0 && missing < depth, "states of ",
                  toString(states.scalar_type()), " with ", inner - missing, " features do not fit weights of ",
                  toString(packed.scalar_type()), " with ", inner, " inputs");
  int64_t num_rows = 1;
  for (size_t dim = 0; dim + 1 < sizes.size(); ++dim) num_rows *= sizes[dim];
  const Tensor rows = in_order(missing ? torch::stable::pad(states, {0, missing}) : states);
  std::vector<int64_t> out_sizes(sizes.begin(), sizes.end());
  out_sizes.back() = columns;
  Tensor out = torch::stable::new_empty(states, out_sizes);
  multiply_packed(rows.const_data_ptr(), num_rows, inner, columns, packed.const_data_ptr(), address(bias),
                  out.mutable_data_ptr(), is_bfloat16(states), num_threads());
  return out;
}

// What both kernels of attention take. query: [1, heads, tokens, dim] with any strides; parts: [layers, parts, numbers]
// of `Part`, whose memory stays in place; sinks: [heads] float. Return [1, tokens, heads, value_dim].
struct Attention {
  Attention(const Tensor& query, const Tensor& parts, int64_t layer, int64_t kv_heads, int64_t value_dim)
      : query(in_order(torch::stable::transpose(query, 1, 2))),
        parts(static_cast<const Part*>(parts.const_data_ptr()) + layer * parts.size(1)),
        num_parts(parts.size(1)),
        heads(query.size(1)),
        dim(query.size(3)),
        out(torch::stable::new_empty(query, {1, query.size(2), heads, value_dim})) {
    STD_TORCH_CHECK(parts.size(2) * 8 == sizeof(Part) && layer < parts.size(0) && heads % kv_heads == 0,
                    "no parts of layer ", layer, " with ", kv_heads, " key heads");
  }

  const Tensor query;
  const Part* parts;
  const int64_t num_parts, heads, dim;
  Tensor out;
};

Tensor attend_lone(const Attention& call, int64_t kv_heads, int64_t value_dim, double scale, double softcap,
                   const std::optional<Tensor>& sinks) {
  const int64_t group = call.heads / kv_heads;
  // Without zeros, which a vector would write.
  const std::unique_ptr<float[]> scratch(
      new float[scratch_size(call.parts, call.num_parts, kv_heads, group, value_dim)]);
  attend_decode(call.parts, call.num_parts, kv_heads, group, call.dim, value_dim, float(scale), float(softcap),
                static_cast<const float*>(address(sinks)), call.query.const_data_ptr(), scratch.get(),
                call.out.mutable_data_ptr(), is_bfloat16(call.query), num_threads());
  return call.out;
}

Tensor decode(const Tensor& query, const Tensor& parts, int64_t layer, int64_t kv_heads, int64_t value_dim,
              double scale, double softcap, const std::optional<Tensor>& sinks) {
  return attend_lone(Attention(query, parts, layer, kv_heads, value_dim), kv_heads, value_dim, scale, softcap, sinks);
}

// The new tokens' rows in a tensor, of which one dimension is tokens, another one heads, and the last one elements.
struct Rows {
  Rows(const Tensor& tensor, int64_t tokens, int64_t heads)
      : held(tensor.stride(tensor.dim() - 1) == 1 ? tensor : torch::stable::contiguous(tensor)),
        rows{held.const_data_ptr(), held.stride(tokens), held.stride(heads), held.size(held.dim() - 1)} {}

  const Tensor held;
  const NewRows rows;
};

// key and value: [1, kv_heads, parts, dim]; those before RoPE: [parts, kv_heads, dim]; all with any strides.
Tensor write_and_decode(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& unrotated_key,
                        const Tensor& unrotated_value, const Tensor& parts, int64_t layer, double scale,
                        double softcap, const std::optional<Tensor>& sinks) {
  const int64_t kv_heads = key.size(1), value_dim = value.size(3), num_parts = parts.size(1);
  const ScalarType type = query.scalar_type();
  for (const Tensor& given : {key, value, unrotated_key, unrotated_value})
    STD_TORCH_CHECK(given.scalar_type() == type, "keys or values of ", toString(given.scalar_type()),
                    " beside queries of ", toString(type));
  STD_TORCH_CHECK(key.size(2) == num_parts && query.size(2) == num_parts && unrotated_key.size(0) == num_parts,
                  "new tokens of other than ", num_parts, " parts");
  const Attention call(query, parts, layer, kv_heads, value_dim);
  const Rows keys(key, 2, 1), values(value, 2, 1), first_keys(unrotated_key, 0, 1), first_values(unrotated_value, 0, 1);
  write_tokens(call.parts, num_parts, kv_heads, &keys.rows, &values.rows, &first_keys.rows, &first_values.rows,
               is_bfloat16(query));
  return attend_lone(call, kv_heads, value_dim, scale, softcap, sinks);
}

Tensor prefill(const Tensor& query, const Tensor& parts, int64_t layer, int64_t kv_heads, int64_t value_dim,
               double scale, double softcap, const std::optional<Tensor>& sinks) {
  const Attention call(query, parts, layer, kv_heads, value_dim);
  attend_prefill(call.parts, call.num_parts, kv_heads, call.heads / kv_heads, call.dim, value_dim, float(scale),
                 float(softcap), static_cast<const float*>(address(sinks)), call.query.const_data_ptr(),
                 call.out.mutable_data_ptr(), is_bfloat16(query), num_threads());
  return call.out;
}

}  // namespace

// Let torch's operators call this library's kernels, once in a process. Return whether torch has taken them.
extern "C" int register_operators() {
  using torch::stable::detail::StableLibrary;
  try {
    static StableLibrary library(StableLibrary::Kind::IMPL, "cachedattention", "CPU", __FILE__, __LINE__);
    static const bool is_done = (library.impl("multiply_packed", TORCH_BOX(&multiply)),
                                 library.impl("attend_decode", TORCH_BOX(&decode)),
                                 library.impl("write_and_attend_decode", TORCH_BOX(&write_and_decode)),
                                 library.impl("attend_prefill", TORCH_BOX(&prefill)), true);
    return is_done;
  } catch (const std::exception&) {
    return false;
  }
}
