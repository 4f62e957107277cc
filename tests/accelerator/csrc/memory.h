// Device memory, as CUDA's caching allocator hands it out (c10/cuda/CUDACachingAllocator.cpp, its default settings).
//
// A device address cannot be read or written: kernels use the same memory at another address (``real``), the host
// none. Memory is poisoned when it is handed out and when it is given back, as work of its stream.
#pragma once
#include <ATen/ATen.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <sys/mman.h>

#include <set>

#include "streams.h"

namespace standin {
constexpr size_t kBlock = 512;                          // sizes are rounded up to it
inline size_t unit = 1 << 20;                           // the other sizes are multiples of it
inline size_t small_most() { return unit; }             // blocks up to it are of the small pool
inline bool always_split = false;                           // as with CUDA's expandable segments
inline size_t small_segment() { return 2 * unit; }
inline size_t large_segment() { return 20 * unit; }     // for blocks below:
inline size_t own_segment_from() { return 10 * unit; }  // from here on, a segment of its own, rounded to small_segment

// Addresses are never used twice, so that one that was given back is an error, not somebody else's.
constexpr size_t kSpace = size_t(1) << 42;
inline char* space() {
  static char* begin = [] {
    void* p = mmap(nullptr, 2 * kSpace, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(p != MAP_FAILED, "standin: no address space");
    return static_cast<char*>(p);
  }();
  return begin;
}
inline void* real(void* device_address) { return device_address ? static_cast<char*>(device_address) + kSpace : nullptr; }
inline char* map_segment(size_t bytes) {
  static char* next = space();
  char* p = std::exchange(next, next + bytes);
  TORCH_CHECK(p + bytes <= space() + kSpace && !mprotect(real(p), bytes, PROT_READ | PROT_WRITE), "standin: no host memory");
  return p;
}
inline void unmap_segment(char* p, size_t bytes) {
  madvise(real(p), bytes, MADV_DONTNEED);
  mprotect(real(p), bytes, PROT_NONE);
}

struct Block {
  char* address;
  size_t size;
  int device, stream;
  bool small, used = false;
  size_t requested = 0;
  Block *previous = nullptr, *next = nullptr;  // in the segment
  std::set<int> other_streams = {};            // that record_stream named
  bool split() const { return previous || next; }
};
struct BySize {
  bool operator()(const Block* a, const Block* b) const { return std::tie(a->size, a->address) < std::tie(b->size, b->address); }
};
using Pool = std::set<Block*, BySize>;
struct Memory {
  Pool pools[kStreams][2];
  std::vector<std::pair<Block*, std::vector<Mark>>> in_use_elsewhere;  // freed, and other streams are not done
  size_t capacity = size_t(1) << 30;
  CachingDeviceAllocator::DeviceStats stats;
  size_t reserved() const { return stats.reserved_bytes[0].current; }
};
inline Memory& memory(int device) {
  static auto* all = new Memory[kDevices];
  return all[device];
}
inline std::map<void*, Block*>& used_blocks() {
  static auto* all = new std::map<void*, Block*>;
  return *all;
}
inline bool poisoned = true;

inline void count(CachingAllocator::StatArray& stat, bool small, int64_t amount) {
  for (int kind : {0, small ? 1 : 2}) amount >= 0 ? stat[kind].increase(amount) : stat[kind].decrease(-amount);
}
inline void count_both(CachingAllocator::StatArray& number, CachingAllocator::StatArray& bytes, const Block* b, int sign) {
  count(number, b->small, sign);
  count(bytes, b->small, sign * int64_t(b->size));
}
inline void poison(const Block* b, int byte) {
  if (poisoned) push(b->device, b->stream, {[p = real(b->address), n = b->size, byte] { memset(p, byte, n); }});
}

inline void count_inactive(Block* b, int sign) {
  auto& stats = memory(b->device).stats;
  if (b->split()) count_both(stats.inactive_split, stats.inactive_split_bytes, b, sign);
}
// The block is free, and nobody's: poison, merge with free neighbours, keep for the next.
inline void put_back(Block* b) {
  auto& m = memory(b->device);
  auto& pool = m.pools[b->stream][b->small];
  count_both(m.stats.active, m.stats.active_bytes, b, -1);
  b->used = false;
  poison(b, 0xFE);
  auto merge = [&](Block* first, Block* second) {
    first->size += second->size;
    first->next = second->next;
    if (second->next) second->next->previous = first;
    delete second;
    return first;
  };
  auto take = [&](Block* side) {
    if (!side || side->used) return false;
    pool.erase(side);
    count_inactive(side, -1);
    return true;
  };
  if (take(b->previous)) b = merge(b->previous, b);
  if (take(b->next)) b = merge(b, b->next);
  pool.insert(b);
  count_inactive(b, +1);
}
inline void put_back_finished(int device) {
  auto waiting = std::exchange(memory(device).in_use_elsewhere, {});
  for (auto& entry : waiting) {
    if (std::all_of(entry.second.begin(), entry.second.end(), reached)) put_back(entry.first);
    else memory(device).in_use_elsewhere.push_back(std::move(entry));
  }
}
inline void release_cached(int device) {
  LOCKED;
  auto& m = memory(device);
  for (int stream = 0; stream < kStreams; stream++) finish(device, stream);
  put_back_finished(device);
  for (int stream = 0; stream < kStreams; stream++) finish(device, stream);  // the poison
  for (auto& of_stream : m.pools)
    for (auto& pool : of_stream)
      for (auto it = pool.begin(); it != pool.end();) {
        Block* b = *it;
        if (b->split()) {
          ++it;
          continue;
        }
        unmap_segment(b->address, b->size);
        count_both(m.stats.segment, m.stats.reserved_bytes, b, -1);
        m.stats.num_device_free++;
        it = pool.erase(it);
        delete b;
      }
}
inline void tell_profiler(const Block* b, int sign) {
  auto& stats = memory(b->device).stats;
  reportMemoryUsageToProfiler(b->address, sign * int64_t(b->size), stats.allocated_bytes[0].current,
                              stats.reserved_bytes[0].current, Device(kType, b->device));
}
inline void release(void* address) {
  LOCKED;
  auto found = used_blocks().extract(address);
  if (found.empty()) return;
  Block* b = found.mapped();
  auto& m = memory(b->device);
  count_both(m.stats.allocation, m.stats.allocated_bytes, b, -1);
  count(m.stats.requested_bytes, b->small, -int64_t(b->requested));
  tell_profiler(b, -1);
  if (b->other_streams.empty()) return put_back(b);
  std::vector<Mark> marks;
  for (int stream : std::exchange(b->other_streams, {})) marks.push_back(end_of(b->device, stream));
  m.in_use_elsewhere.emplace_back(b, std::move(marks));
}

inline Block* new_segment(int device, int stream, size_t size, size_t requested) {
  auto& m = memory(device);
  bool small = size <= small_most();
  size_t whole = (size + small_segment() - 1) / small_segment() * small_segment();
  size_t bytes = small ? small_segment() : size < own_segment_from() ? large_segment() : whole;
  if (m.reserved() + bytes > m.capacity) {
    m.stats.num_alloc_retries++;
    release_cached(device);
  }
  if (m.reserved() + bytes > m.capacity) {
    m.stats.num_ooms++;
    TORCH_CHECK_WITH(OutOfMemoryError, false, "standin out of memory. Tried to allocate ", requested, " bytes. Device ", device,
                     " has a capacity of ", m.capacity, " bytes, of which ", m.reserved(), " are reserved and ",
                     m.stats.allocated_bytes[0].current, " allocated.");
  }
  auto* b = new Block{map_segment(bytes), bytes, device, stream, small};
  count_both(m.stats.segment, m.stats.reserved_bytes, b, +1);
  m.stats.num_device_alloc++;
  return b;
}
inline Block* take_block(int device, int stream, size_t requested) {
  auto& m = memory(device);
  put_back_finished(device);
  size_t size = (requested + kBlock - 1) / kBlock * kBlock;
  bool small = size <= small_most();
  auto& pool = m.pools[stream][small];
  Block key{nullptr, size, device, stream, small};
  auto it = pool.lower_bound(&key);
  Block* b;
  if (it == pool.end()) {
    b = new_segment(device, stream, size, requested);
  } else {
    b = *it;
    pool.erase(it);
    count_inactive(b, -1);
  }
  size_t rest = b->size - size;
  if (small || always_split ? rest >= kBlock : rest > small_most()) {
    auto* remaining = new Block{b->address + size, rest, device, stream, small};
    remaining->previous = b;
    remaining->next = b->next;
    if (b->next) b->next->previous = remaining;
    b->next = remaining;
    b->size = size;
    pool.insert(remaining);
    count_inactive(remaining, +1);
  }
  b->used = true;
  b->requested = requested;
  used_blocks()[b->address] = b;
  count_both(m.stats.allocation, m.stats.allocated_bytes, b, +1);
  count_both(m.stats.active, m.stats.active_bytes, b, +1);
  count(m.stats.requested_bytes, small, requested);
  tell_profiler(b, +1);
  poison(b, 0xFD);
  return b;
}

struct Allocator final : DeviceAllocator {
  DataPtr allocate(size_t bytes) override {
    LOCKED;
    Device device(kType, current_device);
    if (!bytes) return {nullptr, nullptr, &release, device};
    Block* b = take_block(current_device, current_streams[current_device], bytes);
    return {b->address, b->address, &release, device};
  }
  DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    push(current_device, current_streams[current_device],
         {[to = real(to), from = real(const_cast<void*>(from)), bytes] { memcpy(to, from, bytes); }}, COMPUTE, the_clock().op_ns);
  }
  bool initialized() override { return true; }
  void emptyCache(MempoolId_t) override {
    for (int device = 0; device < kDevices; device++) release_cached(device);
  }
  void recordStream(const DataPtr& memory, Stream stream) override {
    LOCKED;
    auto it = used_blocks().find(memory.get());
    if (it != used_blocks().end() && stream.id() != it->second->stream) it->second->other_streams.insert(stream.id());
  }
  static CachingDeviceAllocator::DeviceStats& stats(DeviceIndex device) { return memory(device_or_current(device)).stats; }
  CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
    LOCKED;
    return stats(device);
  }
  template <class F> static void each(DeviceIndex device, F f) {
    LOCKED;
    auto& s = stats(device);
    for (auto* a : {&s.allocation, &s.segment, &s.active, &s.inactive_split, &s.allocated_bytes, &s.reserved_bytes,
                    &s.active_bytes, &s.inactive_split_bytes, &s.requested_bytes})
      for (auto& one : *a) f(one);
  }
  void resetAccumulatedStats(DeviceIndex device) override {
    each(device, [](auto& s) { s.reset_accumulated(); });
    auto& s = stats(device);
    s.num_alloc_retries = s.num_ooms = s.num_device_alloc = s.num_device_free = 0;
  }
  void resetPeakStats(DeviceIndex device) override { each(device, [](auto& s) { s.reset_peak(); }); }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex device) override {
    LOCKED;
    auto& m = memory(device_or_current(device));
    return {m.capacity > m.reserved() ? m.capacity - m.reserved() : 0, m.capacity};
  }
};
inline Allocator& allocator() {
  static auto* it = new Allocator;
  return *it;
}
REGISTER_ALLOCATOR(kType, &allocator())
}  // namespace standin
