// What torch asks a device for: guard, streams and events, generators, hooks.
#pragma once
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "host_memory.h"
#include "memory.h"

namespace standin {
inline void set_device(int device) {
  TORCH_CHECK(device >= 0 && device < kDevices, "standin: no device ", device, ", there are ", kDevices);
  current_device = device;
}
inline Stream stream_of(int device, int stream) { return Stream(Stream::UNSAFE, Device(kType, device), stream); }
inline Stream current_stream(int device) { return stream_of(device, current_streams[device]); }

struct Guard final : impl::DeviceGuardImplInterface {
  static int index(Device d) { return device_or_current(d.index()); }
  DeviceType type() const override { return kType; }
  Device exchangeDevice(Device d) const override {
    Device before = getDevice();
    set_device(index(d));
    return before;
  }
  Device getDevice() const override { return Device(kType, current_device); }
  void setDevice(Device d) const override { set_device(index(d)); }
  void uncheckedSetDevice(Device d) const noexcept override { current_device = index(d); }
  DeviceIndex deviceCount() const noexcept override { return kDevices; }

  Stream getStream(Device d) const override { return current_stream(index(d)); }
  Stream getDefaultStream(Device d) const override { return stream_of(index(d), 0); }
  Stream getNewStream(Device d, int) const override {
    LOCKED;
    return stream_of(index(d), 1 + world().next_stream++ % kPool);
  }
  Stream getStreamFromGlobalPool(Device d, bool) const override { return getNewStream(d, 0); }
  Stream exchangeStream(Stream s) const override {
    return stream_of(s.device_index(), std::exchange(current_streams[s.device_index()], int(s.id())));
  }
  void* getStreamNativeHandle(const Stream s) const override { return &queue(s.device_index(), s.id()); }
  bool queryStream(const Stream& s) const override { return asked(end_of(s.device_index(), s.id())); }
  void synchronizeStream(const Stream& s) const override { synchronize_stream(s.device_index(), s.id()); }
  void synchronizeDevice(DeviceIndex d) const override { synchronize_device(device_or_current(d)); }
  void recordDataPtrOnStream(const DataPtr& p, const Stream& s) const override { allocator().recordStream(p, s); }

  static Event* event(void* e) { return static_cast<Event*>(e); }
  void record(void** e, const Stream& s, DeviceIndex, EventFlag flag) const override {
    LOCKED;
    if (!*e) *e = new Event;
    event(*e)->timed = flag == EventFlag::BACKEND_DEFAULT;
    event(*e)->record(s.device_index(), s.id());
  }
  void block(void* e, const Stream& s) const override {
    LOCKED;
    if (e) event(e)->make_wait(s.device_index(), s.id());
  }
  bool queryEvent(void* e) const override { return !e || asked(event(e)->mark); }
  void synchronizeEvent(void* e) const override {
    LOCKED;
    if (e) event(e)->synchronize();
  }
  void destroyEvent(void* e, DeviceIndex) const noexcept override { delete event(e); }
  double elapsedTime(void* begin, void* end, DeviceIndex) const override {
    LOCKED;
    return event(begin)->ms_until(*event(end));
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// A seed and an offset, as Philox has: 16 bytes of state. The numbers themselves are the CPU's.
struct Generator final : GeneratorImpl {
  uint64_t seed_ = default_rng_seed_val, offset_ = 0;
  explicit Generator(int device) : GeneratorImpl(Device(kType, device), DispatchKeySet(DispatchKey::PrivateUse1)) {}
  void set_current_seed(uint64_t seed) override { seed_ = seed, offset_ = 0; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(std::random_device{}());
    return seed_;
  }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  void set_state(const TensorImpl& state) override {
    TORCH_CHECK(state.device_type() == DeviceType::CPU && state.numel() == 16 && state.dtype() == ScalarType::Byte,
                "standin: RNG state must be a CPU tensor of 16 bytes");
    auto* words = static_cast<const uint64_t*>(state.data());
    seed_ = words[0], offset_ = words[1];
  }
  intrusive_ptr<TensorImpl> get_state() const override {
    auto state = at::detail::empty_cpu({16}, ScalarType::Byte);
    auto* words = static_cast<uint64_t*>(state.unsafeGetTensorImpl()->mutable_data());
    words[0] = seed_, words[1] = offset_;
    return state.getIntrusivePtr();
  }
  Generator* clone_impl() const override {
    auto* copy = new Generator(device_.index());
    copy->seed_ = seed_, copy->offset_ = offset_;
    return copy;
  }
};
inline const at::Generator& default_generator(int device) {
  static auto* all = new std::vector<at::Generator>{at::make_generator<Generator>(0), at::make_generator<Generator>(1)};
  return (*all)[device_or_current(device)];
}
// What the next random op draws from; the state moves on by as many numbers as it may take.
inline uint64_t draw(at::Generator generator, int64_t numbers) {
  TORCH_CHECK(generator.device().type() == kType, "Expected a 'standin' device type for generator but found '",
              generator.device().type(), "'");
  std::lock_guard<std::mutex> held(generator.mutex());
  uint64_t offset = generator.get_offset();
  generator.set_offset(offset + (std::max<int64_t>(numbers, 1) + 3) / 4 * 4);
  return (generator.current_seed() * 0x9E3779B97F4A7C15ull) ^ (offset * 0xD1B54A32D192ED03ull + 1);
}

inline void resize_bytes(const Storage& storage, size_t bytes) {
  DeviceGuard guard(storage.device());
  DataPtr fresh = allocator().allocate(bytes);
  if (size_t kept = std::min(bytes, storage.nbytes())) allocator().copy_data(fresh.get(), storage.data(), kept);
  storage.set_data_ptr(std::move(fresh));
  storage.set_nbytes(bytes);
}
struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(DeviceIndex d) const override { set_device(d); }
  DeviceIndex getCurrentDevice() const override { return current_device; }
  DeviceIndex exchangeDevice(DeviceIndex d) const override {
    int before = current_device;
    set_device(d);
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex d) const override { return d < 0 ? current_device : exchangeDevice(d); }
  bool isPinnedPtr(const void* p) const override { return is_pinned(p); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &HostAllocator::self(); }
  Device getDeviceFromPtr(void*) const override { return Device(kType, current_device); }
  const at::Generator& getDefaultGenerator(DeviceIndex d) const override { return default_generator(d); }
  at::Generator getNewGenerator(DeviceIndex d) const override { return at::make_generator<Generator>(device_or_current(d)); }
  void resizePrivateUse1Bytes(const Storage& storage, size_t bytes) const override { resize_bytes(storage, bytes); }
};
inline const bool hooks_registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();
}  // namespace standin
