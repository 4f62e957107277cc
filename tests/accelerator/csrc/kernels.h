// Tensors of the device as kernels see them, copies, and the ops that make or resize memory.
#pragma once
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include "hooks.h"

namespace standin {
// Below autograd, autocast and every Python mode: what a kernel runs nobody sees. BackendSelect must stay, or factory
// functions find no kernel.
struct Below {
  impl::ForceDispatchKeyGuard guard{
      DispatchKeySet(DispatchKey::BackendSelect),
      autograd_dispatch_keyset | autocast_dispatch_keyset |
          DispatchKeySet({DispatchKey::ADInplaceOrView, DispatchKey::Python, DispatchKey::PythonTLSSnapshot,
                          DispatchKey::Functionalize, DispatchKey::PreDispatch})};
};
inline bool ours(const at::Tensor& t) { return t.defined() && t.device().type() == kType; }

inline at::Tensor with_layout_of(const at::Tensor& t, at::Tensor made) {
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_storage_offset(t.storage_offset());
  impl->set_sizes_and_strides(t.sizes(), t.strides());
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  if (t.is_conj()) made._set_conj(true);
  if (t.is_neg()) made._set_neg(true);
  return made;
}
inline at::Tensor on_storage(const at::Tensor& t, Storage storage, DispatchKey key) {
  return with_layout_of(t, at::detail::make_tensor<TensorImpl>(std::move(storage), DispatchKeySet(key), t.dtype()));
}
// ``layout`` as a view of ``base``: it has the keys of what it looks at, or inference mode refuses it.
inline at::Tensor view_of(const at::Tensor& base, const at::Tensor& layout) {
  Storage storage = base.storage();
  return with_layout_of(layout, at::detail::make_tensor<TensorImpl>(TensorImpl::VIEW, std::move(storage), base.key_set(), layout.dtype()));
}

// CPU tensors on the same memory. They hold the address and do not keep the memory, as a kernel's arguments.
struct Aliases {
  std::map<StorageImpl*, Storage> seen;  // tensors that share memory still do
  at::Tensor of(const at::Tensor& t) {
    if (!t.defined()) return t;
    auto* owner = t.storage().unsafeGetStorageImpl();
    auto it = seen.find(owner);
    if (it == seen.end()) {
      void* address = ours(t) ? real(owner->mutable_data()) : owner->mutable_data();
      DataPtr raw(address, nullptr, [](void*) {}, Device(DeviceType::CPU));
      auto storage = make_intrusive<StorageImpl>(StorageImpl::use_byte_size_t(), owner->nbytes(), std::move(raw), nullptr, false);
      it = seen.emplace(owner, Storage(std::move(storage))).first;
    }
    return on_storage(t, it->second, DispatchKey::CPU);
  }
};
// A kernel that reads past a storage is an error of the address there; here it is one of the call that starts it.
inline const at::Tensor& there(const at::Tensor& t) {
  if (!t.defined() || !t.numel()) return t;
  size_t bytes = at::detail::computeStorageNbytes(t.sizes(), t.strides(), t.itemsize(), t.storage_offset());
  TORCH_CHECK(bytes <= t.storage().nbytes(), "standin: a kernel is given ", bytes, " bytes in a storage of ", t.storage().nbytes());
  return t;
}
inline at::Tensor kernel_view(const at::Tensor& t) { return Aliases().of(there(t)); }
inline at::Tensor meta_like(const at::Tensor& t) {
  auto none = make_intrusive<StorageImpl>(StorageImpl::use_byte_size_t(), t.storage().nbytes(), DataPtr(nullptr, Device(DeviceType::Meta)),
                                          GetAllocator(DeviceType::Meta), true);
  return on_storage(t, Storage(std::move(none)), DispatchKey::Meta);
}

// Queues a kernel. If the schedule runs it at once and it fails, it fails here.
inline void launch(std::function<void()> kernel, Engine engine, int64_t ns, const at::Tensor& host = {}) {
  LOCKED;
  int device = current_device;
  Work work{[kernel = std::move(kernel)] {
    Below below;
    kernel();
  }};
  if (host.defined()) work.host_begin = static_cast<const char*>(host.const_data_ptr()), work.host_bytes = host.nbytes();
  push(device, current_streams[device], std::move(work), engine, ns);
  if (world().policy[current_streams[device]] == EARLY) report_error();
}

// ---- copies

inline void note_use(const at::Tensor& host) {
  HostAllocator::self().record_event(nullptr, host.storage().data_ptr().get_context(), current_stream(current_device));
}
inline void copy_within(const at::Tensor& from, const at::Tensor& to) {
  bool far = from.device() != to.device();
  if (far) synchronize_device(from.device().index());  // stricter than CUDA, where the two current streams wait
  Aliases aliases;
  auto copy = [a = aliases.of(there(from)), b = aliases.of(there(to))] { b.copy_(a); };
  launch(copy, far ? COPY_IN : COMPUTE, far ? copy_ns(from.nbytes()) : op_ns("aten::copy_"));
  if (far) synchronize_device(to.device().index());
}
inline void copy_in(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  bool direct = non_blocking && is_pinned(from.const_data_ptr());  // then: whatever is there when the copy runs
  at::Tensor source;
  if (direct) source = kernel_view(from);
  else {
    Below below;
    source = from.detach().clone();
  }
  launch([source, b = kernel_view(to)] { b.copy_(source); }, COPY_IN, copy_ns(from.nbytes()), direct ? from : at::Tensor());
  if (direct) note_use(from);
  else host_waits_until(queue(current_device, current_streams[current_device]).finished_ns);
}
inline void copy_out(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  launch([a = kernel_view(from), b = kernel_view(to)] { b.copy_(a); }, COPY_OUT, copy_ns(from.nbytes()), to);
  if (non_blocking && is_pinned(to.const_data_ptr())) note_use(to);
  else synchronize_stream(current_device, current_streams[current_device]);
}
inline at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  DeviceGuard guard(ours(to) ? to.device() : from.device());
  if (ours(from) && ours(to)) copy_within(from, to);
  else if (ours(to)) copy_in(from, to, non_blocking);
  else copy_out(from, to, non_blocking);
  return to;
}
inline at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return to.copy_(from);
}

// ---- memory

inline Device checked(std::optional<Layout> layout, std::optional<Device> device, std::optional<bool> pin) {
  TORCH_CHECK(layout_or_default(layout) == Layout::Strided, "standin: only dense tensors");
  TORCH_CHECK(!pinned_memory_or_default(pin), "Only dense CPU tensors can be pinned");
  return device_or_default(device);
}
inline at::Tensor empty_strided(IntArrayRef size, IntArrayRef stride, std::optional<ScalarType> dtype, std::optional<Layout> layout,
                                std::optional<Device> device, std::optional<bool> pin) {
  DeviceGuard guard(checked(layout, device, pin));
  return at::detail::empty_strided_generic(size, stride, &allocator(), DispatchKeySet(DispatchKey::PrivateUse1), dtype_or_default(dtype));
}
inline at::Tensor empty(IntArrayRef size, std::optional<ScalarType> dtype, std::optional<Layout> layout, std::optional<Device> device,
                        std::optional<bool> pin, std::optional<MemoryFormat> format) {
  DeviceGuard guard(checked(layout, device, pin));
  return at::detail::empty_generic(size, &allocator(), DispatchKeySet(DispatchKey::PrivateUse1), dtype_or_default(dtype), format);
}
inline void grow(const at::Tensor& t, size_t bytes) {
  if (bytes > t.storage().nbytes()) resize_bytes(t.storage(), bytes);
}
inline const at::Tensor& resize_(const at::Tensor& self, IntArrayRef size, std::optional<MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  if (self.sizes() != size) {
    impl->set_sizes_contiguous(size);
    grow(self, (self.storage_offset() + impl->numel()) * self.element_size());
  }
  if (format && *format != MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  return self;
}
inline at::Tensor& set_storage(at::Tensor& self, Storage source, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  TORCH_CHECK(source.device() == self.device(), "standin: a storage on ", source.device(), " for a tensor on ", self.device());
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  if (stride.data() && stride.size() == size.size()) impl->set_sizes_and_strides(size, stride);
  else impl->set_sizes_contiguous(size);
  grow(self, at::detail::computeStorageNbytes(self.sizes(), self.strides(), self.element_size(), offset));
  return self;
}
inline at::Tensor& set_whole(at::Tensor& self, Storage source) {
  int64_t numel = source.nbytes() / self.element_size();
  return set_storage(self, std::move(source), 0, {numel}, {});
}
inline at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}
inline at::Tensor& set_empty(at::Tensor& self) {
  DeviceGuard guard(self.device());
  return set_storage(self, Storage(Storage::use_byte_size_t(), 0, &allocator(), true), 0, {0}, {});
}
inline void record_stream(at::Tensor& self, Stream stream) { allocator().recordStream(self.storage().data_ptr(), stream); }
}  // namespace standin
