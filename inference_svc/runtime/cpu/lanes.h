// Vectors of the processor, and bfloat16, for this package's kernels. Written with GCC's vector extensions.

#pragma once

#include <cstdint>
#include <cstring>

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16;  // floats of a vector register
#elif defined(__AVX__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float Lanes __attribute__((vector_size(LANES * sizeof(float))));
typedef uint32_t Bits __attribute__((vector_size(LANES * sizeof(float))));
typedef uint16_t Halves __attribute__((vector_size(LANES * sizeof(uint16_t))));

struct Bfloat16 {  // the upper half of a float
  uint16_t bits;
};

inline Lanes load(const float* source) {
  Lanes lanes;
  std::memcpy(&lanes, source, sizeof lanes);
  return lanes;
}
inline Lanes load(const Bfloat16* source) {
  Halves halves;
  std::memcpy(&halves, source, sizeof halves);
  return (Lanes)(__builtin_convertvector(halves, Bits) << 16);
}
inline void store(Lanes lanes, float* target) { std::memcpy(target, &lanes, sizeof lanes); }
inline void store(Lanes lanes, Bfloat16* target) {  // to the nearest, ties to even
  const Bits bits = (Bits)lanes;
  const Halves halves = __builtin_convertvector((bits + 0x7fff + ((bits >> 16) & 1)) >> 16, Halves);
  std::memcpy(target, &halves, sizeof halves);
}
inline float widen(float number) { return number; }
inline float widen(Bfloat16 number) {
  const uint32_t bits = uint32_t(number.bits) << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof wide);
  return wide;
}
inline void narrow(float number, float& out) { out = number; }
inline void narrow(float number, Bfloat16& out) {  // to the nearest, ties to even
  uint32_t bits;
  std::memcpy(&bits, &number, sizeof bits);
  out.bits = uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

}  // namespace
