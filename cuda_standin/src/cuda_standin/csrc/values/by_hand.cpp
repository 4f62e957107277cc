// Operators that the CPU does not have, has with other arguments, or draws other random numbers for.
#include <ATen/CPUGeneratorImpl.h>

#include "values.h"

namespace values {

// Draws are a function of the CUDA generator's state: the same seed and offset give the same bits.
at::Generator cpu_generator(Philox p) {
  return at::detail::createCPUGenerator(p.seed * 0x9E3779B97F4A7C15ull ^
                                        (p.offset + 0x7F4A7C15) * 0xBF58476D1CE4E5B9ull);
}
Tensor keep_mask(at::IntArrayRef shape, double drop_probability, Philox state) {
  return at::empty(shape, at::kFloat).uniform_(0, 1, cpu_generator(state)).ge(drop_probability);
}

namespace {
void native_dropout(const Call& c) {
  Tensor x = float32(c.tensor("input"));
  double p = c["p"].toDouble();
  if (!c["train"].isNone() && !c["train"].toBool() || p == 0) {
    put(c.output(0), x);
    c.output(1).fill_(true);
    return;
  }
  Tensor keep = keep_mask(x.sizes(), p, c.rng);
  put(c.output(0), p == 1 ? at::zeros_like(x) : x * keep * (1 / (1 - p)));
  put(c.output(1), keep);
}
void fused_dropout(const Call& c) {  // here p is the probability that an element is kept
  Tensor x = float32(c.tensor("self"));
  double p = c["p"].toDouble();
  Tensor keep = keep_mask(x.sizes(), 1 - p, c.rng);
  put(c.output(0), x * keep * (1 / p));
  put(c.output(1), keep);
}
void masked_scale(const Call& c) {
  put(c.output(0), float32(c.tensor("self")) * c.tensor("mask") * c["scale"].toDouble());
}

void rms_norm(const Call& c) {
  Tensor x = float32(c.tensor("input")), w = c.optional_tensor("weight");
  int64_t normalized = c["normalized_shape"].toIntVector().size();
  std::vector<int64_t> dims;
  for (int64_t i = x.dim() - normalized; i < x.dim(); i++) dims.push_back(i);
  double eps = c["eps"].isNone() ? std::numeric_limits<float>::epsilon() : c["eps"].toDouble();
  Tensor rstd = x.square().mean(dims, true).add_(eps).rsqrt_(), y = x * rstd;
  put(c.output(0), w.defined() ? y * float32(w) : y);
  put(c.output(1), rstd);
}
void rms_norm_backward(const Call& c) {
  Tensor g = float32(c.tensor("grad_out")), x = float32(c.tensor("input")), rstd = float32(c.tensor("rstd"));
  Tensor w = c.optional_tensor("weight");
  int64_t normalized = c["normalized_shape"].toIntVector().size();
  std::vector<int64_t> dims, rest;
  for (int64_t i = 0; i < x.dim(); i++) (i < x.dim() - normalized ? rest : dims).push_back(i);
  Tensor xh = x * rstd, gy = w.defined() ? g * float32(w) : g;
  put(c.output(0), rstd * (gy - xh * (gy * xh).mean(dims, true)));
  put(c.output(1), rest.empty() ? g * xh : (g * xh).sum(rest));
}

#if TORCH_VERSION_MINOR >= 3
void chunk_cat(const Call& c) {
  put(c.output(0), at::_chunk_cat(c["tensors"].toTensorVector(), c["dim"].toInt(), c["num_chunks"].toInt()));
}
#endif
void histc(const Call& c) {  // the CPU's has no integers
  Tensor x = c.tensor("self").to(at::kFloat);
  put(c.output(0), at::histc(x, c["bins"].toInt(), c["min"].toScalar(), c["max"].toScalar()));
}
void depthwise(const Call& c) {
  Tensor x = float32(c.tensor("self")), w = float32(c.tensor("weight")), bias = float32(c.optional_tensor("bias"));
  auto stride = c["stride"].toIntVector();
  put(c.output(0), at::convolution(x, w, bias.defined() ? maybe::optional<Tensor>(bias) : maybe::nullopt, stride,
                                   c["padding"].toIntVector(), c["dilation"].toIntVector(), false,
                                   std::vector<int64_t>(stride.size(), 0), x.size(1)));
}
void log_sigmoid_backward(const Call& c) {  // the CPU's wants a buffer that CUDA's does not make
  put(c.output(0), float32(c.tensor("grad_output")) * at::sigmoid(-float32(c.tensor("self"))));
}
void grouped_mm(const Call& c) {
  Tensor x = float32(c.tensor("self")), w = float32(c.tensor("mat2")), ends = c.optional_tensor("offs"),
         out = c.output(0);
  if (!ends.defined()) {
    put(out, at::bmm(x, w));
    return;
  }
  out.zero_();
  int64_t begin = 0;
  for (int64_t g = 0; g < ends.numel(); g++) {
    int64_t end = ends[g].item().toLong();
    if (x.dim() == 2 && w.dim() == 3) {
      if (end > begin) out.slice(0, begin, end).copy_(at::mm(x.slice(0, begin, end), w[g]));
    } else if (x.dim() == 3 && w.dim() == 2) {
      if (end > begin) out.slice(1, begin, end).copy_(at::mm(x[g], w.slice(1, begin, end)));
    } else {
      out[g].copy_(at::mm(x.slice(1, begin, end), w.slice(0, begin, end)));
    }
    begin = end;
  }
}
}  // namespace

Rule rule_for(const std::string& name) {
  static const std::map<std::string, Rule> rules = {
      {"aten::native_dropout", native_dropout},
      {"aten::_fused_dropout", fused_dropout},
      {"aten::_masked_scale", masked_scale},
      {"aten::_fused_rms_norm", rms_norm},
      {"aten::_fused_rms_norm_backward", rms_norm_backward},
#if TORCH_VERSION_MINOR >= 3
      {"aten::_chunk_cat", chunk_cat},
#endif
      {"aten::histc", histc},
      {"aten::_conv_depthwise2d", depthwise},
      {"aten::conv_depthwise3d", depthwise},
      {"aten::log_sigmoid_backward", log_sigmoid_backward},
      {"aten::log_sigmoid_backward.grad_input", log_sigmoid_backward},
      {"aten::_grouped_mm", grouped_mm},
  };
  if (auto rule = attention_rule_for(name)) return rule;
  auto i = rules.find(name);
  return i == rules.end() ? nullptr : i->second;
}
}  // namespace values
