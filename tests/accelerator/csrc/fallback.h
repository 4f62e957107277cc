// Every op that has no kernel of its own: shapes from the meta kernel now, the CPU's kernel on the same memory later.
#pragma once
#include "kernels.h"

namespace standin {
using torch::jit::Stack;

struct Workspaces {
  size_t kept_bytes = 0;                       // as cuBLAS': one for each stream, at the first matrix product, for good
  std::map<std::string, size_t> bytes_by_op;   // as cuDNN's: for as long as the op is enqueued
  std::map<std::pair<int, int>, DataPtr> kept; // by device and stream
};
inline Workspaces& workspaces() {
  static auto* it = new Workspaces;
  return *it;
}
inline DataPtr workspace_for(const std::string& name) {
  LOCKED;
  auto& w = workspaces();
  static const std::set<std::string> products{"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"};
  if (w.kept_bytes && products.count(name)) {
    auto& mine = w.kept[{current_device, current_streams[current_device]}];
    if (!mine) mine = allocator().allocate(w.kept_bytes);
  }
  auto it = w.bytes_by_op.find(name);
  return it == w.bytes_by_op.end() ? DataPtr() : allocator().allocate(it->second);
}

inline bool holds(const TypePtr& type, TypeKind kind) {
  if (type->kind() == kind) return true;
  if (type->kind() == TypeKind::OptionalType) return holds(type->expectRef<OptionalType>().getElementType(), kind);
  if (type->kind() == TypeKind::ListType) return holds(type->expectRef<ListType>().getElementType(), kind);
  return false;
}
template <class F> void for_each_tensor(const IValue& v, F f) {
  if (v.isTensor()) f(v.toTensor());
  else if (v.isTensorList()) for (at::Tensor t : v.toTensorVector()) f(t);
  else if (v.isOptionalTensorList()) for (std::optional<at::Tensor> t : v.toOptionalTensorList()) if (t) f(*t);
}
inline std::vector<at::Tensor> flat(const Stack& stack) {
  std::vector<at::Tensor> all;
  for (auto& v : stack) for_each_tensor(v, [&](const at::Tensor& t) { all.push_back(t); });
  return all;
}
template <class F> IValue with_tensors(const IValue& v, F f) {
  if (v.isTensor()) return f(v.toTensor());
  if (v.isTensorList()) {
    List<at::Tensor> list;
    for (at::Tensor t : v.toTensorVector()) list.push_back(f(t));
    return list;
  }
  if (v.isOptionalTensorList()) {
    List<std::optional<at::Tensor>> list;
    for (std::optional<at::Tensor> t : v.toOptionalTensorList())
      list.push_back(t && t->defined() ? std::optional<at::Tensor>(f(*t)) : std::nullopt);
    return list;
  }
  return v;
}

struct DefaultCpuSeed {  // some random ops take no generator
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  at::Tensor before = generator.get_state();
  explicit DefaultCpuSeed(uint64_t seed) { generator.set_current_seed(seed); }
  ~DefaultCpuSeed() { generator.set_state(before); }
};

// The CPU's kernel for an op, and its arguments: for convolutions, torch has ops of their own for outside devices.
inline void name_cpu_kernel(OperatorHandle& op, Stack& arguments, const Stack& given) {
  const auto& name = op.schema().name();
  auto& dispatcher = Dispatcher::singleton();
  if (name == "aten::convolution_overrideable") op = dispatcher.findSchemaOrThrow("aten::convolution", "");
  if (name == "aten::convolution_backward_overrideable") {
    op = dispatcher.findSchemaOrThrow("aten::convolution_backward", "");
    auto weight = given[2].toTensor();
    bool transposed = given[6].toBool();
    std::vector<int64_t> bias_size{transposed ? weight.size(1) * given[8].toInt() : weight.size(0)};
    arguments.insert(arguments.begin() + 3, IValue(std::optional<std::vector<int64_t>>(bias_size)));
  }
}

// A device keeps mean and deviation of a layer norm in float; the CPU's kernel expects them as it made them.
inline void name_cpu_types(const std::string& name, Stack& arguments) {
  if (name != "aten::native_layer_norm_backward") return;
  auto type = arguments[1].toTensor().scalar_type();
  auto weight = arguments[5].toOptional<at::Tensor>();
  if (weight && weight->defined() && weight->scalar_type() != type) return;
  for (int statistic : {3, 4}) arguments[statistic] = arguments[statistic].toTensor().to(type);
}

struct Call {
  OperatorHandle op;
  const FunctionSchema& schema;
  Stack given;
  Device device = Device(kType, current_device);
  std::optional<uint64_t> seed;

  Call(const OperatorHandle& handle, const Stack& stack) : op(handle), schema(handle.schema()) {
    given.assign(stack.end() - schema.arguments().size(), stack.end());
    find_device();
    if (op.hasTag(at::Tag::nondeterministic_seeded)) draw_seed();
  }
  void find_device() {
    auto tensors = flat(given);
    auto it = std::find_if(tensors.begin(), tensors.end(), ours);
    if (it != tensors.end()) device = it->device();
    else for (auto& v : given) if (v.isDevice()) device = v.toDevice();
    bool indexing = schema.name().find("index") != std::string::npos;  // indices may be on the CPU
    for (auto& t : tensors)
      TORCH_CHECK(!t.defined() || (ours(t) ? t.device() == device : !t.is_cpu() || t.dim() == 0 || indexing),
                  "Expected all tensors to be on the same device, but found at least two devices, ", device, " and ",
                  t.device(), "! (", schema.name(), ")");
    if (device.index() < 0) device.set_index(current_device);
  }
  void draw_seed() {
    at::Generator generator = default_generator(device.index());
    int64_t numbers = 1;
    for (auto& v : given) {
      if (v.isGenerator() && v.toGenerator().defined()) generator = v.toGenerator();
      for_each_tensor(v, [&](const at::Tensor& t) { numbers = std::max(numbers, t.defined() ? t.numel() : 0); });
    }
    seed = draw(generator, numbers);
  }
  template <class F> Stack arguments(F tensor, DeviceType type) const {
    Stack made;
    for (size_t i = 0; i < given.size(); i++) {
      const auto& v = given[i];
      if (v.isDevice() && v.toDevice().type() == kType) made.emplace_back(Device(type));
      else if (seed && holds(schema.arguments()[i].type(), TypeKind::GeneratorType))
        made.push_back(type == DeviceType::CPU ? IValue(at::detail::createCPUGenerator(*seed)) : IValue());
      else made.push_back(with_tensors(v, tensor));
    }
    return made;
  }
  // The argument that result ``i`` is.
  std::optional<size_t> written(size_t i) const {
    auto* alias = schema.returns()[i].alias_info();
    if (alias)
      for (size_t a = 0; a < given.size(); a++)
        if (schema.arguments()[a].alias_info() && *schema.arguments()[a].alias_info() == *alias) return a;
    return std::nullopt;
  }
  bool is_view() const {
    for (auto& r : schema.returns()) if (r.alias_info() && !r.alias_info()->isWrite()) return true;
    return false;
  }

  // ---- views: the CPU's kernel is asked for the layout

  Stack view() const {
    Below below;
    Aliases aliases;
    std::map<StorageImpl*, at::Tensor> bases;
    auto results = arguments([&](const at::Tensor& t) {
      if (!ours(t)) return t;
      auto made = aliases.of(t);
      bases[made.storage().unsafeGetStorageImpl()] = t;
      return made;
    }, DeviceType::CPU);
    op.callBoxed(&results);
    for (auto& v : results) v = with_tensors(v, [&](const at::Tensor& t) {
      auto it = bases.find(t.storage().unsafeGetStorageImpl());
      TORCH_CHECK(it != bases.end(), "standin: ", schema.name(), " made no view");
      return view_of(it->second, t);
    });
    return results;
  }

  // ---- kernels

  // What comes out, and the sizes that ``out=`` tensors get. None where it depends on data, or there is no meta kernel.
  std::optional<Stack> results_on_meta() const {
    bool all_written = true, out = false;
    for (size_t i = 0; i < schema.returns().size(); i++) {
      if (!holds(schema.returns()[i].type(), TypeKind::TensorType)) return std::nullopt;
      all_written &= written(i).has_value();
    }
    for (auto& a : schema.arguments()) out |= a.is_out();
    if (all_written && !out) return Stack(schema.returns().size());
    Stack results;
    std::vector<std::pair<at::Tensor, at::Tensor>> outs;
    try {
      Below below;
      results = arguments([](const at::Tensor& t) { return ours(t) ? meta_like(t) : t; }, DeviceType::Meta);
      for (size_t i = 0; i < given.size(); i++)
        if (schema.arguments()[i].is_out() && given[i].isTensor()) outs.emplace_back(given[i].toTensor(), results[i].toTensor());
      op.callBoxed(&results);
    } catch (const std::exception&) {
      return std::nullopt;
    }
    for (auto& t : flat(results)) if (t.defined() && t.device().type() != DeviceType::Meta) return std::nullopt;
    for (auto& [t, meta] : outs) if (t.sizes() != meta.sizes()) {
      t.resize_(meta.sizes());
      t.unsafeGetTensorImpl()->set_sizes_and_strides(meta.sizes(), meta.strides());
    }
    return results;
  }
  std::function<Stack()> kernel() const {
    Aliases aliases;
    auto inside = arguments([&](const at::Tensor& t) {
      if (ours(t) || !t.defined()) return aliases.of(there(t));
      Below below;  // a CPU scalar or index: its value now
      auto copy = t.clone();
      if (t.unsafeGetTensorImpl()->is_wrapped_number()) copy.unsafeGetTensorImpl()->set_wrapped_number(true);
      return copy;
    }, DeviceType::CPU);
    OperatorHandle on_cpu = op;
    name_cpu_kernel(on_cpu, inside, given);
    bool has_generator = false;
    for (auto& a : schema.arguments()) has_generator |= holds(a.type(), TypeKind::GeneratorType);
    auto default_seed = has_generator ? std::nullopt : seed;
    return [on_cpu, inside, default_seed]() mutable {
      std::optional<DefaultCpuSeed> seeded;
      if (default_seed) seeded.emplace(*default_seed);
      name_cpu_types(on_cpu.schema().name(), inside);
      on_cpu.callBoxed(&inside);
      return std::move(inside);
    };
  }
  // New device tensors like those in ``results``; for what was written, the argument. ``targets``: by place in flat().
  Stack allocate(const Stack& results, std::vector<std::pair<size_t, at::Tensor>>& targets) const {
    Stack made;
    size_t place = 0;
    for (size_t i = 0; i < schema.returns().size(); i++) {
      if (auto a = written(i)) {
        made.push_back(given[*a]);
        for_each_tensor(given[*a], [&](const at::Tensor&) { place++; });
        continue;
      }
      made.push_back(with_tensors(results[i], [&](const at::Tensor& t) {
        size_t here = place++;
        if (!t.defined()) return t;
        auto fresh = empty_strided(t.sizes(), t.strides(), t.scalar_type(), std::nullopt, device, std::nullopt);
        if (fresh.numel()) targets.emplace_back(here, kernel_view(fresh));
        return fresh;
      }));
    }
    return made;
  }
  static void store(const std::vector<at::Tensor>& results, const std::vector<std::pair<size_t, at::Tensor>>& targets) {
    for (auto& [place, target] : targets)  // a CPU kernel may leave out what others save
      if (results[place].defined() && results[place].numel()) target.copy_(results[place]);
  }
  Stack run() const {
    const auto& name = schema.name();
    auto meta = results_on_meta();
    std::vector<std::pair<size_t, at::Tensor>> targets;
    auto workspace = workspace_for(name);
    if (meta) {
      auto made = allocate(*meta, targets);
      launch([kernel = kernel(), targets]() mutable { store(flat(kernel()), targets); }, COMPUTE, op_ns(name));
      return made;
    }
    launch([] {}, COMPUTE, op_ns(name));
    synchronize_stream(device.index(), current_streams[device.index()]);
    Stack results;
    {
      LOCKED;
      Below below;
      results = kernel()();
    }
    auto made = allocate(results, targets);
    launch([results = flat(results), targets] { store(results, targets); }, NONE, 0);
    return made;
  }
};

inline void fallback(const OperatorHandle& op, Stack* stack) {
  Call call(op, *stack);
  DeviceGuard guard(call.device);
  Stack results = call.is_view() ? call.view() : call.run();
  stack->erase(stack->end() - call.given.size(), stack->end());
  stack->insert(stack->end(), results.begin(), results.end());
}
}  // namespace standin
