// A log of operators and of what PyTorch's caching allocator did inside each: workspaces become visible.
#include <c10/cuda/CUDACachingAllocator.h>

#include <cstdio>

#include "values.h"

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
