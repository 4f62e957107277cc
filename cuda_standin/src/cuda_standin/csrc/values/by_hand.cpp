// Operators that the CPU does not have, has with other arguments, or draws other random numbers for.
#include <ATen/CPUGeneratorImpl.h>

#include <cmath>

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

// ---- until PyTorch 2.4 the CPU had none of these ----
double number(const IValue& v) { return v.isTensor() ? v.toTensor().item().toDouble() : v.toScalar().toDouble(); }
bool skips_step(const Call& c) {
  Tensor found = c.optional_tensor("found_inf");
  return found.defined() && found.item().toDouble() != 0;
}
// The gradient in float32, divided by the scale (the kernel writes that back), negated where the step climbs.
Tensor unscaled(const Call& c, Tensor gradient) {
  Tensor scale = c.optional_tensor("grad_scale");
  if (scale.defined()) gradient.div_(scale.to(gradient.scalar_type()));
  Tensor g = float32(gradient);
  return c["maximize"].toBool() ? -g : g;
}
template <bool DECOUPLED>
void fused_adam(const Call& c) {
  if (skips_step(c)) return;
  auto list = [&](const char* name) { return c[name].toTensorVector(); };
  auto weights = list("self"), grads = list("grads"), means = list("exp_avgs"), squares = list("exp_avg_sqs"),
       maxima = list("max_exp_avg_sqs"), steps = list("state_steps");
  double lr = number(c["lr"]), beta1 = number(c["beta1"]), beta2 = number(c["beta2"]), eps = number(c["eps"]);
  double decay = number(c["weight_decay"]);
  for (size_t i = 0; i < weights.size(); i++) {
    Tensor w = float32(weights[i]), g = unscaled(c, grads[i]);
    double step = number(steps[i]);
    if (DECOUPLED) w = w * (1 - lr * decay);
    else if (decay != 0) g = g + decay * w;
    Tensor mean = float32(means[i]) * beta1 + g * (1 - beta1),
           square = float32(squares[i]) * beta2 + g * g * (1 - beta2);
    means[i].copy_(mean);
    squares[i].copy_(square);
    if (c["amsgrad"].toBool()) maxima[i].copy_(square = at::maximum(float32(maxima[i]), square));
    Tensor divisor = square.sqrt() / std::sqrt(1 - std::pow(beta2, step)) + eps;
    weights[i].copy_(w - mean / divisor * (lr / (1 - std::pow(beta1, step))));
  }
}
void fused_sgd(const Call& c) {
  if (skips_step(c)) return;
  auto weights = c["self"].toTensorVector(), grads = c["grads"].toTensorVector();
  auto buffers = c["momentum_buffer_list"].toTensorVector();
  double lr = number(c["lr"]), momentum = number(c["momentum"]), decay = number(c["weight_decay"]);
  for (size_t i = 0; i < weights.size(); i++) {
    Tensor w = float32(weights[i]), g = unscaled(c, grads[i]) + decay * w;
    if (momentum != 0) {
      Tensor buffer = g;
      if (!c["is_first_step"].toBool()) buffer = float32(buffers[i]) * momentum + g * (1 - number(c["dampening"]));
      buffers[i].copy_(buffer);
      g = c["nesterov"].toBool() ? g + momentum * buffer : buffer;
    }
    weights[i].copy_(w - lr * g);
  }
}
void unscale_and_look_for_infinity(const Call& c) {
  Tensor found = c.tensor("found_inf"), scale = c.tensor("inv_scale");
  for (const Tensor& t : c["self"].toTensorVector()) {
    if (!at::isfinite(t).all().item().toBool()) found.fill_(1);
    t.copy_(float32(t) * scale);
  }
}
void update_scale(const Call& c) {
  Tensor scale = c.tensor("self"), grown = c.tensor("growth_tracker");
  if (c.tensor("found_inf").item().toDouble() != 0) {
    scale.mul_(number(c["scale_backoff_factor"]));
    grown.zero_();
  } else if (grown.item().toLong() + 1 == c["growth_interval"].toInt()) {
    Tensor more = scale * number(c["scale_growth_factor"]);
    if (at::isfinite(more).item().toBool()) scale.copy_(more);
    grown.zero_();
  } else {
    grown.add_(1);
  }
}
}  // namespace

Rule rule_for(const std::string& name, bool cpu_has_it) {
  static const std::map<std::string, Rule> rules = {
      {"aten::native_dropout", native_dropout},
      {"aten::_fused_dropout", fused_dropout},
      {"aten::_masked_scale", masked_scale},
      {"aten::_fused_rms_norm", rms_norm},
      {"aten::_fused_rms_norm_backward", rms_norm_backward},
      {"aten::histc", histc},
      {"aten::_conv_depthwise2d", depthwise},
      {"aten::conv_depthwise3d", depthwise},
      {"aten::log_sigmoid_backward", log_sigmoid_backward},
      {"aten::log_sigmoid_backward.grad_input", log_sigmoid_backward},
      {"aten::_grouped_mm", grouped_mm},
  };
  static const std::map<std::string, Rule> where_the_cpu_has_none = {
      {"aten::_fused_adam_", fused_adam<false>},
      {"aten::_fused_adam_.tensor_lr", fused_adam<false>},
      {"aten::_fused_adamw_", fused_adam<true>},
      {"aten::_fused_adamw_.tensor_lr", fused_adam<true>},
      {"aten::_fused_sgd_", fused_sgd},
      {"aten::_fused_sgd_.tensor_lr", fused_sgd},
      {"aten::_amp_foreach_non_finite_check_and_unscale_", unscale_and_look_for_infinity},
      {"aten::_amp_update_scale_", update_scale},
  };
  if (auto rule = attention_rule_for(name)) return rule;
  if (auto i = rules.find(name); i != rules.end()) return i->second;
  auto i = where_the_cpu_has_none.find(name);
  return cpu_has_it || i == where_the_cpu_has_none.end() ? nullptr : i->second;
}
}  // namespace values
