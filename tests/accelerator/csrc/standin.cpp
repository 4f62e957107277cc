// Registers the device with torch, and gives Python (ctypes) its settings.
#include <ATen/autocast_mode.h>
#include <ATen/native/transformers/attention.h>
#include <torch/csrc/autograd/autograd.h>

#include <thread>

#include "attention.h"
#include "fallback.h"

namespace standin {
// copy_ of a conjugated tensor goes through _copy_from: resolving it first would copy it, and so on for ever.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

// The CPU's kernel takes no integers, CUDA's does.
at::Tensor histc(const at::Tensor& values, int64_t bins, const at::Scalar& least, const at::Scalar& most) {
  Below below;
  DeviceGuard guard(values.device());
  auto counts = at::empty({bins}, values.options());
  launch([from = kernel_view(values), to = kernel_view(counts), bins, least, most] {
    to.copy_(at::histc(isIntegralType(from.scalar_type(), false) ? from.to(kFloat) : from, bins, least, most));
  }, COMPUTE, op_ns("aten::histc"));
  return counts;
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("resize_", &resize_);
  m.impl("set_", &set_empty);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_.source_Storage", &set_whole);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("record_stream", &record_stream);
  m.impl("histc", &histc);
  m.impl("_fused_sdp_choice", &choose_attention);
  m.impl("_scaled_dot_product_fused_attention_overrideable", &attention);
  m.impl("_scaled_dot_product_fused_attention_overrideable_backward", &attention_backward);
  for (auto* name : {"as_strided", "view", "_reshape_alias", "convolution_overrideable", "convolution_backward_overrideable"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
}
// Where the CPU has a kernel and torch also has a composite one, an outside device would get the composite: other
// ops, other memory, other bits. CUDA has kernels for these, so the device has.
const bool own_kernels = [] {
  static torch::Library library(torch::Library::IMPL, "aten", DispatchKey::PrivateUse1, __FILE__, __LINE__);
  for (const auto& name : Dispatcher::singleton().getAllOpNames()) {
    auto op = Dispatcher::singleton().findOp(name);
    if (!op || !name.name.starts_with("aten::") || op->hasKernelForDispatchKey(DispatchKey::PrivateUse1)) continue;
    bool composite = op->hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutograd) ||
                     op->hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutogradNonFunctional);
    if (!composite || !op->hasKernelForDispatchKey(DispatchKey::CPU)) continue;
    auto full = name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
    library.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
  return true;
}();
TORCH_LIBRARY(standin, m) {
  m.def("default_generator(int device) -> Generator?", [](int64_t device) { return default_generator(device); });
}
}  // namespace standin

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &standin::choose_attention)
}
namespace at {  // the macros want its names
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define UPPER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define UPPER_UNLESS_SAID(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define WIDEST(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
  AT_FORALL_FP32(UPPER)
  AT_FORALL_FP32_SET_OPT_DTYPE(UPPER_UNLESS_SAID)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
  AT_FORALL_PROMOTE(WIDEST)
}
}  // namespace at

using namespace standin;
extern "C" {
int standin_current_device() { return current_device; }
int standin_device_count() { return kDevices; }
void standin_set_device(int device) { current_device = device; }

void standin_schedule(int default_stream, int other_streams, uint64_t seed) {
  LOCKED;
  for (int device = 0; device < kDevices; device++)
    for (int stream = 0; stream < kStreams; stream++) finish(device, stream);
  for (int stream = 0; stream < kStreams; stream++) world().policy[stream] = stream ? other_streams : default_stream;
  world().random.seed(seed);
}
void standin_set_capacity(int device, int64_t bytes) { LOCKED; memory(device).capacity = bytes; }
int64_t standin_capacity(int device) { LOCKED; return memory(device).capacity; }
void standin_set_unit(int64_t bytes) { LOCKED; unit = bytes; }
int64_t standin_unit() { LOCKED; return unit; }
void standin_set_poisoned(int64_t on) { LOCKED; poisoned = on; }
int64_t standin_poisoned() { LOCKED; return poisoned; }
void standin_set_expandable_segments(int64_t on) { LOCKED; expandable_segments = on; }
int64_t standin_expandable_segments() { LOCKED; return expandable_segments; }
void standin_set_fused_attention(int64_t on) { LOCKED; fused_attention = on; }
int64_t standin_fused_attention() { LOCKED; return fused_attention; }

void standin_set_kept_workspace(int64_t bytes) {
  LOCKED;
  workspaces().kept_bytes = bytes;
  if (!bytes) workspaces().kept.clear();
}
void standin_set_workspace(const char* op, int64_t bytes) {
  LOCKED;
  if (bytes) workspaces().bytes_by_op[op] = bytes;
  else workspaces().bytes_by_op.erase(op);
}

int64_t standin_host_ns() { LOCKED; return the_clock().host_ns; }
void standin_host_works(int64_t ns) { LOCKED; the_clock().host_ns += ns; }
void standin_set_times(int64_t op_ns, int64_t launch_ns, double copy_ns_per_byte) {
  LOCKED;
  the_clock().op_ns = op_ns, the_clock().launch_ns = launch_ns, the_clock().copy_ns_per_byte = copy_ns_per_byte;
}
void standin_set_op_time(const char* op, int64_t ns) {
  LOCKED;
  if (ns >= 0) the_clock().ns_by_op[op] = ns;
  else the_clock().ns_by_op.erase(op);
}

void standin_set_pin_limit(int64_t bytes) { LOCKED; pinned().limit = bytes; }
int64_t standin_pin_limit() { LOCKED; return pinned().limit; }
int64_t standin_pinned_bytes() { LOCKED; return pinned().bytes; }
int standin_host_register(void* p, int64_t bytes) { return register_host(p, bytes); }
int standin_host_unregister(void* p) { return unregister_host(p); }

// Autograd's thread of each device lets go of what it holds after backward returned, Python objects among it. It is
// done with that when it has done one backward more: from a new thread, whose own state holds none.
void standin_finish_backward_threads() {
  std::thread([] {
    for (int device = 0; device < kDevices; device++) {
      auto leaf = at::zeros({}, at::TensorOptions(Device(kType, device))).requires_grad_();
      torch::autograd::backward({leaf + 1}, {at::ones({}, leaf.options().requires_grad(false))});
    }
  }).join();
}

void* standin_host_address(void* device_address) { return real(device_address); }
int64_t standin_launched() { LOCKED; return world().launched; }
int64_t standin_synchronized() { LOCKED; return world().synchronized; }
int64_t standin_unregistered_in_use() { LOCKED; return world().unregistered_in_use; }
}
