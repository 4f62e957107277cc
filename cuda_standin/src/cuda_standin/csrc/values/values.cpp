// Right values for CUDA tensors whose kernels do nothing. Every ATen kernel of the CUDA key is replaced by one that
//   (a) calls the original, so that outputs, saved tensors, temporaries and workspaces are allocated as on a GPU, and
//   (b) submits to the current stream the same operator on CPU tensors that share the memory; what it gives is written
//       into the outputs of (a).
// Half types are computed in float32 and rounded. Random operators draw from a CPU generator seeded with the CUDA
// generator's (seed, offset), so that the same state gives the same bits.
#include "values.h"

#include <algorithm>
#include <condition_variable>
#include <iostream>
#include <list>
#include <type_traits>
#include <unordered_map>
#include "kernel_behind_key.h"

#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

extern "C" {
unsigned long long standin_thread_launches();
unsigned long long standin_thread_waits();
void standin_own_work(int begins);
int standin_not_own_work_begin();
void standin_not_own_work_end(int before);
void standin_record_host_wait(void* stream);
void standin_count_wait();
int standin_defers(void* stream);
int standin_capturing(void* stream);
void standin_catch_up(void* stream);
void standin_submit(void* stream, void (*run)(void*), void (*release)(void*), void* argument);
}

namespace values {
void leave_large_host_tensors();  // host.cpp
namespace {
using c10::FunctionSchema;
using c10::OperatorHandle;
using torch::jit::Stack;

// ---- what report() tells ----
std::mutex report_mutex;
std::map<std::string, std::pair<long, std::string>> without_values;  // operator -> calls, the last reason
std::map<std::string, long> calls;
bool strict = true;
void (*on_wait)(const char* operator_name) = nullptr;  // standin_on_wait: the host waited in this operator
std::string late_error;  // of work that ran after its call: the next call raises it, as a GPU's errors come later

void raise_late_error() {
  std::string what;
  {
    std::lock_guard<std::mutex> lock(report_mutex);
    what.swap(late_error);
  }
  TORCH_CHECK(what.empty(), what, " (work that ran late: an earlier call submitted it)");
}
}  // namespace
void note_missing(const std::string& name, std::string why, bool late) {
  why = why.substr(0, 400);
  std::replace(why.begin(), why.end(), '\n', ' ');  // a line of the report for each operator
  {
    std::lock_guard<std::mutex> lock(report_mutex);
    auto& r = without_values[name];
    r.first++;
    r.second = why;
  }
  // with values skipped anyway, one more that is missing changes nothing
  if (!strict || limits.bytes != SIZE_MAX) return;
  std::string what = "cuda_standin: no values for " + name + ": " + why;
  TORCH_CHECK(late, what);  // late work is run by whoever waits, through functions of C
  std::lock_guard<std::mutex> lock(report_mutex);
  late_error = what;
}
namespace {

// ---- operators that are not computed in the common way ----
// these only arrange memory, or are made of operators that have values of their own
const std::set<std::string> ORIGINAL_ONLY = {"aten::empty.memory_format",
                                             "aten::empty_strided",
                                             "aten::resize_",
                                             "aten::set_",
                                             "aten::set_.source_Storage",
                                             "aten::set_.source_Tensor",
                                             "aten::set_.source_Storage_storage_offset",
                                             "aten::record_stream",
                                             "aten::is_set_to",
                                             "aten::_efficientzerotensor",
                                             "aten::_local_scalar_dense",
                                             "aten::_assert_async",
                                             "aten::_assert_async.msg",
                                             "aten::_scaled_dot_product_flash_attention",
                                             "aten::_scaled_dot_product_flash_attention_backward",
                                             "aten::_scaled_dot_product_efficient_attention",
                                             "aten::_scaled_dot_product_efficient_attention_backward",
                                             "aten::_fused_sdp_choice",
                                             "aten::_chunk_grad_outputs_efficient_attention",
                                             "aten::_use_cudnn_ctc_loss",
                                             "aten::_use_cudnn_ctc_loss.Tensor",
                                             "aten::_use_miopen_ctc_loss",
                                             "aten::_use_miopen_ctc_loss.Tensor",
                                             "aten::_cslt_compress",
                                             "aten::narrow_copy",
                                             "aten::_cudnn_init_dropout_state",
                                             "aten::_triton_multi_head_attention"};
const std::string ITEM = "aten::_local_scalar_dense";
// what these return has a size that depends on values: the original cannot know it
const std::set<std::string> SIZE_BY_VALUES = {"aten::nonzero",
                                              "aten::_unique2",
                                              "aten::_unique",
                                              "aten::unique_dim",
                                              "aten::unique_consecutive",
                                              "aten::unique_dim_consecutive",
                                              "aten::bincount",
                                              "aten::repeat_interleave.Tensor",
                                              "aten::masked_select"};

// ---- arguments ----
template <class Type>
bool has_type(const c10::Argument& a, c10::TypeKind kind, Type type) {
  auto t = type(a);
  if (auto o = t->template cast<c10::OptionalType>()) t = o->getElementType();
  return t->kind() == kind;
}
auto declared = [](const c10::Argument& a) { return a.type(); };
auto meant = [](const c10::Argument& a) { return a.real_type(); };  // a dtype is declared as an int
bool is_generator(const c10::Argument& a) { return has_type(a, c10::TypeKind::GeneratorType, meant); }
bool is_dtype(const c10::Argument& a) { return has_type(a, c10::TypeKind::ScalarTypeType, meant); }
bool is_device(const c10::Argument& a) { return has_type(a, c10::TypeKind::DeviceObjType, declared); }
bool is_written(const c10::Argument& a) { return a.alias_info() && a.alias_info()->isWrite(); }

template <class F>
void for_each_tensor(const IValue& v, F f) {
  if (v.isTensor()) {
    f(v.toTensor());
  } else if (v.isTensorList()) {
    for (const Tensor& t : v.toTensorVector()) f(t);
  } else if (v.isList() && v.toList().elementType()->kind() == c10::TypeKind::OptionalType) {
    for (const IValue& e : v.toListRef())
      if (e.isTensor()) f(e.toTensor());
  }
}
// The same value with every tensor replaced. Undefined tensors stay.
template <class F>
IValue replaced(const IValue& v, F f) {
  if (v.isTensor()) return v.toTensor().defined() ? IValue(f(v.toTensor())) : v;
  if (v.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& t : v.toTensorVector()) list.push_back(t.defined() ? f(t) : t);
    return list;
  }
  if (v.isList() && v.toListRef().size() && v.toList().elementType()->kind() == c10::TypeKind::OptionalType) {
    c10::List<maybe::optional<Tensor>> list;
    for (const IValue& e : v.toListRef())
      list.push_back(e.isTensor() && e.toTensor().defined() ? maybe::optional<Tensor>(f(e.toTensor()))
                                                            : maybe::nullopt);
    return list;
  }
  return v;
}

// The stream that the operator's kernels go to: the current one of its tensors' device.
void* current_stream(const std::vector<IValue>& in) {
  c10::DeviceIndex device = -1;
  for (const IValue& v : in) {
    if (device >= 0) break;
    for_each_tensor(v, [&](const Tensor& t) {
      if (device < 0 && is_cuda(t)) device = t.device().index();
    });
    if (v.isDevice() && v.toDevice().is_cuda()) device = v.toDevice().index();
  }
  return (void*)c10::cuda::getCurrentCUDAStream(device).stream();
}

Philox state_of(const FunctionSchema& schema, const std::vector<IValue>& in, bool capturing) {
  static std::atomic<uint64_t> captured{0};
  if (capturing) return {0x5eed, captured++};  // a graph draws the same in each replay; its generator may not be asked
  at::Generator generator = at::cuda::detail::getDefaultCUDAGenerator();
  for (size_t i = 0; i < in.size(); i++)
    if (is_generator(schema.arguments()[i]) && !in[i].isNone()) generator = in[i].toGenerator();
  auto* impl = at::check_generator<at::CUDAGeneratorImpl>(generator);
  std::lock_guard<std::mutex> lock(generator.mutex());
  return {impl->current_seed(), impl->philox_offset_per_thread()};
}

// ---- the operator on the CPU ----
// In evaluation CUDA's batch norm returns statistics that nobody reads; the CPU's returns none.
bool unused(const std::string& name, const Tensor& into, const Tensor& value) {
  return value.defined() && value.numel() == 0 && into.defined() && into.numel() &&
         name.find("batch_norm") != std::string::npos;
}
void compute(const OperatorHandle& op, Call& call) {
  const auto& schema = call.schema;
  Stack stack;
  std::vector<std::pair<Tensor, Tensor>> back;  // what is written in float32, and where it is rounded to
  for (size_t i = 0; i < call.in.size(); i++) {
    const auto& argument = schema.arguments()[i];
    const IValue& v = call.in[i];
    auto widened = [&](const Tensor& t) {
      if (!is_half(t.scalar_type())) return t;
      Tensor w = t.to(at::kFloat);
      if (t.unsafeGetTensorImpl()->is_wrapped_number()) w.unsafeGetTensorImpl()->set_wrapped_number(true);
      if (is_written(argument)) back.emplace_back(t, w);
      return w;
    };
    if (is_generator(argument)) stack.emplace_back(cpu_generator(call.rng));
    else if (is_dtype(argument) && v.isInt() && is_half((at::ScalarType)v.toInt()))
      stack.emplace_back((int64_t)at::kFloat);
    else if (is_device(argument) && v.isDevice()) stack.emplace_back(c10::Device(c10::kCPU));
    else if (argument.name() == "pin_memory") stack.emplace_back(IValue());
    else if (argument.name() == "half_to_float") stack.emplace_back(false);
    else stack.push_back(replaced(v, widened));
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
  for (auto& [into, value] : back) into.copy_(value);
  for (size_t i = 0; i < call.out.size(); i++) {
    const auto& alias = schema.returns()[i].alias_info();
    if (alias && alias->isWrite()) continue;
    const IValue& made = stack[stack.size() - call.out.size() + i];
    if (call.out[i].isTensor()) {
      Tensor into = call.out[i].toTensor();
      if (made.isTensor() && unused(schema.name(), into, made.toTensor())) into.zero_();
      else if (made.isTensor()) put(into, made.toTensor());
    } else if (call.out[i].isTensorList()) {
      auto into = call.out[i].toTensorVector(), values = made.toTensorVector();
      for (size_t k = 0; k < into.size(); k++) put(into[k], values[k]);
    } else {
      call.out[i] = made;
    }
  }
}

// What has been submitted for one call of an operator. It may run after the call returned.
struct Deferred {
  OperatorHandle op;
  std::string name;
  Rule rule;
  Call call;
  std::vector<Tensor> written, before;  // what the original may overwrite, and what it was
  bool skipped = false, late = false;

  void keep() {
    Below below;
    before.clear();
    for (auto& t : written) before.push_back(t.clone());
  }
  void run() {
    if (skipped) {
      leave_harmless(op, call);
      if (chooses(name)) spread_ties(call, true);
      return;
    }
    Below below;
    for (size_t i = 0; i < before.size(); i++) written[i].copy_(before[i]);
    try {
      if (rule) rule(call);
      else compute(op, call);
      if (limits.bytes != SIZE_MAX && chooses(name)) spread_ties(call, false);
    } catch (const std::exception& e) { note_missing(name, e.what(), late); }
  }
};
template <class F>
void submit(void* stream, std::shared_ptr<Deferred> deferred, F f) {
  struct Both {
    std::shared_ptr<Deferred> deferred;
    F f;
  };
  standin_submit(
      stream, [](void* b) { ((Both*)b)->f(*((Both*)b)->deferred); }, [](void* b) { delete (Both*)b; },
      new Both{std::move(deferred), f});
}

// Reports that the host waited between its making and its end. No lock is held then, so Python may be entered.
struct Waits {
  const char* name;
  unsigned long long before = standin_thread_waits();
  ~Waits() {
    if (on_wait && standin_thread_waits() != before) on_wait(name);
  }
};

// What the value layer does takes no time of a host that has a GPU; the original does.
struct OwnWork {
  OwnWork() { standin_own_work(1); }
  ~OwnWork() { standin_own_work(0); }
};
struct Original {
  int before = standin_not_own_work_begin();
  ~Original() { standin_not_own_work_end(before); }
};

// `.item()`: the original alone, which waits. Up to PyTorch 2.6 a stack holds no number from 2^63 on.
struct Item {
  OperatorHandle op;
  Kernel original;
};
Item* item = nullptr;
at::Scalar item_of(const Tensor& self) {
  OwnWork own;
  Waits waits{ITEM.c_str()};
  Original original;
  c10::DispatchKeySet keys(c10::DispatchKey::CUDA);
#ifdef STANDIN_OLD_DISPATCH
  return item->original.call<at::Scalar, const Tensor&>(item->op, keys, self);
#else
  Stack stack{self};
  item->original.callBoxed(item->op, keys, &stack);
  return stack[0].toScalar();
#endif
}

// Attention as the script calls it: the kernels below it have values.
class OnlyRecorded : public c10::OperatorKernel {
 public:
  explicit OnlyRecorded(Kernel original) : original_(std::move(original)) {}
  void operator()(const OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
    OwnWork own;
    std::vector<IValue> in(stack->end() - op.schema().arguments().size(), stack->end());
    RecordedCall call(op, in, current_stream(in));
    {
      Original original;
      original_.callBoxed(op, keys, stack);
    }
    call.ended({stack->end() - op.schema().returns().size(), stack->end()});
  }

 private:
  Kernel original_;
};

class WithValues : public c10::OperatorKernel {
 public:
  WithValues(std::string name, Rule rule, Kernel original)
      : name_(std::move(name)),
        original_(std::move(original)),
        rule_(rule),
        size_by_values_(SIZE_BY_VALUES.count(name_)),
        is_copy_(name_ == "aten::copy_"),
        loops_over_rows_(name_.find("slow_conv") != std::string::npos) {}

  void operator()(const OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
    OwnWork own;
    const auto& schema = op.schema();
    std::vector<IValue> in(stack->end() - schema.arguments().size(), stack->end());
    {
      std::lock_guard<std::mutex> lock(report_mutex);
      calls[name_]++;
    }
    raise_late_error();
    Waits waits{name_.c_str()};
    void* stream = current_stream(in);
    RecordedCall call(op, in, stream);
    if (size_by_values_) {
      size_first(op, in, stack, stream);
      call.ended({stack->end() - schema.returns().size(), stack->end()});
      standin_record_host_wait(stream);
      return;
    }
    Sizes sizes;
    if (limits.bytes != SIZE_MAX)
      for (const IValue& v : in) for_each_tensor(v, [&](const Tensor& t) { sizes.count(t); });
    bool numbers = !rule_ && returns_numbers(schema);  // the host reads them at once
    bool defers = standin_defers(stream) && !numbers;

    auto deferred = std::make_shared<Deferred>(Deferred{op, name_, rule_, Call{schema}});
    bool random = rule_ != nullptr;
    for (size_t i = 0; i < in.size() && !random; i++) random = is_generator(schema.arguments()[i]);
    if (random) deferred->call.rng = state_of(schema, in, standin_capturing(stream));
    if (!rule_ && !sizes.skipped()) {
      for (size_t i = 0; i < in.size(); i++) {
        if (!is_written(schema.arguments()[i]) || schema.arguments()[i].is_out()) continue;
        for_each_tensor(in[i], [&](const Tensor& t) {
          if (is_cuda(t) && t.numel()) deferred->written.push_back(on_host(t));
        });
      }
      if (deferred->written.empty())
        ;
      else if (defers) submit(stream, deferred, [](Deferred& d) { d.keep(); });
      else deferred->keep();
    }

    auto launches = standin_thread_launches();
    if (logging) log_begin(name_, in);
    {
      maybe::optional<Original> timed;
      if (!loops_over_rows_) timed.emplace();
      original_.callBoxed(op, keys, stack);
    }
    if (logging) log_end(name_);
    std::vector<IValue> out(stack->end() - schema.returns().size(), stack->end());
    call.ended(out);

    if (is_copy_ && (standin_thread_launches() == launches || !is_cuda(in[0].toTensor()))) {
      // bytes have been copied, if they were few enough; a conversion on the way to the host is an operator of its own
      if (sizes.bytes > limits.bytes && !sizes.skipped()) {
        Below below;
        standin_catch_up(stream);
        on_host(in[0].toTensor()).copy_(on_host(in[1].toTensor()));
      }
      return;
    }
    if (limits.bytes != SIZE_MAX)
      for (const IValue& v : out) for_each_tensor(v, [&](const Tensor& t) { sizes.count(t); });
    deferred->skipped = sizes.skipped();
    Below below;
    auto view = [&](const Tensor& t) { return is_cuda(t) ? on_host(t) : defers ? t.clone() : t; };
    for (const IValue& v : in) deferred->call.in.push_back(v.isGenerator() ? IValue() : replaced(v, view));
    // Of a host tensor (attention's seed) the original has made the value: late work would only keep it alive.
    for (const IValue& v : out) deferred->call.out.push_back(replaced(v, view));
    if (defers) {
      deferred->late = true;
      submit(stream, deferred, [](Deferred& d) { d.run(); });
      return;
    }
    if (numbers) standin_catch_up(stream);
    deferred->run();
    if (rule_ || deferred->skipped) return;
    for (size_t i = 0; i < out.size(); i++)
      if (!out[i].isTensor() && !out[i].isTensorList())
        (*stack)[stack->size() - out.size() + i] = deferred->call.out[i];
  }

 private:
  struct Sizes {
    size_t bytes = 0;
    bool integers = limits.integers;  // integers and flags only
    void count(const Tensor& t) {
      if (!t.defined()) return;
      bytes += t.nbytes();
      integers &= at::isIntegralType(t.scalar_type(), true) || t.numel() == 1;
    }
    bool skipped() const {
      return nothing_is_computed || bytes > (integers ? std::max(limits.integer_bytes, limits.bytes) : limits.bytes);
    }
  };
  static bool returns_numbers(const FunctionSchema& schema) {
    for (const auto& r : schema.returns()) {
      auto kind = r.type()->kind();
      if (kind != c10::TypeKind::TensorType && kind != c10::TypeKind::ListType) return true;
    }
    return false;
  }
  void size_first(const OperatorHandle& op, const std::vector<IValue>& in, Stack* stack, void* stream) {
    standin_count_wait();  // for the size
    standin_catch_up(stream);
    c10::Device device(c10::kCUDA);
    for (const IValue& v : in)
      for_each_tensor(v, [&](const Tensor& t) {
        if (is_cuda(t)) device = t.device();
      });
    Stack made;
    {
      Below below;
      for (const IValue& v : in) {
        auto view = [&](const Tensor& t) { return float32(on_host(t)); };
        made.push_back(replaced(v, view));
      }
      op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &made);
    }
    stack->resize(stack->size() - in.size());
    for (IValue& r : made) {
      if (!r.isTensor() || !r.toTensor().defined()) {
        stack->push_back(r);
        continue;
      }
      Tensor value = r.toTensor();
      auto dtype = in[0].isTensor() && is_half(in[0].toTensor().scalar_type()) && value.is_floating_point()
                       ? in[0].toTensor().scalar_type()
                       : value.scalar_type();
      auto options = value.options().device(device).dtype(dtype);
      // nonzero's result lies the other way round in memory
      Tensor out = name_ == "aten::nonzero" ? at::empty({value.size(1), value.size(0)}, options).t()
                                            : at::empty(value.sizes(), options);
      Below below;
      put(on_host(out), value);
      stack->emplace_back(out);
    }
  }

  std::string name_;
  Kernel original_;
  Rule rule_;
  bool size_by_values_, is_copy_;
  bool loops_over_rows_;  // of a batch, on the host, where cuDNN would not
};

// cuDNN's convolution: the output as the CPU's operator makes it, no workspace.
Tensor cudnn_convolution(const Tensor& x, const Tensor& w, at::IntArrayRef padding, at::IntArrayRef stride,
                         at::IntArrayRef dilation, int64_t groups, bool, bool, bool) {
  standin_catch_up((void*)c10::cuda::getCurrentCUDAStream(x.device().index()).stream());
  Tensor y;
  {
    Below below;
    y = at::convolution(float32(on_host(x)), float32(on_host(w)), {}, stride, padding, dilation, false,
                        std::vector<int64_t>(stride.size(), 0), groups);
  }
  bool last = x.suggest_memory_format() == at::MemoryFormat::ChannelsLast ||
              w.suggest_memory_format() == at::MemoryFormat::ChannelsLast;
  auto format = last ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::Contiguous;
  Tensor out = at::empty(y.sizes(), x.options().memory_format(format));
  Below below;
  put(on_host(out), y);
  return out;
}

// ---- in place of every kernel of the CUDA key ----
torch::Library* library = nullptr;

size_t bytes_from(const char* name) {
  const char* text = getenv(name);
  return text && *text ? strtoull(text, nullptr, 10) : SIZE_MAX;
}
torch::CppFunction instead(const std::string& name, Rule rule, Kernel original) {
  auto boxed = [](auto kernel) { return torch::CppFunction::makeFromBoxedFunctor(std::move(kernel)); };
  if (ORIGINAL_ONLY.count(name)) return boxed(std::make_unique<OnlyRecorded>(std::move(original)));
  return boxed(std::make_unique<WithValues>(name, rule, std::move(original)));
}
struct Install {
  Install() {
    limits.bytes = bytes_from("STANDIN_SKIP_BYTES");
    limits.integer_bytes = 256u << 20;
    if (const char* text = getenv("STANDIN_RULES")) {
      int rules = atoi(text);
      limits.integers = rules & 1;
      limits.zeros = rules & 2;
      limits.finite = rules & 4;
      limits.host = rules & 8;
    }
    if (const char* text = getenv("STANDIN_ROUTING")) limits.balanced = strcmp(text, "worst");
    if (const char* text = getenv("STANDIN_STRICT")) strict = strcmp(text, "0");

    auto& dispatcher = c10::Dispatcher::singleton();
    std::vector<std::tuple<std::string, Rule, Kernel>> all;
    for (const auto& name : dispatcher.getAllOpNames()) {
      if (name.name.rfind("aten::", 0) != 0) continue;
      auto op = dispatcher.findOp(name);
      if (!op || !op->hasSchema()) continue;
      std::string full = name.name + (name.overload_name.empty() ? "" : "." + name.overload_name);
      bool attention = full.rfind("aten::_scaled_dot_product_", 0) == 0;
      if (full == "aten::cudnn_convolution" || (ORIGINAL_ONLY.count(full) && full != ITEM && !attention)) continue;
      if (full != "aten::copy_" && !op->hasKernelForDispatchKey(c10::DispatchKey::CUDA)) continue;
      bool view = false;
      for (const auto& r : op->schema().returns()) view |= r.alias_info() && !r.alias_info()->isWrite();
      if (view) continue;
      if (full == ITEM) {
        item = new Item{*op, kernel_of(*op, c10::DispatchKey::CUDA)};
        continue;
      }
      Rule rule = rule_for(full, op->hasKernelForDispatchKey(c10::DispatchKey::CPU));
      all.emplace_back(full, rule, kernel_of(*op, c10::DispatchKey::CUDA));
    }
    library = new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
    struct Quiet : c10::WarningHandler {  // each replacement is warned of
      void process(const c10::Warning&) override {}
    } quiet;
    c10::WarningUtils::WarningHandlerGuard guard(&quiet);
    for (auto& [full, rule, original] : all)
      library->impl(full.c_str(), instead(full, rule, std::move(original)));
    library->impl("_local_scalar_dense", item_of);
    library->impl("cudnn_convolution", cudnn_convolution);
    if (limits.host && limits.bytes != SIZE_MAX) leave_large_host_tensors();
  }
} install;
}  // namespace
}  // namespace values

extern "C" void standin_compute_nothing(int on) { values::nothing_is_computed = on; }
extern "C" void standin_on_wait(void (*f)(const char*)) { values::on_wait = f; }
extern "C" const char* standin_report() {  // a line for each: operators without values, and how often each ran
  using namespace values;
  static std::string text;
  std::lock_guard<std::mutex> lock(report_mutex);
  text.clear();
  for (auto& [name, r] : without_values)
    text += "missing " + name + " " + std::to_string(r.first) + " " + r.second + "\n";
  for (auto& [name, n] : calls) text += "calls " + name + " " + std::to_string(n) + "\n";
  return text.c_str();
}
