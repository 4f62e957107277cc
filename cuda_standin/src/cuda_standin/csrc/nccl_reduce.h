// Reductions of NCCL's types on host memory. One addition after the other in the order of ranks, each rounded to the
// type, so that the result is deterministic; a GPU's order depends on its topology.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "nccl_types.h"

namespace standin_nccl {

inline size_t bytes_of(int type) {
  static const size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return type >= 0 && type <= ncclFloat8e5m2 ? sizes[type] : 0;
}

// A float of few bits: 1 sign, E of exponent, M of mantissa, as an IEEE number unless FN ("finite": the largest
// exponent holds numbers too, and only all ones is NaN).
template <class Bits, int E, int M, bool FN = false>
struct Small {
  Bits bits;
  static constexpr int bias = (1 << (E - 1)) - 1;
  operator float() const {
    int exponent = bits >> M & ((1 << E) - 1), mantissa = bits & ((1 << M) - 1);
    float sign = bits >> (E + M) & 1 ? -1.f : 1.f;
    if (exponent == (1 << E) - 1 && (FN ? mantissa == (1 << M) - 1 : true)) {
      if (FN || mantissa) return NAN;
      return sign * INFINITY;
    }
    if (!exponent) return sign * std::ldexp((float)mantissa, 1 - bias - M);
    return sign * std::ldexp((float)(mantissa + (1 << M)), exponent - bias - M);
  }
  Small() = default;
  Small(float value) {
    const int largest = (1 << E) - 1;
    Bits sign = (Bits)((std::signbit(value) ? 1 : 0) << (E + M));
    if (std::isnan(value)) {
      bits = (Bits)(sign | largest << M | ((1 << M) - 1));
      return;
    }
    float size = std::fabs(value);
    int exponent = size == 0 || std::isinf(size) ? 0 : std::max(std::ilogb(size), 1 - bias);
    float units = std::isinf(size) ? INFINITY : std::nearbyint(std::ldexp(size, M - exponent));  // ties to even
    if (units >= std::ldexp(1.f, M + 1)) {
      units /= 2;
      exponent++;
    }
    int field = std::isinf(size) ? largest : units < std::ldexp(1.f, M) ? 0 : exponent + bias;
    int mantissa = std::isinf(size) ? 0 : (int)units & ((1 << M) - 1);
    const bool over =
        FN ? field > largest || (field == largest && (mantissa == (1 << M) - 1 || std::isinf(size))) : field >= largest;
    if (over) {
      field = largest;
      mantissa = FN ? (1 << M) - 1 : 0;
    }
    bits = (Bits)(sign | field << M | mantissa);
  }
};
using Half = Small<uint16_t, 5, 10>;
using Bfloat16 = Small<uint16_t, 8, 7>;
using Float8e4m3 = Small<uint8_t, 4, 3, true>;
using Float8e5m2 = Small<uint8_t, 5, 2>;

struct Reduction {
  int op = ncclSum;   // never ncclOwnOps: that is a sum with a factor
  double factor = 1;  // of each part before the sum
};

template <class T, class Wide>
void reduce_as(char* out, const std::vector<const char*>& parts, size_t count, Reduction r) {
  for (size_t i = 0; i < count; i++) {
    auto part = [&](size_t k) {
      T value;
      std::memcpy(&value, parts[k] + i * sizeof(T), sizeof(T));
      return r.factor == 1 ? value : T((Wide)((Wide)value * (Wide)r.factor));
    };
    T sum = part(0);
    for (size_t k = 1; k < parts.size(); k++) {
      Wide a = (Wide)sum, b = (Wide)part(k);
      sum = T((Wide)(r.op == ncclProd  ? a * b
                     : r.op == ncclMax ? std::max(a, b)
                     : r.op == ncclMin ? std::min(a, b)
                                       : a + b));
    }
    if (r.op == ncclAvg) sum = T((Wide)((Wide)sum / (Wide)parts.size()));
    std::memcpy(out + i * sizeof(T), &sum, sizeof(T));
  }
}

// out may be one of the parts.
inline void reduce(char* out, const std::vector<const char*>& parts, size_t count, int type, Reduction r) {
  switch (type) {
    case ncclInt8: return reduce_as<int8_t, int64_t>(out, parts, count, r);
    case ncclUint8: return reduce_as<uint8_t, uint64_t>(out, parts, count, r);
    case ncclInt32: return reduce_as<int32_t, int64_t>(out, parts, count, r);
    case ncclUint32: return reduce_as<uint32_t, uint64_t>(out, parts, count, r);
    case ncclInt64: return reduce_as<int64_t, int64_t>(out, parts, count, r);
    case ncclUint64: return reduce_as<uint64_t, uint64_t>(out, parts, count, r);
    case ncclFloat16: return reduce_as<Half, float>(out, parts, count, r);
    case ncclFloat32: return reduce_as<float, float>(out, parts, count, r);
    case ncclFloat64: return reduce_as<double, double>(out, parts, count, r);
    case ncclBfloat16: return reduce_as<Bfloat16, float>(out, parts, count, r);
    case ncclFloat8e4m3: return reduce_as<Float8e4m3, float>(out, parts, count, r);
    case ncclFloat8e5m2: return reduce_as<Float8e5m2, float>(out, parts, count, r);
  }
}

}  // namespace standin_nccl
