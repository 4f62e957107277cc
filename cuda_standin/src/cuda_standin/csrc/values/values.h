// What the files of the value layer share.
#pragma once
#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/function_schema.h>
#include <torch/version.h>

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <sstream>
#include <string>
#include <vector>

namespace values {
#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 4
namespace maybe = c10;  // c10::optional was a class of its own
#else
namespace maybe = std;
#endif
using at::Tensor;
using c10::IValue;

struct Philox {
  uint64_t seed, offset;
};

// One call of an operator, on CPU tensors that share the memory of the CUDA ones. It may be computed later than it was
// made: it holds no CUDA tensor, so that memory is free for others exactly when it would be on a GPU.
struct Call {
  const c10::FunctionSchema& schema;
  std::vector<IValue> in, out;
  Philox rng{0, 0};

  bool has(const char* name) const { return position(name) >= 0; }
  const IValue& operator[](const char* name) const {
    int i = position(name);
    TORCH_CHECK(i >= 0, "this PyTorch's operator has no argument ", name);
    return in[i];
  }
  Tensor tensor(const char* name) const { return (*this)[name].toTensor(); }
  Tensor optional_tensor(const char* name) const {  // undefined where it is None, or where this PyTorch has none
    int i = position(name);
    return i >= 0 && in[i].isTensor() ? in[i].toTensor() : Tensor();
  }
  int output_position(const char* name) const {  // -1 where this PyTorch returns nothing of that name
    for (size_t i = 0; i < schema.returns().size(); i++)
      if (schema.returns()[i].name() == name) return (int)i;
    return -1;
  }
  Tensor output(size_t i) const { return i < out.size() && out[i].isTensor() ? out[i].toTensor() : Tensor(); }

 private:
  int position(const char* name) const {
    auto i = schema.argumentIndexWithName(name);
    return i ? *i : -1;
  }
};

// What runs on the CPU tensors is nobody's business above.
struct Below {
  at::AutoDispatchBelowAutograd autograd;
  c10::impl::ExcludeDispatchKeyGuard others{
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot,
                           c10::DispatchKey::AutocastCUDA, c10::DispatchKey::AutocastCPU})};
};

inline bool is_cuda(const Tensor& t) { return t.defined() && t.is_cuda(); }
inline bool is_half(at::ScalarType s) { return s == at::kHalf || s == at::kBFloat16; }
// A CPU tensor on the memory of a CUDA one.
inline Tensor on_host(const Tensor& t) {
  if (!is_cuda(t)) return t;
  Tensor r = at::from_blob(t.data_ptr(), t.sizes(), t.strides(),
                           t.options().device(at::kCPU).requires_grad(false).pinned_memory(false));
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) r.unsafeGetTensorImpl()->set_wrapped_number(true);
  return r;
}
inline Tensor float32(const Tensor& t) { return t.defined() && is_half(t.scalar_type()) ? t.to(at::kFloat) : t; }
inline void put(const Tensor& into, const Tensor& value) {
  if (!into.defined() || !value.defined() || into.numel() == 0) return;
  TORCH_CHECK(into.sizes() == value.sizes(), "the CUDA kernel made ", into.sizes(), ", the CPU's ", value.sizes());
  into.copy_(value);
}

at::Generator cpu_generator(Philox state);
Tensor keep_mask(at::IntArrayRef shape, double drop_probability, Philox state);  // 1 where an element is kept

using Rule = void (*)(const Call&);
// Written by hand; nullptr where the CPU's operator is used. Some are needed only where the CPU has none of that name.
Rule rule_for(const std::string& name, bool cpu_has_it);
Rule attention_rule_for(const std::string& name);

// An operator has no values: told in report(), an error where values are asked for.
void note_missing(const std::string& name, std::string why, bool late);

// operator_log.cpp
// One call in the step that is recorded. It begins before the original is called, and is written when that has ended;
// what an operator calls is part of it.
class RecordedCall {
 public:
  RecordedCall(const c10::OperatorHandle& op, const std::vector<IValue>& in, void* stream);
  ~RecordedCall();
  void ended(const std::vector<IValue>& out);

 private:
  const c10::FunctionSchema& schema_;
  void* stream_;
  int signature_ = -1;
  int64_t written_ = 0;
  unsigned long long launches_ = 0;
};
extern bool logging;
void log_begin(const std::string& name, const std::vector<IValue>& in);
void log_end(const std::string& name);

// skipped.cpp
struct Limits {
  size_t bytes = SIZE_MAX;          // operators on more bytes get no values
  size_t integer_bytes = SIZE_MAX;  // the same for operators on integers and flags alone
  bool integers = true, zeros = true, finite = true;
  bool host = true;      // large tensors of the host are left without values too
  bool balanced = true;  // experts that are tied get the same number of tokens each
};
extern Limits limits;
extern thread_local bool nothing_is_computed;  // standin_compute_nothing: what this thread asks for is not read
void zero(char* p, size_t n);  // whole pages are given back
void leave_harmless(const c10::OperatorHandle& op, const Call& call);
bool chooses(const std::string& name);  // among experts: topk, argmax, max
void spread_ties(const Call& call, bool skipped);
}  // namespace values
