// Runs the ops of a plan for which nothing is to be done, without Python.
//
// PyTorch calls a dispatch mode through the interpreter's table of functions. Ours is put in front of it: where the next
// op of the plan is the one that is called and has no action, its kernel runs as the mode would run it, with the mode
// off; all else goes on to the table that was there.

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/PyInterpreter.h>
#include <c10/core/impl/PyInterpreterHooks.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace {
using c10::impl::PyInterpreterVTable;
using c10::impl::TorchDispatchModeTLS;
using Table = PyInterpreterVTable;
using Impl = c10::TensorImpl;

// One op of a module call that is planned.
struct Op {
  std::optional<c10::OperatorHandle> known;  // none: it is Python's
  int64_t live_bytes;                        // planned to live before it
};
using Call = std::vector<Op>;

// What Python writes and reads (``device/planned_ops.py``).
struct Position {
  const Call* call;                        // null: each op is Python's
  void* mode;                              // the only one that may be in place
  int64_t next;
  const std::atomic<int64_t>* live_bytes;  // null: nobody counts
  int64_t more_bytes;                      // may live than planned; else the op is Python's, too,
  int64_t unsplit_bytes;                   // unless so much of it is what nobody asked for: then some are
  int64_t num_beyond;                      // ops at which it was
};
constexpr int64_t ASKED_EVERY = 16;
thread_local auto* position = new Position{};  // Python may write to it when the thread has ended

bool is_of_subclass(const c10::IValue& value) {
  return value.isTensor() && value.toTensor().defined() && value.toTensor().key_set().has(c10::DispatchKey::Python);
}

bool reads_subclass(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  for (auto value = stack.end() - op.schema().arguments().size(); value != stack.end(); ++value) {
    if (is_of_subclass(*value)) return true;
    if (!value->isList() || value->isIntList() || value->isDoubleList() || value->isBoolList()) continue;
    const auto& list = value->toListRef();
    if (std::any_of(list.begin(), list.end(), is_of_subclass)) return true;
  }
  return false;
}

bool has_room(Position& at, const Op& next) {
  if (at.live_bytes == nullptr) return true;
  const int64_t beyond = *at.live_bytes - next.live_bytes - at.more_bytes;
  return beyond <= 0 || (beyond <= at.unsplit_bytes && ++at.num_beyond % ASKED_EVERY != 0);
}

struct ModeAway {
  std::shared_ptr<c10::impl::PyObject_TorchDispatchMode> mode = TorchDispatchModeTLS::pop_stack();
  ~ModeAway() { TorchDispatchModeTLS::push_non_infra_mode_onto_stack(std::move(mode)); }
};

struct PlannedOps final : Table {
  const Table* there = nullptr;

  void dispatch(const c10::OperatorHandle& op, torch::jit::Stack* stack) const override {
    Position& at = *position;
    if (at.call != nullptr && at.next < static_cast<int64_t>(at.call->size())) {
      const Op& next = (*at.call)[at.next];
      if (next.known && *next.known == op && has_room(at, next) && TorchDispatchModeTLS::stack_len() == 1 &&
          TorchDispatchModeTLS::get_stack_at(0)->ptr(c10::impl::getGlobalPyInterpreter()) == at.mode &&
          torch::autograd::get_current_graph_task_id() == -1 && !reads_subclass(op, *stack)) {
        ++at.next;
        ModeAway away;
        op.callBoxed(stack);
        return;
      }
    }
    there->dispatch(op, stack);
  }

  // As before.
  std::string name() const override { return there->name(); }
  void incref(PyObject* o) const override { there->incref(o); }
  void decref(PyObject* o) const override { there->decref(o); }
  bool try_incref(const c10::impl::PyObjectSlot& s) const override { return there->try_incref(s); }
  size_t refcnt(PyObject* o) const override { return there->refcnt(o); }
  c10::intrusive_ptr<Impl> detach(const Impl* t) const override { return there->detach(t); }
  void reportErrorCallback(PyObject* f, c10::DispatchKey k) const override { there->reportErrorCallback(f, k); }
  void python_op_registration_trampoline(const c10::OperatorHandle& op, c10::DispatchKey k, c10::DispatchKeySet ks,
                                         torch::jit::Stack* s, bool with_keyset, bool with_op) const override {
    there->python_op_registration_trampoline(op, k, ks, s, with_keyset, with_op);
  }
  void throw_abstract_impl_not_imported_error(std::string op, const char* module, const char* context) const override {
    there->throw_abstract_impl_not_imported_error(std::move(op), module, context);
  }
  void python_dispatcher(const c10::OperatorHandle& op, c10::DispatchKeySet ks, torch::jit::Stack* s) const override {
    there->python_dispatcher(op, ks, s);
  }
  bool is_contiguous(const Impl* t, at::MemoryFormat f) const override { return there->is_contiguous(t, f); }
  c10::SymBool sym_is_contiguous(const Impl* t, at::MemoryFormat f) const override {
    return there->sym_is_contiguous(t, f);
  }
  bool is_strides_like(const Impl* t, at::MemoryFormat f) const override { return there->is_strides_like(t, f); }
  bool is_non_overlapping_and_dense(const Impl* t) const override { return there->is_non_overlapping_and_dense(t); }
  c10::Device device(const Impl* t) const override { return there->device(t); }
  int64_t dim(const Impl* t) const override { return there->dim(t); }
  c10::IntArrayRef strides(const Impl* t) const override { return there->strides(t); }
  c10::IntArrayRef sizes(const Impl* t) const override { return there->sizes(t); }
  c10::SymIntArrayRef sym_sizes(const Impl* t) const override { return there->sym_sizes(t); }
  c10::Layout layout(const Impl* t) const override { return there->layout(t); }
  int64_t numel(const Impl* t) const override { return there->numel(t); }
  c10::SymInt sym_numel(const Impl* t) const override { return there->sym_numel(t); }
  c10::SymIntArrayRef sym_strides(const Impl* t) const override { return there->sym_strides(t); }
  c10::SymInt sym_storage_offset(const Impl* t) const override { return there->sym_storage_offset(t); }
  using Kind = c10::DeviceType;
  using Id = uintptr_t;
  void trace_gpu_event_creation(Kind d, Id e) const override { there->trace_gpu_event_creation(d, e); }
  void trace_gpu_event_deletion(Kind d, Id e) const override { there->trace_gpu_event_deletion(d, e); }
  void trace_gpu_event_record(Kind d, Id e, Id s) const override { there->trace_gpu_event_record(d, e, s); }
  void trace_gpu_event_wait(Kind d, Id e, Id s) const override { there->trace_gpu_event_wait(d, e, s); }
  void trace_gpu_memory_allocation(Kind d, Id p) const override { there->trace_gpu_memory_allocation(d, p); }
  void trace_gpu_memory_deallocation(Kind d, Id p) const override { there->trace_gpu_memory_deallocation(d, p); }
  void trace_gpu_stream_creation(Kind d, Id s) const override { there->trace_gpu_stream_creation(d, s); }
  void trace_gpu_device_synchronization(Kind d) const override { there->trace_gpu_device_synchronization(d); }
  void trace_gpu_stream_synchronization(Kind d, Id s) const override { there->trace_gpu_stream_synchronization(d, s); }
  void trace_gpu_event_synchronization(Kind d, Id e) const override { there->trace_gpu_event_synchronization(d, e); }
  void reset_backward_hooks(const Impl* t) const override { there->reset_backward_hooks(t); }
};

PlannedOps& in_front() {
  static auto* table = new PlannedOps;  // PyTorch calls it until the process has ended
  return *table;
}
}  // namespace

extern "C" {
// In front of the table that is there. Once.
void lowtide_ops_install() {
  auto* interpreter = c10::impl::getGlobalPyInterpreter();
  if (interpreter->vtable_ == &in_front()) return;
  in_front().there = interpreter->vtable_;
  interpreter->vtable_ = &in_front();
}

// Of this thread.
void* lowtide_ops_position() { return position; }

// ``num`` ops that follow each other. No name: the op is Python's; one that is not registered is, too.
void* lowtide_ops_call(int64_t num, const char** names, const char** overloads, const int64_t* live_bytes) {
  auto* call = new Call;
  for (int64_t n = 0; n < num; ++n) {
    std::optional<c10::OperatorHandle> known;
    if (names[n] != nullptr) known = c10::Dispatcher::singleton().findSchema({names[n], overloads[n]});
    call->push_back({known, live_bytes[n]});
  }
  return call;
}

void lowtide_ops_free(void* call) { delete static_cast<Call*>(call); }
}
