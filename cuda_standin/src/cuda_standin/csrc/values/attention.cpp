// Attention by hand: the CPU has no operator of these names. Layout: batch x length x heads x width.
#include <cmath>

#include "values.h"

namespace values {
namespace {
enum Causal { NO = 0, FROM_TOP_LEFT = 1, FROM_BOTTOM_RIGHT = 2 };

struct Heads {
  Tensor q, k, v;  // batch x heads x length x width, float32, keys and values once for each head of the queries
  int64_t group;   // heads of queries for each head of keys
  double scale;
};
Heads heads(const Call& c) {
  auto moved = [&](const char* name) { return float32(c.tensor(name)).transpose(1, 2).contiguous(); };
  Heads h{moved("query"), moved("key"), moved("value"), 1, 0};
  TORCH_CHECK(h.q.dim() == 4, "no values for attention over ragged batches");
  h.group = h.q.size(1) / h.k.size(1);
  if (h.group > 1) {
    h.k = h.k.repeat_interleave(h.group, 1);
    h.v = h.v.repeat_interleave(h.group, 1);
  }
  bool given = c.has("scale") && !c["scale"].isNone();
  h.scale = given ? c["scale"].toDouble() : 1.0 / std::sqrt((double)h.q.size(3));
  return h;
}
Tensor scores(const Heads& h, const Tensor& bias, int causal) {
  Tensor s = at::matmul(h.q, h.k.transpose(2, 3)).mul_(h.scale);
  if (bias.defined()) s.add_(float32(bias).expand(s.sizes()));
  if (causal != NO) {
    int64_t m = s.size(2), n = s.size(3);
    Tensor seen = at::ones({m, n}, at::kBool).tril(causal == FROM_BOTTOM_RIGHT ? n - m : 0);
    s.masked_fill_(seen.logical_not_(), -INFINITY);
  }
  return s;
}
void forward(const Call& c, const Tensor& bias, int causal) {
  Heads h = heads(c);
  double p = c["dropout_p"].toDouble();
  Tensor s = scores(h, bias, causal), l = at::logsumexp(s, {3});
  Tensor w = (s - l.unsqueeze(3)).exp_().nan_to_num_(0.0);  // a row that sees nothing gives zeros
  if (p > 0) w = w * keep_mask(w.sizes(), p, c.rng) * (1 / (1 - p));
  put(c.output(0), at::matmul(w, h.v).transpose(1, 2));
  Tensor lse = c.output(1);
  if (lse.defined() && lse.numel()) {  // rows beyond the length are padding
    lse.fill_(INFINITY);
    lse.narrow(2, 0, l.size(2)).copy_(l);
  }
}
void backward(const Call& c, const Tensor& grad, const Tensor& bias, int causal, Philox rng) {
  Heads h = heads(c);
  double p = c["dropout_p"].toDouble();
  Tensor g = float32(grad).transpose(1, 2), s = scores(h, bias, causal), w = at::softmax(s, 3).nan_to_num_(0.0);
  Tensor dropped = w, gw = at::matmul(g, h.v.transpose(2, 3));
  if (p > 0) {
    Tensor keep = keep_mask(w.sizes(), p, rng) * (1 / (1 - p));
    dropped = w * keep;
    gw = gw * keep;
  }
  Tensor gv = at::matmul(dropped.transpose(2, 3), g), gs = w * (gw - (gw * w).sum(3, true));
  Tensor gq = at::matmul(gs, h.k) * h.scale, gk = at::matmul(gs.transpose(2, 3), h.q) * h.scale;
  if (h.group > 1) {
    auto fold = [&](const Tensor& t) {
      return t.reshape({t.size(0), t.size(1) / h.group, h.group, t.size(2), t.size(3)}).sum(2);
    };
    gk = fold(gk);
    gv = fold(gv);
  }
  put(c.output(0), gq.transpose(1, 2));
  put(c.output(1), gk.transpose(1, 2));
  put(c.output(2), gv.transpose(1, 2));
  if (Tensor gb = c.output(3); gb.defined() && gb.numel())
    put(gb, gb.sizes() == gs.sizes() ? gs : at::sum_to(gs, gb.sizes()));
}
void no_ragged(const Call& c, const char* name) {
  Tensor lengths = c.optional_tensor(name);
  TORCH_CHECK(!lengths.defined() || lengths.numel() == 0, "no values for attention over ragged batches");
}
// Flash attention returns the generator's state in one tensor of two, or, before, in two of one.
Philox saved_state(const Call& c) {
  if (c.has("rng_state")) {
    auto p = (const uint64_t*)c.tensor("rng_state").data_ptr();
    return {p[0], p[1]};
  }
  return {(uint64_t)c.tensor("philox_seed").item().toLong(), (uint64_t)c.tensor("philox_offset").item().toLong()};
}

void flash_forward(const Call& c) {
  no_ragged(c, "cum_seq_q");
  forward(c, Tensor(), c["is_causal"].toBool() ? FROM_BOTTOM_RIGHT : NO);
  Tensor state = c.output(2);
  if (c["dropout_p"].toDouble() > 0 && state.defined() && state.numel() >= 2) {
    auto p = (uint64_t*)state.data_ptr();
    p[0] = c.rng.seed;
    p[1] = c.rng.offset;
  }
}
void flash_backward(const Call& c) {
  no_ragged(c, "cum_seq_q");
  Philox rng = c["dropout_p"].toDouble() > 0 ? saved_state(c) : Philox{0, 0};
  backward(c, c.tensor("grad_out"), Tensor(), c["is_causal"].toBool() ? FROM_BOTTOM_RIGHT : NO, rng);
}
int custom_mask(const Call& c) {
  if (c.has("custom_mask_type")) return (int)c["custom_mask_type"].toInt();
  return c.has("causal") && c["causal"].toBool() ? FROM_TOP_LEFT : NO;
}
void efficient_forward(const Call& c) {
  no_ragged(c, "cu_seqlens_q");
  forward(c, c.optional_tensor("bias"), custom_mask(c));
}
void efficient_backward(const Call& c) {
  no_ragged(c, "cu_seqlens_q");
  Philox rng = c["dropout_p"].toDouble() > 0 ? saved_state(c) : Philox{0, 0};
  backward(c, c.tensor("grad_out_"), c.optional_tensor("bias"), custom_mask(c), rng);
}
}  // namespace

Rule attention_rule_for(const std::string& name) {
  static const std::map<std::string, Rule> rules = {
      {"aten::_flash_attention_forward", flash_forward},
      {"aten::_flash_attention_backward", flash_backward},
      {"aten::_efficient_attention_forward", efficient_forward},
      {"aten::_efficient_attention_backward", efficient_backward},
  };
  auto i = rules.find(name);
  return i == rules.end() ? nullptr : i->second;
}
}  // namespace values
