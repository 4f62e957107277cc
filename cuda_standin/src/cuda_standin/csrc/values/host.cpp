// Large tensors of the host without values (STANDIN_SKIP_BYTES, rule 8): random weights, casts and copies of a model of
// any size take neither time nor memory. What is not written is what the system gives: pages of zeros that take nothing.
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include "values.h"

namespace values {
namespace {
using torch::jit::Stack;

class OnlyWrites : public c10::OperatorKernel {
 public:
  OnlyWrites(const std::string& name, Kernel original)
      : makes_zeros_(name == "aten::zero_"),
        is_copy_(name == "aten::copy_"),
        // a mask of ones must be seen as such
        limit_(name == "aten::fill_.Scalar" ? std::max<size_t>(limits.bytes, 64u << 20) : limits.bytes),
        original_(std::move(original)) {}
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
    size_t arguments = op.schema().arguments().size();
    const IValue& first = (*stack)[stack->size() - arguments];
    if (!left_out(first, *stack, arguments)) {
      original_.callBoxed(op, keys, stack);
      return;
    }
    IValue kept = first;
    if (makes_zeros_) zero((char*)kept.toTensor().data_ptr(), kept.toTensor().nbytes());
    bool returns = !op.schema().returns().empty();
    torch::jit::drop(*stack, arguments);
    if (returns) stack->push_back(std::move(kept));
  }

 private:
  bool left_out(const IValue& first, const Stack& stack, size_t arguments) const {
    auto large = [this](const Tensor& t) {
      return t.defined() && t.device().is_cpu() && t.is_floating_point() && t.nbytes() > limit_;
    };
    if (first.isTensorList()) {
      for (const Tensor& t : first.toTensorVector())
        if (large(t)) return true;
      return false;
    }
    if (!first.isTensor() || !large(first.toTensor())) return false;
    const Tensor& t = first.toTensor();
    if (makes_zeros_ && !t.is_non_overlapping_and_dense()) return false;
    // a copy from a device, or of integers: its values may be asked for
    const IValue& from = stack[stack.size() - arguments + 1];
    return !is_copy_ || (from.isTensor() && from.toTensor().device().is_cpu() && from.toTensor().is_floating_point());
  }
  bool makes_zeros_, is_copy_;
  size_t limit_;
  Kernel original_;
};
}  // namespace

void leave_large_host_tensors() {
  auto& dispatcher = c10::Dispatcher::singleton();
  static torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::CPU, __FILE__, __LINE__);
  // They only write numbers into what they are given. Foreach and fused ones are steps of optimizers on the host.
  static const char* const names[] = {
      "aten::normal_", "aten::uniform_", "aten::exponential_", "aten::erfinv_", "aten::zero_", "aten::fill_.Scalar",
      "aten::copy_", "aten::mul_.Tensor", "aten::add_.Tensor", "aten::sub_.Tensor", "aten::div_.Tensor",
      "aten::clamp_", "aten::addcdiv_", "aten::addcmul_", "aten::lerp_.Scalar", "aten::_foreach_add_.List",
      "aten::_foreach_add_.Scalar", "aten::_foreach_mul_.Scalar", "aten::_foreach_mul_.List",
      "aten::_foreach_lerp_.Scalar", "aten::_foreach_addcmul_.Scalar", "aten::_foreach_addcdiv_.ScalarList",
      "aten::_foreach_zero_", "aten::_fused_adam_", "aten::_fused_adamw_", "aten::_fused_sgd_"};
  for (std::string name : names) {
    auto dot = name.find('.');
    auto op = dispatcher.findOp({name.substr(0, dot), dot == std::string::npos ? "" : name.substr(dot + 1)});
    if (!op || !op->hasSchema()) continue;
    if (name != "aten::copy_" && !op->hasKernelForDispatchKey(c10::DispatchKey::CPU)) continue;
    auto leaves = std::make_unique<OnlyWrites>(name, kernel_of(*op, c10::DispatchKey::CPU));
    library.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunctor(std::move(leaves)));
  }
}
}  // namespace values
