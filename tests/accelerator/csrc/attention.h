// A fused attention with its own saved outputs: (output, logsumexp), computed by the CPU's flash kernel.
#pragma once
#include <ATen/SDPBackend.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>

#include "kernels.h"

namespace standin {
inline bool fused_attention = true;

using OptionalTensor = std::optional<at::Tensor>;
inline int64_t choose_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const OptionalTensor& mask,
                                double dropout, bool, std::optional<double>, bool grouped) {
  bool plain = query.dim() == 4 && query.size(-1) == value.size(-1) && query.numel() && key.numel();
  plain = plain && (query.size(1) == key.size(1) || (grouped && key.size(1) == value.size(1)));
  bool masked = mask && mask->defined() && mask->requires_grad();
  bool fused = fused_attention && plain && !masked && dropout == 0;
  return int64_t(fused ? at::SDPBackend::overrideable : at::SDPBackend::math);
}

inline at::Tensor flipped_like(const at::Tensor& t) {  // (batch, heads, length, size), laid out as (batch, length, heads, size)
  return at::empty({t.size(0), t.size(2), t.size(1), t.size(3)}, t.options()).transpose(1, 2);
}
using Attention = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, SymInt, SymInt, at::Tensor, at::Tensor, at::Tensor>;
inline Attention attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const OptionalTensor& bias, double,
                           bool causal, bool, std::optional<double> scale) {
  DeviceGuard guard(query.device());
  auto output = flipped_like(query);
  auto statistics = query.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  auto logsumexp = at::empty({query.size(0), query.size(1), query.size(2)}, query.options().dtype(statistics));
  auto number = [&] { return at::empty({}, query.options().dtype(at::kLong)); };
  auto seed = number(), offset = number();
  OptionalTensor mask;
  if (bias && bias->defined()) mask = kernel_view(*bias);
  launch([q = kernel_view(query), k = kernel_view(key), v = kernel_view(value), mask, causal, scale, o = kernel_view(output), l = kernel_view(logsumexp), s = kernel_view(seed),
          p = kernel_view(offset)] {
    auto [out, sums] = at::_scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, mask, scale);
    o.copy_(out), l.copy_(sums), s.zero_(), p.zero_();
  }, COMPUTE, op_ns("aten::_scaled_dot_product_fused_attention_overrideable"));
  return {output, logsumexp, at::Tensor(), at::Tensor(), query.sym_size(2), key.sym_size(2), seed, offset, at::Tensor()};
}
inline std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> attention_backward(
    const at::Tensor& gradient, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const at::Tensor& bias,
    std::array<bool, 4>, const at::Tensor& output, const at::Tensor& logsumexp, const at::Tensor&, const at::Tensor&, SymInt, SymInt,
    double, bool causal, const at::Tensor&, const at::Tensor&, std::optional<double> scale) {
  DeviceGuard guard(query.device());
  auto dq = flipped_like(query), dk = flipped_like(key), dv = flipped_like(value);
  OptionalTensor mask;
  if (bias.defined()) mask = kernel_view(bias);
  launch([g = kernel_view(gradient), q = kernel_view(query), k = kernel_view(key), v = kernel_view(value), mask, causal, scale, o = kernel_view(output),
          l = kernel_view(logsumexp), a = kernel_view(dq), b = kernel_view(dk), c = kernel_view(dv)] {
    auto [x, y, z] = at::_scaled_dot_product_flash_attention_for_cpu_backward(g, q, k, v, o, l, 0.0, causal, mask, scale);
    a.copy_(x), b.copy_(y), c.copy_(z);
  }, COMPUTE, op_ns("aten::_scaled_dot_product_fused_attention_overrideable_backward"));
  return {dq, dk, dv, at::Tensor()};
}
}  // namespace standin
