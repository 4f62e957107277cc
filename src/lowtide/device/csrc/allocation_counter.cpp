// Counts what PyTorch's allocators hand out to one thread, and to those that autograd starts for it.
//
// PyTorch reports each allocation to what lies in the profiler's slot of the thread. The counter lies there while it
// counts. It is a profiler that says that it is off: PyTorch reads the slot as one.

#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/csrc/profiler/orchestration/observer.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace {
using torch::profiler::impl::ActiveProfilerType;
using torch::profiler::impl::ProfilerConfig;
using torch::profiler::impl::ProfilerState;
using torch::profiler::impl::ProfilerStateBase;

auto slot() { return c10::DebugInfoKind::PROFILER_STATE; }  // a class or an enum, by version
constexpr int MOST_DEVICES = 64;

struct Bytes {
  std::atomic<int64_t> now{0}, peak{0};
  void set(int64_t bytes) {
    now = bytes;
    for (int64_t before = peak; bytes > before && !peak.compare_exchange_weak(before, bytes);) {}
  }
};

struct Counts {
  Bytes host;                               // made here less freed here: the host's allocator keeps no total
  std::array<Bytes, MOST_DEVICES> devices;  // all that is allocated on each
};

// Never freed, used again: who reads one late reads another step's, and no foreign memory.
struct Pool {
  std::mutex mutex;
  std::vector<Counts*> free;
  Counts* take() {
    std::lock_guard guard(mutex);
    if (free.empty()) return new Counts;
    Counts* counts = free.back();
    free.pop_back();
    return new (counts) Counts;
  }
  void give_back(Counts* counts) {
    std::lock_guard guard(mutex);
    free.push_back(counts);
  }
};
Pool& pool() {
  static auto* pool = new Pool;
  return *pool;
}

struct Counter final : ProfilerStateBase {
  Counts& of = *pool().take();
  std::atomic<bool> counts{true};

  Counter() : ProfilerStateBase(ProfilerConfig(ProfilerState::Disabled)) {}
  ~Counter() override { pool().give_back(&of); }
  Bytes& bytes(int device) { return device < 0 ? of.host : of.devices[device]; }
  bool memoryProfilingEnabled() const override { return counts; }
  ActiveProfilerType profilerType() override { return ActiveProfilerType::NONE; }
  void reportMemoryUsage(void*, int64_t change, size_t allocated, size_t, c10::Device device) override {
    if (device.is_cpu()) {
      of.host.set(of.host.now += change);
    } else if (device.index() >= 0 && device.index() < MOST_DEVICES) {
      of.devices[device.index()].set(static_cast<int64_t>(allocated));
    }
  }
};

using Handle = std::shared_ptr<Counter>;

bool lies_in_slot(const Counter* counter) {
  return dynamic_cast<Counter*>(c10::ThreadLocalDebugInfo::get(slot())) == counter;
}

bool take_from_slot() {
  try {
    c10::ThreadLocalDebugInfo::_pop(slot());
    return true;
  } catch (const std::exception&) {  // something else was put on top of it
    return false;
  }
}
}  // namespace

extern "C" {
// A counter that counts on this thread from now on; null where a profiler of somebody else's does.
void* lowtide_counter_start() {
  if (auto* there = c10::ThreadLocalDebugInfo::get(slot())) {
    auto* left = dynamic_cast<Counter*>(there);  // by a step that another thread has ended
    if (left == nullptr || left->counts || !take_from_slot()) return nullptr;
  }
  auto counter = std::make_shared<Counter>();
  c10::ThreadLocalDebugInfo::_push(slot(), counter);
  return new Handle(std::move(counter));
}

// Which counter counts on this thread, in a backward that of the thread that started it; null: none of ours.
void* lowtide_counter_here() {
  auto* counter = dynamic_cast<Counter*>(c10::ThreadLocalDebugInfo::get(slot()));
  return counter != nullptr && counter->counts ? counter : nullptr;
}

// It counts no more, whichever thread says so; the slot is free where the thread that started it does.
void lowtide_counter_stop(void* handle) {
  auto& counter = *static_cast<Handle*>(handle);
  counter->counts = false;
  if (lies_in_slot(counter.get())) take_from_slot();
}

void lowtide_counter_free(void* handle) { delete static_cast<Handle*>(handle); }

// Bytes now; ``device``: -1 is the host.
int64_t lowtide_counter_now(void* handle, int device) { return (*static_cast<Handle*>(handle))->bytes(device).now; }

// Where they stand. Nobody else's memory ever.
const void* lowtide_counter_place(void* handle, int device) {
  return &(*static_cast<Handle*>(handle))->bytes(device).now;
}

// The peak since this was asked last.
int64_t lowtide_counter_take_peak(void* handle, int device) {
  auto& bytes = (*static_cast<Handle*>(handle))->bytes(device);
  return bytes.peak.exchange(bytes.now);
}
}
