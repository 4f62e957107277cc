// What an operator leaves that gets no values because it works on more bytes than STANDIN_SKIP_BYTES.
//
// Programs go another way where a number is nonsense: an index out of range, a loss that is not finite, a mask that is
// seen as padding. So (STANDIN_RULES, a sum)
//   1  operators on integers and flags alone have values up to 256 MiB: ids, masks, routing;
//   2  a skipped operator leaves zeros. Whole pages are given back to the system: they read as zeros and take nothing;
//   4  a skipped comparison says what it says of zeros: `isfinite` true, `isnan` false;
//   8  large tensors of the host are left without values too (host.cpp).
//
// A router that gets zeros finds all experts equal, and every token would go to the same ones. So where up to 1,024
// numbers are tied, `topk`, `argmax` and `max` go round: row r takes those from r * k on. (On a GPU, which of equal ones
// is taken is not defined.) STANDIN_ROUTING=worst leaves all tokens to the same experts.
#include <ATen/core/dispatch/Dispatcher.h>
#include <sys/mman.h>

#include "values.h"

namespace values {
Limits limits;
thread_local bool nothing_is_computed = false;

void zero(char* p, size_t n) {
  constexpr uintptr_t page = 4096;
  uintptr_t begin = ((uintptr_t)p + page - 1) & ~(page - 1), end = ((uintptr_t)p + n) & ~(page - 1);
  if (n < 65536 || end <= begin) {
    memset(p, 0, n);
    return;
  }
  memset(p, 0, begin - (uintptr_t)p);
  memset((char*)end, 0, (uintptr_t)p + n - end);
  madvise((void*)begin, end - begin, MADV_DONTNEED);
}

static bool compares(const std::string& name) {
  static const std::set<std::string> names = {"eq",    "ne",       "lt",    "le",       "gt",       "ge",
                                              "isnan", "isfinite", "isinf", "isposinf", "isneginf", "logical_not"};
  return names.count(name.substr(6, name.find('.', 6) - 6));
}

void leave_harmless(const c10::OperatorHandle& op, const Call& call) {
  std::string name = call.schema.name();
  Below below;
  if (limits.finite && compares(name) && call.out.size() == 1 && call.output(0).defined() &&
      call.output(0).nbytes() <= limits.integer_bytes) {
    torch::jit::Stack of_zeros;
    for (const IValue& v : call.in) {
      if (v.isTensor() && v.toTensor().defined())
        of_zeros.emplace_back(at::zeros({}, v.toTensor().options().requires_grad(false)));
      else of_zeros.push_back(v);
    }
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &of_zeros);
    if (of_zeros.back().toTensor().item().toBool()) {
      call.output(0).fill_(true);
      return;
    }
  }
  if (!limits.zeros || name == "aten::copy_") return;
  // with rule 4, `found_inf` of the gradient scaler stays 0: it is written in place
  auto one = [](const Tensor& t) {
    if (!t.defined() || !t.numel()) return;
    if (t.is_non_overlapping_and_dense()) zero((char*)t.data_ptr(), t.nbytes());
    else if (t.nbytes() <= limits.bytes) t.zero_();
  };
  for (size_t i = 0; i < call.out.size(); i++) {
    const auto& alias = call.schema.returns()[i].alias_info();
    if (alias && alias->isWrite()) continue;
    if (call.out[i].isTensor()) one(call.out[i].toTensor());
    else if (call.out[i].isTensorList())
      for (const Tensor& t : call.out[i].toTensorVector()) one(t);
  }
}

bool chooses(const std::string& name) {
  static const std::set<std::string> names = {"aten::topk", "aten::argmax", "aten::max.dim"};
  return names.count(name);
}

void spread_ties(const Call& call, bool skipped) {
  constexpr int64_t most = 1024;
  if (!limits.balanced) return;
  Tensor from = call.tensor("self"), into = call.output(call.schema.name() == "aten::argmax" ? 0 : 1);
  const IValue& dim = call["dim"];
  if (!dim.isInt() || from.dim() < 2 || !from.is_floating_point() || !into.defined() || !into.numel()) return;
  int64_t last = from.dim() - 1, experts = from.size(last);
  if ((dim.toInt() != -1 && dim.toInt() != last) || experts < 2 || experts > most) return;
  Below below;
  bool one_each = into.dim() < from.dim() || call.schema.name() != "aten::topk";
  int64_t taken = one_each ? 1 : into.size(last), rows = from.numel() / experts;
  if (taken >= experts) return;
  Tensor round = at::remainder(at::arange(rows * taken, at::kLong), experts).reshape(into.sizes());
  if (skipped) {
    into.copy_(round);
    return;
  }
  Tensor tied = from.amax({last}, true) == from.amin({last}, true);
  into.copy_(at::where(tied.reshape(one_each && into.dim() < from.dim() ? into.sizes() : tied.sizes()), round, into));
}
}  // namespace values
