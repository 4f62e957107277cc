// The kernel that PyTorch has behind a dispatch key. To be included after values.h.
#pragma once
#ifdef STANDIN_OLD_DISPATCH  // up to PyTorch 2.7 it can be had from OperatorEntry::lookup only
#define private public
#include <ATen/core/dispatch/Dispatcher.h>
#undef private
namespace values {
using Kernel = c10::KernelFunction;
inline Kernel kernel_of(const c10::OperatorHandle& op, c10::DispatchKey key) {
  return op.operatorDef_->op.lookup(c10::DispatchKeySet(key));
}
}  // namespace values
#else
#include <ATen/core/dispatch/Dispatcher.h>
namespace values {
using Kernel = c10::SafeKernelFunction;
inline Kernel kernel_of(const c10::OperatorHandle& op, c10::DispatchKey key) {
  return op.getComputedKernelForDispatchKey(key);
}
}  // namespace values
#endif
