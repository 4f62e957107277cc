// Values of sparse tensors. Their operators are mostly made of dense ones, which have values. Those that CUDA has
// kernels of its own for are computed here, by the CPU's operator on the same memory; without that a sum of equal
// entries would be empty, and so would what is allocated for it.
//
// The originals are not called: how many entries a result has they would read from memory that no kernel has written.
// So their temporaries are missing. Where values are skipped, entries are still counted, by their indices.
#include <ATen/SparseCsrTensorImpl.h>
#include <ATen/SparseTensorImpl.h>

#include "values.h"

#include "kernel_behind_key.h"

#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

extern "C" {
void standin_own_work(int begins);
void standin_record_host_wait(void* stream);
void standin_count_wait();
void standin_catch_up(void* stream);
}

namespace values {
namespace {
using c10::DispatchKey;
using torch::jit::Stack;

// Those that differ from the CPU's in native_functions.yaml, and those that call kernels of CUDA's through a stub.
const std::vector<std::string> OF_COORDINATES = {
    "_coalesce", "add.out", "addmm", "addmm.out", "addmm_", "bmm", "bmm.out", "hspmm", "hspmm.out", "index_select",
    "mul.out", "sparse_mask", "sspaddmm.out", "_sparse_log_softmax", "_sparse_log_softmax_backward_data",
    "_sparse_mask_projection", "_sparse_softmax", "_sparse_softmax_backward_data", "_sparse_sparse_matmul",
    "_sparse_sum_backward"};
const std::vector<std::string> OF_ROWS = {"add.out", "addmm.out", "addmv.out", "sparse_sampled_addmm",
                                          "sparse_sampled_addmm.out", "_sparse_csr_sum.dim_dtype",
                                          "_sparse_csr_prod.dim_dtype"};

bool is_rows(const Tensor& t) { return t.layout() == at::kSparseCsr; }
template <class F>
void for_each_part(const Tensor& t, F f) {
  if (!t.defined()) return;
  if (t.is_sparse()) f(t._indices()), f(t._values());
  else if (is_rows(t)) f(t.crow_indices()), f(t.col_indices()), f(t.values());
  else f(t);
}
// Of the coordinates and values that it is given: nothing is copied.
Tensor of_parts(const Tensor& like, const Tensor& indices, const Tensor& values, at::IntArrayRef sizes) {
  return at::_sparse_coo_tensor_unsafe(indices, values, sizes)._coalesced_(like.is_coalesced());
}
Tensor of_rows(const Tensor& rows, const Tensor& columns, const Tensor& values, at::IntArrayRef sizes) {
  return at::_sparse_csr_tensor_unsafe(rows, columns, values, sizes, values.scalar_type(), at::kSparseCsr,
                                       values.device(), false);
}
Tensor to_host(const Tensor& t, bool widened) {
  if (!is_cuda(t)) return t;
  auto wide = [&](const Tensor& part) { return widened ? float32(on_host(part)) : on_host(part); };
  if (t.is_sparse()) return of_parts(t, on_host(t._indices()), wide(t._values()), t.sizes());
  if (is_rows(t)) return of_rows(on_host(t.crow_indices()), on_host(t.col_indices()), wide(t.values()), t.sizes());
  TORCH_CHECK(t.layout() == at::kStrided, "a tensor of layout ", t.layout());
  return wide(t);
}
Tensor to_device(const Tensor& made, c10::Device device, maybe::optional<at::ScalarType> half) {
  if (!made.defined()) return made;
  if (made.is_sparse())
    return of_parts(made, to_device(made._indices(), device, {}), to_device(made._values(), device, half),
                    made.sizes());
  if (is_rows(made))
    return of_rows(to_device(made.crow_indices(), device, {}), to_device(made.col_indices(), device, {}),
                   to_device(made.values(), device, half), made.sizes());
  auto dtype = half && made.is_floating_point() ? *half : made.scalar_type();
  Tensor out = at::empty_strided(made.sizes(), made.strides(), made.options().device(device).dtype(dtype));
  put(on_host(out), made);
  return out;
}
void put_into(const Tensor& into, const Tensor& made, maybe::optional<at::ScalarType> half) {
  if (into.is_sparse()) {
    Tensor moved = to_device(made, into.device(), half);
    auto* impl = static_cast<at::SparseTensorImpl*>(into.unsafeGetTensorImpl());
    impl->raw_resize_(moved.sparse_dim(), moved.dense_dim(), moved.sizes());
    impl->set_indices_and_values_unsafe(moved._indices(), moved._values());
    into._coalesced_(moved.is_coalesced());
  } else if (is_rows(into)) {
    Tensor moved = to_device(made, into.device(), half);
    static_cast<at::SparseCsrTensorImpl*>(into.unsafeGetTensorImpl())
        ->set_member_tensors(moved.crow_indices(), moved.col_indices(), moved.values(), moved.sizes());
  } else {
    if (into.sizes() != made.sizes()) into.resize_(made.sizes());
    put(on_host(into), made);
  }
}
Tensor empty_like(const Tensor& out, bool widened) {  // for a result; its old numbers are not asked for
  auto dtype = widened && is_half(out.scalar_type()) ? at::kFloat : out.scalar_type();
  auto options = at::TensorOptions().dtype(dtype);
  if (out.layout() == at::kStrided) return at::empty({0}, options);
  return at::zeros(out.sizes(), options.layout(out.layout()));
}

// Entries of the same indices are one: their number is known without their values.
Tensor counted(const Tensor& t) {
  Tensor values = t._values();
  Tensor marks = at::zeros({values.size(0)}, at::kFloat);
  Tensor one = of_parts(t, on_host(t._indices()), marks, t.sizes().slice(0, t.sparse_dim())).coalesce();
  std::vector<int64_t> sizes = values.sizes().vec();
  sizes[0] = one._nnz();
  Tensor left = at::empty(sizes, values.options());
  zero((char*)left.data_ptr(), left.nbytes());
  return at::_sparse_coo_tensor_unsafe(to_device(one._indices(), t.device(), {}), left, t.sizes())._coalesced_(true);
}

// A dense result whose size no value decides, of zeros; undefined: it is sparse, or depends on them.
Tensor zeros_for(const std::string& name, const std::vector<IValue>& in) {
  auto tensor = [&](size_t i) { return in[i].toTensor(); };
  std::vector<int64_t> sizes;
  if (name.rfind("addmm", 0) == 0 && name != "addmm_") sizes = {tensor(1).size(0), tensor(2).size(1)};
  else if (name == "addmv.out") sizes = {tensor(1).size(0)};
  else if (name.rfind("bmm", 0) == 0) sizes = {tensor(0).size(0), tensor(0).size(1), tensor(1).size(2)};
  else if (name == "add.out") sizes = (tensor(0).layout() == at::kStrided ? tensor(0) : tensor(1)).sizes().vec();
  else return {};
  bool is_out = name.find(".out") != std::string::npos;
  Tensor like = is_out ? in.back().toTensor() : name == "bmm" ? tensor(1) : tensor(2);
  if (like.layout() != at::kStrided) return {};
  if (is_out && like.sizes() != at::IntArrayRef(sizes)) like.resize_(sizes);
  Tensor out = is_out ? like : at::empty(sizes, like.options());
  if (out.is_contiguous()) zero((char*)out.data_ptr(), out.nbytes());
  else on_host(out).zero_();
  return out;
}

class OfSparse : public c10::OperatorKernel {
 public:
  OfSparse(std::string name, DispatchKey on_cpu, Kernel original)
      : name_(std::move(name)), on_cpu_(on_cpu), original_(std::move(original)) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
    standin_own_work(1);
    struct Ends {
      ~Ends() { standin_own_work(0); }
    } ends;
    const auto& schema = op.schema();
    std::vector<IValue> in(stack->end() - schema.arguments().size(), stack->end());
    size_t bytes = 0;
    c10::Device device(c10::kCUDA);
    maybe::optional<at::ScalarType> half;
    for (const IValue& v : in) {
      if (!v.isTensor() || !v.toTensor().defined()) continue;
      if (is_cuda(v.toTensor())) device = v.toTensor().device();
      if (is_half(v.toTensor().scalar_type())) half = v.toTensor().scalar_type();
      for_each_part(v.toTensor(), [&](const Tensor& part) { bytes += part.nbytes(); });
    }
    void* stream = (void*)c10::cuda::getCurrentCUDAStream(device.index()).stream();
    standin_catch_up(stream);
    bool skipped = nothing_is_computed || bytes > limits.bytes;
    if (name_ == "_coalesce") {
      standin_count_wait();  // for the number of entries
      standin_record_host_wait(stream);
    }
    if (skipped && name_ == "_coalesce") {
      Below below;
      Tensor one = counted(in[0].toTensor());
      stack->resize(stack->size() - in.size());
      stack->emplace_back(one);
      return;
    }
    if (skipped) {
      Below below;
      Tensor zeros = zeros_for(name_, in);
      if (zeros.defined()) {
        stack->resize(stack->size() - in.size());
        stack->emplace_back(zeros);
        return;
      }
    }
    try {
      std::vector<IValue> out = computed(op, in, device, half);
      stack->resize(stack->size() - in.size());
      for (IValue& v : out) stack->push_back(std::move(v));
    } catch (const std::exception& e) {
      note_missing("aten::" + name_, e.what(), false);
      original_.callBoxed(op, keys, stack);
    }
  }

 private:
  std::vector<IValue> computed(const c10::OperatorHandle& op, const std::vector<IValue>& in, c10::Device device,
                               maybe::optional<at::ScalarType> half) {
    Below below;
    const auto& schema = op.schema();
    Stack made;
    std::vector<Tensor> written;  // in the order in which they are returned
    for (size_t i = 0; i < in.size(); i++) {
      const auto& argument = schema.arguments()[i];
      bool is_tensor = in[i].isTensor() && in[i].toTensor().defined();
      if (is_tensor && argument.alias_info() && argument.alias_info()->isWrite())
        written.push_back(in[i].toTensor());
      if (is_tensor && argument.is_out()) made.emplace_back(empty_like(in[i].toTensor(), half.has_value()));
      else if (is_tensor) made.emplace_back(to_host(in[i].toTensor(), half.has_value()));
      else if (argument.name() == "half_to_float") made.emplace_back(false);
      else made.push_back(in[i]);
    }
    op.redispatchBoxed(c10::DispatchKeySet(on_cpu_), &made);
    std::vector<IValue> out;
    for (size_t i = 0; i < schema.returns().size(); i++) {
      const IValue& v = made[made.size() - schema.returns().size() + i];
      const auto& alias = schema.returns()[i].alias_info();
      if (alias && alias->isWrite()) {
        put_into(written.at(i), v.toTensor(), half);
        out.emplace_back(written.at(i));
      } else {
        out.emplace_back(to_device(v.toTensor(), device, half));
      }
    }
    return out;
  }

  std::string name_;
  DispatchKey on_cpu_;
  Kernel original_;
};

struct InstallSparse {
  InstallSparse() {
    struct Quiet : c10::WarningHandler {  // each replacement is warned of
      void process(const c10::Warning&) override {}
    } quiet;
    c10::WarningUtils::WarningHandlerGuard guard(&quiet);
    replace(OF_COORDINATES, DispatchKey::SparseCUDA, DispatchKey::SparseCPU);
    replace(OF_ROWS, DispatchKey::SparseCsrCUDA, DispatchKey::SparseCsrCPU);
  }
  void replace(const std::vector<std::string>& names, DispatchKey on_cuda, DispatchKey on_cpu) {
    auto* library = new torch::Library(torch::Library::IMPL, "aten", on_cuda, __FILE__, __LINE__);
    for (const auto& name : names) {
      auto dot = name.find('.');
      auto op = c10::Dispatcher::singleton().findOp(
          {"aten::" + name.substr(0, dot), dot == std::string::npos ? "" : name.substr(dot + 1)});
      if (!op || !op->hasKernelForDispatchKey(on_cuda)) continue;  // PyTorch of another time
      library->impl(name.c_str(), torch::CppFunction::makeFromBoxedFunctor(std::make_unique<OfSparse>(
                                      name, on_cpu, kernel_of(*op, on_cuda))));
    }
  }
} install_sparse;
}  // namespace
}  // namespace values
