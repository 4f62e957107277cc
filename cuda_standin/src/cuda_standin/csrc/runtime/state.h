// What the parts of the stand-in runtime share: memory, streams, events, settings, counters. Everything is bookkeeping:
// device memory is host memory, copies are copies, kernels are not run.
//
// Work that would run on a GPU (copies, memsets, the value layer's computations) is a function that `submit` runs at
// once, or queues on its stream to run as late as events allow, or adds to a CUDA graph that is being captured.
//
// Environment, read once: see README.md.
#pragma once
#include <time.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "gpus.h"
#include "step_record.h"

#define __CUDA_API_VERSION_INTERNAL 1
#define cuTensorMapEncodeTiled declared_cuTensorMapEncodeTiled  // ours take no arguments
#define cuTensorMapEncodeIm2col declared_cuTensorMapEncodeIm2col
#include <cuda.h>
#undef cuTensorMapEncodeTiled
#undef cuTensorMapEncodeIm2col
#include <driver_types.h>  // types only: how a function is declared differs from version to version

namespace standin {

using Work = std::function<void()>;

enum class Kind { device, pinned, registered, reserved };
struct Block {
  size_t bytes;
  Kind kind;
  int device;
  bool mapped_by_us;
};

// A captured graph is the work that was submitted meanwhile, in the order of the host. Replay submits it again.
struct Graph {
  unsigned long long id;
  std::vector<Work> work;
  std::vector<Recorded> entries;
};

struct Stream {
  unsigned flags = 0;
  int priority = 0, device = 0;
  unsigned long long id = 0, queued = 0, done = 0;
  std::deque<Work> queue;
  std::shared_ptr<Graph> capture;
};

struct Event {
  unsigned flags = 0;
  bool recorded = false;
  double ms = 0;
  Stream* stream = nullptr;
  unsigned long long at = 0;  // of the stream's work, what came before it
};

// Which work waits in its queue until somebody waits for it; the rest runs when it is submitted. A sum.
enum Late { NEVER = 0, SIDE_COPIES = 1, SIDE_STREAMS = 2, NULL_STREAM = 4 };

struct State {
  Gpu gpu = GPUS[0];
  int devices = 1;
  size_t skip_bytes = SIZE_MAX;
  std::atomic<int> late{NEVER};
  FILE* log = nullptr;

  std::recursive_mutex mutex;
  std::map<uintptr_t, Block> blocks;
  std::vector<size_t> capacity, used, peak;
  size_t pinned = 0, pinned_peak = 0;
  std::set<Stream*> streams;
  std::vector<Stream> null_streams;
  unsigned long long next_stream = 100, next_graph = 1, next_handle = 1;
  std::unordered_map<const void*, std::string> kernel_names;
  std::unordered_map<const void*, std::pair<void*, size_t>> symbols;
  std::unordered_map<unsigned long long, std::pair<int, size_t>> handles;  // of physical memory: device, bytes
  std::atomic<unsigned long long> launches{0}, waits{0};

  State();
};

State& state();
using Lock = std::lock_guard<std::recursive_mutex>;

extern thread_local int current_device;
cudaError_t fail(cudaError_t error);  // remembered as CUDA remembers it, and returned
cudaError_t take_last_error();
cudaError_t last_error();

constexpr size_t PAGE = 2u << 20;  // a GPU hands out memory in pages of 2 MiB
inline size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }
inline double now_ms() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1e3 + t.tv_nsec / 1e6;
}

void* map_memory(size_t bytes);  // aligned to 2 MiB as device memory is; takes nothing until it is written
const Block* find_block(const void* p, uintptr_t* base = nullptr);
bool on_device(const void* p);
cudaError_t device_free(void* p);

Stream* real(cudaStream_t s);
void submit(Stream* s, Work work, bool is_copy = false);
void catch_up(Stream* s, unsigned long long until = ~0ull);
void catch_up_all();

int attribute(int which);
void count_launch(const char* name, const unsigned grid[3], const unsigned block[3]);
void count_wait();  // of the host, for the device

}  // namespace standin

extern "C" int standin_unsupported(const char* name, int code);
