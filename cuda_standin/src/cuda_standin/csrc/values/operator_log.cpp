// Operators as they are called: as lines of a log with what PyTorch's caching allocator did inside each, so that
// workspaces become visible; and as entries of the step that is recorded (runtime/step_record.h), where a call is the
// JSON of its arguments' layouts ("op signature" of lowtide) and what it wrote.
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/core/Layout.h>
#include <c10/core/MemoryFormat.h>

#include <cmath>
#include <cstdio>
#include <iomanip>

#include "values.h"

extern "C" {
unsigned long long standin_thread_launches();
int standin_operations(int more);
int standin_records(void* stream);
int standin_record_signature(const char* json);
void standin_record_operation(void* stream, int signature, long long written_bytes, long long kernels);
}

namespace values {
bool logging = false;
namespace {
std::mutex mutex;
FILE* file = nullptr;
thread_local int depth = 0;

void line(const std::string& text) {
  std::lock_guard<std::mutex> lock(mutex);
  if (file) fputs((std::string(depth * 2, ' ') + text + "\n").c_str(), file);
}
std::string allocated() {
  int device;
  cudaGetDevice(&device);
  return std::to_string(c10::cuda::CUDACachingAllocator::getDeviceStats(device).allocated_bytes[0].current);
}
#ifdef STANDIN_TRACKER
void on_trace(const STANDIN_TRACKER::TraceEntry& e) {
  using T = STANDIN_TRACKER::TraceEntry;
  if (!logging) return;
  const char* what = e.action_ == T::ALLOC            ? "alloc"
                     : e.action_ == T::FREE_COMPLETED ? "free"
                     : e.action_ == T::SEGMENT_ALLOC  ? "segment"
                     : e.action_ == T::SEGMENT_FREE   ? "unsegment"
                                                      : nullptr;
  if (what) line(std::string(what) + " " + std::to_string(e.size_) + " " + std::to_string(e.addr_));
}
#endif
}  // namespace

void log_begin(const std::string& name, const std::vector<IValue>& in) {
  std::ostringstream text;
  text << "op " << name;
  for (const IValue& v : in)
    if (v.isTensor() && v.toTensor().defined()) text << " " << v.toTensor().scalar_type() << v.toTensor().sizes();
  line(text.str() + " | " + allocated());
  depth++;
}
void log_end(const std::string& name) {
  depth--;
  line("end " + name + " | " + allocated());
}

// ---- signatures ----
namespace {
std::string dtype_name(at::ScalarType s) {
  switch (s) {
    case at::kFloat: return "float32";
    case at::kDouble: return "float64";
    case at::kHalf: return "float16";
    case at::kBFloat16: return "bfloat16";
    case at::kLong: return "int64";
    case at::kInt: return "int32";
    case at::kShort: return "int16";
    case at::kChar: return "int8";
    case at::kByte: return "uint8";
    case at::kBool: return "bool";
    case at::kComplexFloat: return "complex64";
    case at::kComplexDouble: return "complex128";
    default: {  // Float8_e4m3fn is float8_e4m3fn, UInt16 is uint16
      std::string name = c10::toString(s);
      for (char& c : name) c = std::tolower(c);
      return name;
    }
  }
}
void write_list(std::ostringstream& to, at::IntArrayRef numbers) {
  to << "[";
  for (size_t i = 0; i < numbers.size(); i++) to << (i ? "," : "") << numbers[i];
  to << "]";
}
void write_text(std::ostringstream& to, const std::string& text) {
  to << '"';
  for (char c : text) {
    if (c == '"' || c == '\\') to << '\\' << c;
    else if ((unsigned char)c >= ' ') to << c;
  }
  to << '"';
}
void write_number(std::ostringstream& to, double number) {
  if (std::isfinite(number)) to << std::setprecision(17) << number;
  else to << "{\"inf\":\"" << (std::isnan(number) ? "nan" : number > 0 ? "inf" : "-inf") << "\"}";
}
void write_tensor(std::ostringstream& to, const Tensor& t) {
  if (!t.defined()) {
    to << "null";
  } else if (t.layout() != at::kStrided || t.is_nested()) {
    to << "{\"opaque\":\"torch.Tensor\"}";
  } else {
    to << "{\"t\":";
    write_list(to, t.sizes());
    to << ",\"stride\":";
    write_list(to, t.strides());
    to << ",\"dtype\":\"" << dtype_name(t.scalar_type()) << "\",\"device\":\"" << (t.is_cuda() ? "cuda" : "cpu")
       << "\"}";
  }
}
c10::TypeKind kind_of(const c10::Argument& a) {  // of an optional, of what it may hold
  auto type = a.real_type();
  if (auto o = type->cast<c10::OptionalType>()) type = o->getElementType();
  return type->kind();
}
void write_value(std::ostringstream& to, const IValue& v, c10::TypeKind kind) {
  if (v.isTensor()) return write_tensor(to, v.toTensor());
  if (v.isInt()) {
    if (kind == c10::TypeKind::ScalarTypeType)
      to << "{\"dtype\":\"" << dtype_name((at::ScalarType)v.toInt()) << "\"}";
    else if (kind == c10::TypeKind::LayoutType) to << "{\"layout\":\"strided\"}";
    else if (kind == c10::TypeKind::MemoryFormatType) {
      auto format = (at::MemoryFormat)v.toInt();
      to << "{\"memory_format\":\""
         << (format == at::MemoryFormat::Contiguous     ? "contiguous_format"
             : format == at::MemoryFormat::ChannelsLast ? "channels_last"
             : format == at::MemoryFormat::Preserve     ? "preserve_format"
                                                        : "channels_last_3d")
         << "\"}";
    } else {
      to << v.toInt();
    }
  } else if (v.isBool()) {
    to << (v.toBool() ? "true" : "false");
  } else if (v.isDouble()) {
    write_number(to, v.toDouble());
  } else if (v.isNone()) {
    to << "null";
  } else if (v.isString()) {
    write_text(to, v.toStringRef());
  } else if (v.isDevice()) {
    to << "{\"device\":\"" << (v.toDevice().is_cuda() ? "cuda" : "cpu") << "\"}";
  } else if (v.isGenerator()) {
    to << "{\"generator\":true}";
  } else if (v.isList()) {
    to << "{\"l\":[";
    const char* between = "";
    for (const IValue& e : v.toListRef()) {
      to << between;
      write_value(to, e, kind);
      between = ",";
    }
    to << "]}";
  } else {
    to << "{\"opaque\":\"" << v.tagKind() << "\"}";
  }
}
std::string signature_of(const c10::OperatorHandle& op, const std::vector<IValue>& in) {
  const auto& schema = op.schema();
  std::ostringstream positional, named;
  for (size_t i = 0; i < in.size(); i++) {
    const auto& argument = schema.arguments()[i];
    auto& to = argument.kwarg_only() ? named : positional;
    if (to.tellp() > 0) to << ",";
    if (argument.kwarg_only()) to << "\"" << argument.name() << "\":";
    write_value(to, in[i], kind_of(argument));
  }
  std::string name = schema.name();  // aten::add
  name.replace(name.find("::"), 2, ".");
  name += "." + (schema.overload_name().empty() ? "default" : schema.overload_name());
  return "{\"op\":\"" + name + "\",\"args\":[" + positional.str() + "],\"kwargs\":{" + named.str() + "}}";
}
int64_t bytes_of(const IValue& v) {
  int64_t bytes = 0;
  if (v.isTensor() && is_cuda(v.toTensor())) bytes += v.toTensor().nbytes();
  else if (v.isTensorList())
    for (const Tensor& t : v.toTensorVector()) bytes += is_cuda(t) ? t.nbytes() : 0;
  return bytes;
}
}  // namespace

RecordedCall::RecordedCall(const c10::OperatorHandle& op, const std::vector<IValue>& in, void* stream)
    : schema_(op.schema()), stream_(stream) {
  if (standin_operations(1) > 1 || !standin_records(stream)) return;
  signature_ = standin_record_signature(signature_of(op, in).c_str());
  launches_ = standin_thread_launches();
  for (size_t i = 0; i < in.size(); i++) {
    const auto& alias = schema_.arguments()[i].alias_info();
    if (alias && alias->isWrite()) written_ += bytes_of(in[i]);
  }
}
RecordedCall::~RecordedCall() { standin_operations(-1); }
void RecordedCall::ended(const std::vector<IValue>& out) {
  if (signature_ < 0) return;
  for (size_t i = 0; i < out.size(); i++)
    if (!schema_.returns()[i].alias_info()) written_ += bytes_of(out[i]);
  standin_record_operation(stream_, signature_, written_, standin_thread_launches() - launches_);
  signature_ = -1;
}
}  // namespace values

extern "C" void standin_log_operators(const char* path) {  // nullptr ends it
  using namespace values;
#ifdef STANDIN_TRACKER
  static bool attached = false;
  if (!attached) c10::cuda::CUDACachingAllocator::attachAllocatorTraceTracker(on_trace);
  attached = true;
#endif
  std::lock_guard<std::mutex> lock(mutex);
  if (file) fclose(file);
  file = path ? fopen(path, "w") : nullptr;
  logging = file != nullptr;
}
