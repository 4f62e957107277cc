// Streams are queues, a schedule says when their work runs, and a clock of its own says how long it took.
//
// Nothing here is a thread. Work runs at once ("early"), when something waits for it ("late"), or in a seeded random
// order, so a wait that is missing gives the same wrong bytes every time. The clock is kept at enqueue, where all that
// a piece of work waits for is known: the schedule changes no time.
#pragma once
#include <ATen/ATen.h>

#include <deque>
#include <map>
#include <random>

namespace standin {
using namespace c10;

constexpr auto kType = DeviceType::PrivateUse1;
constexpr int kDevices = 2, kPool = 32, kStreams = kPool + 2;  // the default stream, a pool as on CUDA, the process group's
constexpr size_t kMostQueued = 4096;        // a launch queue has an end

// One lock for all state. It may be taken again by who has it: kernels free memory.
inline std::recursive_mutex& lock() {
  static auto* mutex = new std::recursive_mutex;
  return *mutex;
}
#define LOCKED std::lock_guard<std::recursive_mutex> locked(lock())

inline thread_local int current_device = 0;
inline thread_local int current_streams[kDevices] = {};
inline int device_or_current(int device) { return device < 0 ? current_device : device; }

// ---- the clock, in whole nanoseconds

enum Engine { NONE, COMPUTE, COPY_IN, COPY_OUT, kEngines };

// What does one piece of work at a time: kernels, copies to the device, copies from it.
struct Timetable {
  std::map<int64_t, int64_t> busy;  // begin -> end

  // When work of ``length`` that may begin at ``from`` begins: in the first gap that holds it.
  int64_t place(int64_t from, int64_t length, int64_t now) {
    while (!busy.empty() && busy.begin()->second <= now) busy.erase(busy.begin());
    for (auto [begin, end] : busy) {
      if (begin >= from + length) break;
      from = std::max(from, end);
    }
    auto next = busy.find(from + length);
    int64_t end = from + length;
    if (next != busy.end()) {
      end = next->second;
      busy.erase(next);
    }
    auto after = busy.lower_bound(from);
    if (after != busy.begin() && std::prev(after)->second == from) std::prev(after)->second = end;
    else busy[from] = end;
    return from;
  }
};

struct Clock {
  int64_t host_ns = 0;
  int64_t launch_ns = 0, op_ns = 10'000;
  double copy_ns_per_byte = 0.1;
  std::map<std::string, int64_t> ns_by_op;
  Timetable engines[kDevices][kEngines];
};
inline Clock& the_clock() {
  static auto* it = new Clock;
  return *it;
}
inline int64_t copy_ns(size_t bytes) { return std::llround(bytes * the_clock().copy_ns_per_byte); }
inline int64_t op_ns(const std::string& name) {
  auto it = the_clock().ns_by_op.find(name);
  return it == the_clock().ns_by_op.end() ? the_clock().op_ns : it->second;
}

// ---- queues

struct Mark {  // a place in a stream: reached when the stream has done that much
  int device = 0, stream = 0;
  uint64_t at = 0;
};
struct Work {
  std::function<void()> run;  // or, where it is empty, wait for:
  Mark awaited;
  const char* host_begin = nullptr;  // the host memory that it reads or writes
  size_t host_bytes = 0;
};
struct Queue {
  std::deque<Work> items;
  uint64_t pushed = 0, done = 0;
  int64_t finished_ns = 0;  // when all of it is done
  bool running = false;
};

enum Policy { EARLY, LATE, RANDOM };
struct World {
  Queue queues[kDevices][kStreams];
  int policy[kStreams] = {};
  std::mt19937_64 random{0};
  std::exception_ptr error;  // of a kernel that failed; whoever synchronizes next gets it
  int64_t launched = 0, synchronized = 0, unregistered_in_use = 0;
  int next_stream = 0;
};
inline World& world() {
  static auto* it = new World;
  return *it;
}
inline Queue& queue(int device, int stream) { return world().queues[device][stream]; }

inline bool reached(const Mark& m) { return queue(m.device, m.stream).done >= m.at; }
inline void run_until(const Mark& mark) {
  auto& q = queue(mark.device, mark.stream);
  while (q.done < mark.at) {
    TORCH_CHECK(!q.running, "standin: a kernel waits for its own stream");
    Work work = std::move(q.items.front());
    q.items.pop_front();
    if (work.run) {
      q.running = true;
      try {
        work.run();
      } catch (...) {
        if (!world().error) world().error = std::current_exception();
      }
      q.running = false;
    } else {
      run_until(work.awaited);
    }
    q.done++;
  }
}
inline Mark end_of(int device, int stream) { return {device, stream, queue(device, stream).pushed}; }

inline void run_some_at_random() {
  auto& w = world();
  while (w.random() % 4) {
    int device = w.random() % kDevices, stream = w.random() % kStreams;
    auto& q = queue(device, stream);
    if (w.policy[stream] == RANDOM && q.done < q.pushed && !q.running) run_until({device, stream, q.done + 1});
  }
}
// Never throws: memory is poisoned from destructors.
inline void push(int device, int stream, Work work, Engine engine = NONE, int64_t ns = 0) {
  LOCKED;
  auto& w = world();
  auto& q = queue(device, stream);
  if (engine != NONE) {
    the_clock().host_ns += the_clock().launch_ns;
    int64_t from = std::max(q.finished_ns, the_clock().host_ns);
    q.finished_ns = ns + (ns ? the_clock().engines[device][engine].place(from, ns, the_clock().host_ns) : from);
  }
  q.items.push_back(std::move(work));
  q.pushed++;
  w.launched++;
  if (w.policy[stream] == EARLY) run_until(end_of(device, stream));
  if (w.policy[stream] == RANDOM) run_some_at_random();
  if (q.items.size() > kMostQueued) run_until({device, stream, q.done + kMostQueued / 2});
}
inline void report_error() {
  if (auto error = std::exchange(world().error, nullptr)) std::rethrow_exception(error);
}
inline void host_waits_until(int64_t ns) { the_clock().host_ns = std::max(the_clock().host_ns, ns); }
inline void finish(int device, int stream) {
  run_until(end_of(device, stream));
  host_waits_until(queue(device, stream).finished_ns);
}
inline void synchronize_stream(int device, int stream) {
  LOCKED;
  world().synchronized++;
  finish(device, stream);
  report_error();
}
inline void synchronize_device(int device) {
  LOCKED;
  world().synchronized++;
  for (int stream = 0; stream < kStreams; stream++) finish(device, stream);
  report_error();
}
// Of an event or a stream that is asked again and again: it gets there, one piece of work for each question.
inline bool asked(const Mark& m) {
  LOCKED;
  if (reached(m)) return true;
  auto& q = queue(m.device, m.stream);
  if (!q.running) run_until({m.device, m.stream, q.done + 1});
  return false;
}

// ---- events

struct Event {
  Mark mark;
  int64_t ns = 0;
  bool recorded = false, timed = false;

  void record(int device, int stream) {
    auto& q = queue(device, stream);
    ns = q.finished_ns = std::max(q.finished_ns, the_clock().host_ns);
    recorded = true;
    mark = end_of(device, stream);
  }
  void make_wait(int device, int stream) const {
    if (!recorded) return;  // as on CUDA: nothing to wait for
    auto& q = queue(device, stream);
    q.finished_ns = std::max(q.finished_ns, ns);
    if (!reached(mark)) push(device, stream, {nullptr, mark});
  }
  void synchronize() const {
    world().synchronized++;
    if (recorded) {
      run_until(mark);
      host_waits_until(ns);
    }
    report_error();
  }
  double ms_until(const Event& end) const {
    TORCH_CHECK(timed && end.timed, "both events must be made with enable_timing=True");
    TORCH_CHECK(recorded && end.recorded, "both events must be recorded");
    TORCH_CHECK(reached(mark) && reached(end.mark), "both events must be completed before their time is asked");
    return (end.ns - ns) / 1e6;
  }
};
}  // namespace standin
