// Device memory, as CUDA's caching allocator hands it out (c10/cuda/CUDACachingAllocator.cpp, its default settings, and
// expandable_segments).
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
inline size_t small_segment() { return 2 * unit; }
inline size_t large_segment() { return 20 * unit; }     // for blocks below:
inline size_t own_segment_from() { return 10 * unit; }  // from here on, a segment of its own, rounded to small_segment

inline bool expandable_segments = false;                // one segment for each pool, which grows by pages of these sizes

// Addresses are never used twice, so that one that was given back is an error, not somebody else's. Those of a segment
// that grows are: its pages come and go.
constexpr size_t kSpace = size_t(1) << 42;
constexpr size_t kGrowsTo = size_t(1) << 34;
inline char* space() {
  static char* begin = [] {
    void* p = mmap(nullptr, 2 * kSpace, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(p != MAP_FAILED, "standin: no address space");
    return static_cast<char*>(p);
  }();
  return begin;
}
inline void* real(void* device_address) { return device_address ? static_cast<char*>(device_address) + kSpace : nullptr; }
inline char* take_addresses(size_t bytes) {
  static char* next = space();
  char* p = std::exchange(next, next + bytes);
  TORCH_CHECK(p + bytes <= space() + kSpace, "standin: no address space");
  return p;
}
inline void map(char* p, size_t bytes) {
  TORCH_CHECK(!mprotect(real(p), bytes, PROT_READ | PROT_WRITE), "standin: no host memory");
}
inline void unmap(char* p, size_t bytes) {
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
  char* growing = nullptr;                     // where its segment begins, if that is one that grows
  bool mapped = true;
  bool split() const { return previous || next; }
};
struct BySize {
  bool operator()(const Block* a, const Block* b) const { return std::tie(a->size, a->address) < std::tie(b->size, b->address); }
};
struct ByAddress {
  bool operator()(const Block* a, const Block* b) const { return a->address < b->address; }
};
using Pool = std::set<Block*, BySize>;
struct Memory {
  Pool pools[kStreams][2];
  std::set<Block*, ByAddress> unmapped[kStreams][2];  // of segments that grow
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
  // CUDA leaves growing segments out: their free pages can be given back.
  if (b->split() && !b->growing) count_both(stats.inactive_split, stats.inactive_split_bytes, b, sign);
}
inline void keep(Block* b) {
  auto& m = memory(b->device);
  if (b->mapped) m.pools[b->stream][b->small].insert(b);
  else m.unmapped[b->stream][b->small].insert(b);
}
inline void take(Block* b) {
  auto& m = memory(b->device);
  if (b->mapped) m.pools[b->stream][b->small].erase(b);
  else m.unmapped[b->stream][b->small].erase(b);
}
// What lies beyond ``size`` bytes of a block, as a block of its own.
inline Block* split_off(Block* b, size_t size) {
  auto* rest = new Block{b->address + size, b->size - size, b->device, b->stream, b->small};
  rest->growing = b->growing;
  rest->mapped = b->mapped;
  rest->previous = b;
  rest->next = b->next;
  if (b->next) b->next->previous = rest;
  b->next = rest;
  b->size = size;
  return rest;
}
// A block that nobody uses is kept for the next, as one with its free neighbours.
inline Block* keep_merged(Block* b) {
  auto merge = [](Block* first, Block* second) {
    first->size += second->size;
    first->next = second->next;
    if (second->next) second->next->previous = first;
    delete second;
    return first;
  };
  auto taken = [&](Block* side) {
    if (!side || side->used || side->mapped != b->mapped) return false;
    take(side);
    count_inactive(side, -1);
    return true;
  };
  if (taken(b->previous)) b = merge(b->previous, b);
  if (taken(b->next)) b = merge(b, b->next);
  keep(b);
  return b;
}
inline void put_back(Block* b) {
  auto& m = memory(b->device);
  count_both(m.stats.active, m.stats.active_bytes, b, -1);
  b->used = false;
  poison(b, 0xFE);
  count_inactive(keep_merged(b), +1);
}
inline void put_back_finished(int device) {
  auto waiting = std::exchange(memory(device).in_use_elsewhere, {});
  for (auto& entry : waiting) {
    if (std::all_of(entry.second.begin(), entry.second.end(), reached)) put_back(entry.first);
    else memory(device).in_use_elsewhere.push_back(std::move(entry));
  }
}
// ---- segments that grow, as CUDA's ``ExpandableSegment``: one range of addresses, in which pages are mapped
inline size_t page(bool small) { return small ? small_segment() : large_segment(); }
inline void count_pages(const Block* b, int64_t bytes) {
  auto& stats = memory(b->device).stats;
  count(stats.reserved_bytes, b->small, bytes);
  bytes > 0 ? stats.num_device_alloc++ : stats.num_device_free++;
}
// Pages for the first ``size`` bytes of an unmapped block. It is free then, as one with free neighbours.
inline Block* map_pages(Block* b, size_t size) {
  size_t bytes = (size + page(b->small) - 1) / page(b->small) * page(b->small);
  if (memory(b->device).reserved() + bytes > memory(b->device).capacity) return nullptr;
  take(b);
  if (b->size > bytes) keep(split_off(b, bytes));
  map(b->address, bytes);
  count_pages(b, bytes);
  b->mapped = true;
  return keep_merged(b);
}
// The whole pages of a free block go back to the device; what it has of others stays.
inline void unmap_pages(Block* b) {
  size_t size = page(b->small), at = b->address - b->growing;
  size_t begin = (at + size - 1) / size * size, end = (at + b->size) / size * size;
  if (begin >= end) return;
  take(b);
  if (begin > at) {
    Block* before = std::exchange(b, split_off(b, begin - at));
    keep(before);
  }
  if (b->size > end - begin) keep(split_off(b, end - begin));
  unmap(b->address, b->size);
  count_pages(b, -int64_t(b->size));
  b->mapped = false;
  keep_merged(b);
}
// The lowest free addresses with room for ``size`` bytes, mapped as far as they are not; none where memory runs out.
// A segment stays when it is empty, which costs nothing but addresses.
inline Block* grown(int device, int stream, size_t size, bool small) {
  auto is_free = [](Block* b) { return b && !b->used; };
  Block* at = nullptr;
  for (Block* first : memory(device).unmapped[stream][small]) {
    if (is_free(first->previous)) first = first->previous;
    size_t room = 0;
    for (Block* b = first; room < size && is_free(b); b = b->next) room += b->size;
    if (room >= size) {
      at = first;
      break;
    }
  }
  if (!at) {
    size_t bytes = kGrowsTo / page(small) * page(small);
    at = new Block{take_addresses(bytes), bytes, device, stream, small};
    at->growing = at->address;
    at->mapped = false;
    keep(at);
  }
  if (!at->mapped) at = map_pages(at, std::min(at->size, size));
  while (at && at->size < size) at = map_pages(at->next, std::min(at->next->size, size - at->size));
  if (at) take(at);
  return at;
}

inline void release_cached(int device) {
  LOCKED;
  auto& m = memory(device);
  for (int stream = 0; stream < kStreams; stream++) finish(device, stream);
  put_back_finished(device);
  for (int stream = 0; stream < kStreams; stream++) finish(device, stream);  // the poison
  for (auto& of_stream : m.pools)
    for (auto& pool : of_stream)
      for (Block* b : std::vector<Block*>(pool.begin(), pool.end())) {
        if (b->growing) {
          unmap_pages(b);
          continue;
        }
        if (b->split()) continue;
        unmap(b->address, b->size);
        count_both(m.stats.segment, m.stats.reserved_bytes, b, -1);
        m.stats.num_device_free++;
        pool.erase(b);
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

inline Block* new_segment(int device, int stream, size_t size, bool small) {
  auto& m = memory(device);
  size_t whole = (size + small_segment() - 1) / small_segment() * small_segment();
  size_t bytes = small ? small_segment() : size < own_segment_from() ? large_segment() : whole;
  if (m.reserved() + bytes > m.capacity) return nullptr;
  auto* b = new Block{take_addresses(bytes), bytes, device, stream, small};
  map(b->address, bytes);
  count_both(m.stats.segment, m.stats.reserved_bytes, b, +1);
  m.stats.num_device_alloc++;
  return b;
}
inline Block* new_block(int device, int stream, size_t size, bool small, size_t requested) {
  auto& m = memory(device);
  auto attempt = [&] { return (expandable_segments ? grown : new_segment)(device, stream, size, small); };
  if (Block* b = attempt()) return b;
  m.stats.num_alloc_retries++;
  release_cached(device);
  Block* b = attempt();
  if (!b) m.stats.num_ooms++;
  TORCH_CHECK_WITH(OutOfMemoryError, b, "standin out of memory. Tried to allocate ", requested, " bytes. Device ", device,
                   " has a capacity of ", m.capacity, " bytes, of which ", m.reserved(), " are reserved and ",
                   m.stats.allocated_bytes[0].current, " allocated.");
  return b;
}
// The smallest free block that holds it; of a segment that grows, only while segments do.
inline Block* best_fit(int device, int stream, size_t size, bool small) {
  auto& pool = memory(device).pools[stream][small];
  Block key{nullptr, size, device, stream, small};
  auto it = pool.lower_bound(&key);
  while (!expandable_segments && it != pool.end() && (*it)->growing) ++it;
  if (it == pool.end()) return nullptr;
  // A block that can grow counts as large as it can become.
  auto can_become = [](Block* b) { return b->size + (b->next && !b->next->mapped ? b->next->size : 0); };
  auto next = std::next(it);
  while ((*it)->growing && next != pool.end() && can_become(*next) < can_become(*it)) it = next++;
  Block* b = *it;
  take(b);
  count_inactive(b, -1);
  return b;
}
inline Block* take_block(int device, int stream, size_t requested) {
  auto& m = memory(device);
  put_back_finished(device);
  size_t size = (requested + kBlock - 1) / kBlock * kBlock;
  bool small = size <= small_most();
  Block* b = best_fit(device, stream, size, small);
  if (!b) b = new_block(device, stream, size, small, requested);
  size_t left = b->size - size;
  if (small || expandable_segments ? left >= kBlock : left > small_most()) {
    Block* rest = split_off(b, size);
    keep(rest);
    count_inactive(rest, +1);
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
