// Pinned host memory: allocated so, or registered afterwards, both within one limit.
#pragma once
#include <ATen/core/CachingHostAllocator.h>

#include "streams.h"

namespace standin {
constexpr uintptr_t kPage = 4096;
enum HostError { OK = 0, OUT_OF_MEMORY = 2, ALREADY_REGISTERED = 712, NOT_REGISTERED = 713 };  // CUDA's numbers

struct Pinned {
  std::map<const char*, size_t> ranges;
  int64_t limit = int64_t(1) << 40, bytes = 0;
};
inline Pinned& pinned() {
  static auto* it = new Pinned;
  return *it;
}
inline bool is_pinned(const void* p) {
  LOCKED;
  auto& ranges = pinned().ranges;
  auto it = ranges.upper_bound(static_cast<const char*>(p));
  return it != ranges.begin() && (--it, static_cast<const char*>(p) < it->first + it->second);
}
inline HostError pin(const char* p, size_t bytes) {
  if (pinned().bytes + int64_t(bytes) > pinned().limit) return OUT_OF_MEMORY;
  pinned().ranges[p] = bytes;
  pinned().bytes += bytes;
  return OK;
}
inline HostError unpin(const char* p) {
  auto found = pinned().ranges.extract(p);
  if (found.empty()) return NOT_REGISTERED;
  pinned().bytes -= found.mapped();
  return OK;
}
inline HostError register_host(void* p, size_t bytes) {
  LOCKED;
  auto begin = reinterpret_cast<uintptr_t>(p) / kPage * kPage, end = (reinterpret_cast<uintptr_t>(p) + bytes + kPage - 1) / kPage * kPage;
  for (auto& [at, size] : pinned().ranges)
    if (uintptr_t(at) < end && uintptr_t(at) + size > begin) return ALREADY_REGISTERED;
  return pin(static_cast<char*>(p), bytes);
}
inline HostError unregister_host(void* p) {
  LOCKED;
  auto it = pinned().ranges.find(static_cast<char*>(p));
  if (it == pinned().ranges.end()) return NOT_REGISTERED;
  const char *begin = it->first, *end = begin + it->second;
  for (auto& device : world().queues)
    for (auto& q : device)
      for (auto& work : q.items)
        if (work.host_begin && work.host_begin < end && work.host_begin + work.host_bytes > begin) world().unregistered_in_use++;
  return unpin(begin);
}

// Memory that is let go stays until the copies that were queued with it are done.
struct HostAllocator final : at::HostAllocator {
  std::map<void*, std::vector<Mark>> users;
  std::map<void*, std::vector<Mark>> let_go;
  at::HostStats stats;

  static HostAllocator& self() {
    static auto* it = new HostAllocator;
    return *it;
  }
  void free_finished() {
    for (auto it = let_go.begin(); it != let_go.end();) {
      if (!std::all_of(it->second.begin(), it->second.end(), reached)) {
        ++it;
        continue;
      }
      unpin(static_cast<char*>(it->first));
      free(it->first);
      it = let_go.erase(it);
    }
  }
  static void drop(void* p) {
    LOCKED;
    if (auto found = self().users.extract(p); !found.empty()) self().let_go.insert(std::move(found));
    self().free_finished();
  }
  DataPtr allocate(size_t bytes) override {
    LOCKED;
    free_finished();
    size_t whole = (std::max<size_t>(bytes, 1) + kPage - 1) / kPage * kPage;
    auto* p = static_cast<char*>(aligned_alloc(kPage, whole));
    if (pin(p, whole) != OK) {
      free(p);
      TORCH_CHECK(false, "standin: cannot pin ", whole, " bytes: ", pinned().bytes, " of at most ", pinned().limit, " are pinned");
    }
    users[p];
    return {p, p, &drop, Device(DeviceType::CPU)};
  }
  DeleterFnPtr raw_deleter() const override { return &drop; }
  void copy_data(void* to, const void* from, size_t bytes) const override { memcpy(to, from, bytes); }
  bool record_event(void*, void* context, Stream stream) override {
    LOCKED;
    auto it = users.find(context);
    if (it == users.end()) return false;
    it->second.push_back(end_of(stream.device_index(), stream.id()));
    return true;
  }
  void empty_cache() override {
    LOCKED;
    free_finished();
  }
  at::HostStats get_stats() override { return stats; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};
REGISTER_HOST_ALLOCATOR(kType, &HostAllocator::self())
}  // namespace standin
