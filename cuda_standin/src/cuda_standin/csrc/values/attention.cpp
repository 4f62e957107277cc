// Attention by hand: the CPU has no operator of these names. Layout: batch x length x heads x width; in ragged batches
// the rows of all sequences x heads x width. Arguments are read by name: they stand elsewhere in older versions.
#include <cmath>

#include "values.h"

namespace values {
namespace {
enum Causal { NO = 0, FROM_TOP_LEFT = 1, FROM_BOTTOM_RIGHT = 2 };
// up to PyTorch 2.1 this was the first flash attention; from the second on the last query sees all keys
constexpr Causal FLASH_CAUSAL = TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 2 ? FROM_TOP_LEFT : FROM_BOTTOM_RIGHT;

// What may be seen: keys up to `right` after the query and `left` before it, counted along a diagonal; -1: all.
struct Mask {
  int causal = NO;
  int64_t left = -1, right = -1;
};
struct Heads {
  Tensor q, k, v;  // batch x heads x length x width, float32, keys and values once for each head of the queries
  int64_t group;   // heads of queries for each head of keys
  double scale;
};
// A call, or one sequence of it where the rows of many lie one after another (ragged batches).
struct Part {
  const Call& call;
  int64_t sequence = -1, q_begin = 0, q_end = 0, k_begin = 0, k_end = 0;

  Tensor rows(const Tensor& t, int64_t begin, int64_t end) const {  // a view: batch x length x heads x width
    if (!t.defined()) return t;
    Tensor all = t.dim() == 3 ? t.unsqueeze(0) : t;
    return sequence < 0 ? all : all.slice(1, begin, end);
  }
  Tensor of_queries(const Tensor& t) const { return rows(t, q_begin, q_end); }
  Tensor of_keys(const Tensor& t) const { return rows(t, k_begin, k_end); }
  Philox draws(Philox of_call) const {
    return {of_call.seed, of_call.offset + ((uint64_t)std::max<int64_t>(sequence, 0) << 40)};
  }
  Heads heads() const {
    auto moved = [](const Tensor& t) { return float32(t).transpose(1, 2).contiguous(); };
    Heads h{moved(of_queries(call.tensor("query"))), moved(of_keys(call.tensor("key"))),
            moved(of_keys(call.tensor("value"))), 1, 0};
    h.group = h.q.size(1) / h.k.size(1);
    if (h.group > 1) {
      h.k = h.k.repeat_interleave(h.group, 1);
      h.v = h.v.repeat_interleave(h.group, 1);
    }
    bool given = call.has("scale") && !call["scale"].isNone();
    h.scale = given ? call["scale"].toDouble() : 1.0 / std::sqrt((double)h.q.size(3));
    return h;
  }
};
template <class F>
void for_each_part(const Call& c, const char* q_ends, const char* k_ends, F f) {
  Tensor q = c.optional_tensor(q_ends), k = c.optional_tensor(k_ends);
  if (!q.defined() || q.numel() == 0) {
    f(Part{c});
    return;
  }
  q = q.to(at::kLong);
  k = k.to(at::kLong);
  auto qs = q.data_ptr<int64_t>(), ks = k.data_ptr<int64_t>();
  for (int64_t i = 0; i + 1 < q.numel(); i++) f(Part{c, i, qs[i], qs[i + 1], ks[i], ks[i + 1]});
}
void refuse(const Call& c, const char* name) {
  TORCH_CHECK(!c.has(name) || c[name].isNone() || c[name].isTensor() && !c[name].toTensor().defined(),
              "no values for attention with ", name);
}
double dropout(const Call& c) { return c.has("dropout_p") ? c["dropout_p"].toDouble() : 0; }

Tensor scores(const Heads& h, const Tensor& bias, Mask mask) {
  Tensor s = at::matmul(h.q, h.k.transpose(2, 3)).mul_(h.scale);
  if (bias.defined()) s.add_(float32(bias).expand(s.sizes()));
  int64_t m = s.size(2), n = s.size(3);
  Tensor seen = at::ones({m, n}, at::kBool);
  if (mask.causal != NO) seen = seen.tril(mask.causal == FROM_BOTTOM_RIGHT ? n - m : 0);
  if (mask.right >= 0) seen = seen.tril(n - m + mask.right);
  if (mask.left >= 0) seen = seen.triu(n - m - mask.left);
  return s.masked_fill_(seen.logical_not_(), -INFINITY);
}
void forward(const Part& part, const Tensor& bias, Mask mask, Philox rng) {
  const Call& c = part.call;
  Heads h = part.heads();
  double p = dropout(c);
  Tensor s = scores(h, bias, mask), l = at::logsumexp(s, {3});
  Tensor w = (s - l.unsqueeze(3)).exp_().nan_to_num_(0.0);  // a row that sees nothing gives zeros
  if (p > 0) w = w * keep_mask(w.sizes(), p, part.draws(rng)) * (1 / (1 - p));
  put(part.of_queries(c.output(0)), at::matmul(w, h.v).transpose(1, 2));
  Tensor lse = c.output(1);
  if (!lse.defined() || !lse.numel()) return;
  if (lse.dim() == 2) {  // heads x rows of all sequences
    lse.slice(1, part.q_begin, part.q_end).copy_(l[0]);
    return;
  }
  if (part.sequence >= 0) lse = lse.narrow(0, part.sequence, 1);
  lse.fill_(INFINITY);  // rows beyond the length are padding
  lse.narrow(2, 0, l.size(2)).copy_(l);
}
void backward(const Part& part, const Tensor& grad, const Tensor& bias, Mask mask, Philox rng) {
  const Call& c = part.call;
  Heads h = part.heads();
  double p = dropout(c);
  Tensor g = float32(part.of_queries(grad)).transpose(1, 2), s = scores(h, bias, mask);
  Tensor w = at::softmax(s, 3).nan_to_num_(0.0), dropped = w, gw = at::matmul(g, h.v.transpose(2, 3));
  if (p > 0) {
    Tensor keep = keep_mask(w.sizes(), p, part.draws(rng)) * (1 / (1 - p));
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
  put(part.of_queries(c.output(0)), gq.transpose(1, 2));
  put(part.of_keys(c.output(1)), gk.transpose(1, 2));
  put(part.of_keys(c.output(2)), gv.transpose(1, 2));
  if (Tensor gb = c.output(3); gb.defined() && gb.numel())
    put(gb, gb.sizes() == gs.sizes() ? gs : at::sum_to(gs, gb.sizes()));
}

// ---- the generator's state, kept from forward for backward ----
// PyTorch 2.0 returns it in two numbers, then in two tensors, since 2.7 flash attention in one tensor of two.
Philox drawn(const Call& c) {
  int i = c.output_position("philox_seed");
  if (i >= 0 && c.out[i].isInt()) return {(uint64_t)c.out[i].toInt(), (uint64_t)c.out[i + 1].toInt()};
  auto write = [&](const char* name, size_t at, uint64_t value) {  // unseen by autograd, which may have saved it
    int o = c.output_position(name);
    Tensor t = o >= 0 ? c.output(o) : Tensor();
    if (t.defined() && (size_t)t.numel() > at) ((uint64_t*)t.data_ptr())[at] = value;
  };
  if (dropout(c) > 0) {
    write("philox_seed", 0, c.rng.seed);
    write("philox_offset", 0, c.rng.offset);
    write("rng_state", 0, c.rng.seed);
    write("rng_state", 1, c.rng.offset);
  }
  return c.rng;
}
Philox saved_state(const Call& c) {
  if (dropout(c) == 0) return {0, 0};
  if (c.has("rng_state")) {
    auto p = (const uint64_t*)c.tensor("rng_state").data_ptr();
    return {p[0], p[1]};
  }
  auto number = [](const IValue& v) { return (uint64_t)(v.isTensor() ? v.toTensor().item().toLong() : v.toInt()); };
  return {number(c["philox_seed"]), number(c["philox_offset"])};
}

Mask flash_mask(const Call& c) {
  for (auto name : {"alibi_slopes", "seqused_k", "block_table", "q_descale", "k_descale", "v_descale"}) refuse(c, name);
  auto window = [&](const char* name) { return c.has(name) && !c[name].isNone() ? c[name].toInt() : (int64_t)-1; };
  return {c["is_causal"].toBool() ? FLASH_CAUSAL : NO, window("window_size_left"), window("window_size_right")};
}
void flash_forward(const Call& c) {
  Philox rng = drawn(c);
  Mask mask = flash_mask(c);
  for_each_part(c, "cum_seq_q", "cum_seq_k", [&](const Part& part) { forward(part, Tensor(), mask, rng); });
}
void flash_backward(const Call& c) {
  Philox rng = saved_state(c);
  Mask mask = flash_mask(c);
  for_each_part(c, "cum_seq_q", "cum_seq_k",
                [&](const Part& part) { backward(part, c.tensor("grad_out"), Tensor(), mask, rng); });
}
Mask efficient_mask(const Call& c) {
  for (auto name : {"seqlen_k", "window_size"}) refuse(c, name);
  Tensor lengths = c.optional_tensor("cu_seqlens_q");
  if (lengths.defined() && lengths.numel()) refuse(c, "bias");
  if (c.has("custom_mask_type")) return {(int)c["custom_mask_type"].toInt()};
  return {c[c.has("causal") ? "causal" : "is_causal"].toBool() ? FROM_TOP_LEFT : NO};
}
void efficient_forward(const Call& c) {
  Philox rng = drawn(c);
  Mask mask = efficient_mask(c);
  for_each_part(c, "cu_seqlens_q", "cu_seqlens_k",
                [&](const Part& part) { forward(part, c.optional_tensor("bias"), mask, rng); });
}
void efficient_backward(const Call& c) {
  Philox rng = saved_state(c);
  Mask mask = efficient_mask(c);
  for_each_part(c, "cu_seqlens_q", "cu_seqlens_k",
                [&](const Part& part) { backward(part, c.tensor("grad_out_"), c.optional_tensor("bias"), mask, rng); });
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
