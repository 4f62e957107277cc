// Device memory with a capacity, pinned memory, copies, and the driver's virtual memory (for expandable segments).
#include <sys/mman.h>

#include "state.h"

namespace standin {

static cudaError_t device_malloc(void** out, size_t bytes) {
  Lock lock(state().mutex);
  State& s = state();
  int d = current_device;
  size_t pages = round_up(std::max<size_t>(bytes, 1), PAGE);
  *out = nullptr;
  if (s.used[d] + pages > s.capacity[d]) return fail(cudaErrorMemoryAllocation);
  void* p = map_memory(pages);
  if (!p) return fail(cudaErrorMemoryAllocation);
  s.blocks[(uintptr_t)p] = {pages, Kind::device, d, true};
  s.used[d] += pages;
  s.peak[d] = std::max(s.peak[d], s.used[d]);
  if (s.log) fprintf(s.log, "malloc %zu used %zu\n", bytes, s.used[d]);
  *out = p;
  return cudaSuccess;
}

cudaError_t device_free(void* p) {
  if (!p) return cudaSuccess;
  Lock lock(state().mutex);
  State& s = state();
  catch_up_all();  // cudaFree waits for the device
  auto i = s.blocks.find((uintptr_t)p);
  if (i == s.blocks.end()) return fail(cudaErrorInvalidValue);
  Block block = i->second;
  s.blocks.erase(i);
  if (block.kind == Kind::device) s.used[block.device] -= block.bytes;
  if (block.kind == Kind::pinned) s.pinned -= block.bytes;
  if (block.mapped_by_us) munmap(p, block.bytes);
  if (s.log) fprintf(s.log, "free %zu\n", block.bytes);
  return cudaSuccess;
}

static void copy_now(void* to, const void* from, size_t n) {
  if (n > state().skip_bytes && (on_device(to) || on_device(from))) return;
  memmove(to, from, n);
}
static bool pageable(const void* p) { return find_block(p) == nullptr; }
static void record_copy(Stream* s, const void* to, const void* from, size_t n) {
  if (!records(s)) return;
  bool there = on_device(to), here = on_device(from);
  Entry kind = there && here ? Entry::on_device : there ? Entry::to_device : Entry::to_host;
  record(kind, s, n, !pageable(there ? from : to));
}

}  // namespace standin

using namespace standin;

extern "C" {
cudaError_t cudaMalloc(void** p, size_t n) { return device_malloc(p, n); }
cudaError_t cudaFree(void* p) { return device_free(p); }
cudaError_t cudaMallocAsync(void** p, size_t n, cudaStream_t) { return device_malloc(p, n); }
cudaError_t cudaFreeAsync(void* p, cudaStream_t) { return device_free(p); }
cudaError_t cudaHostAlloc(void** p, size_t n, unsigned) {
  Lock lock(state().mutex);
  size_t bytes = round_up(std::max<size_t>(n, 1), 4096);
  void* q = map_memory(bytes);
  if (!q) return fail(cudaErrorMemoryAllocation);
  state().blocks[(uintptr_t)q] = {bytes, Kind::pinned, current_device, true};
  state().pinned += bytes;
  state().pinned_peak = std::max(state().pinned_peak, state().pinned);
  *p = q;
  return cudaSuccess;
}
cudaError_t cudaMallocHost(void** p, size_t n) { return cudaHostAlloc(p, n, 0); }
cudaError_t cudaMallocManaged(void** p, size_t n, unsigned) { return cudaHostAlloc(p, n, 0); }  // counted as the host's
cudaError_t cudaFreeHost(void* p) { return device_free(p); }
cudaError_t cudaHostRegister(void* p, size_t n, unsigned) {
  Lock lock(state().mutex);
  if (find_block(p)) return fail(cudaErrorHostMemoryAlreadyRegistered);
  state().blocks[(uintptr_t)p] = {n, Kind::registered, current_device, false};
  return cudaSuccess;
}
cudaError_t cudaHostUnregister(void* p) {
  Lock lock(state().mutex);
  catch_up_all();
  auto i = state().blocks.find((uintptr_t)p);
  if (i == state().blocks.end() || i->second.kind != Kind::registered) return fail(cudaErrorHostMemoryNotRegistered);
  state().blocks.erase(i);
  return cudaSuccess;
}
cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned) {
  *device = host;
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  Lock lock(state().mutex);
  *total = state().capacity[current_device];
  *free = *total - std::min(*total, state().used[current_device]);
  return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* a, const void* p) {
  Lock lock(state().mutex);
  memset(a, 0, sizeof *a);
  auto block = find_block(p);
  a->hostPointer = (void*)p;
  if (!block) {
    a->type = cudaMemoryTypeUnregistered;
    a->device = -2;
    return cudaSuccess;
  }
  bool device = block->kind == Kind::device || block->kind == Kind::reserved;
  a->type = device ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
  a->device = block->device;
  a->devicePointer = (void*)p;
  if (device) a->hostPointer = nullptr;
  return cudaSuccess;
}

// ---- copies ----
cudaError_t cudaMemcpy(void* to, const void* from, size_t n, cudaMemcpyKind) {
  Lock lock(state().mutex);
  count_wait();
  record_copy(real(nullptr), to, from, n);
  record(Entry::host_stream, real(nullptr));
  OwnWork own;
  catch_up(real(nullptr));
  copy_now(to, from, n);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t n, cudaMemcpyKind, cudaStream_t stream) {
  Lock lock(state().mutex);
  Stream* s = real(stream);
  if (state().log) fprintf(state().log, "copy %zu stream %llu\n", n, s->id);
  record_copy(s, to, from, n);
  if (!s->capture && (pageable(from) || pageable(to))) {  // such copies are staged: the host waits
    OwnWork own;
    catch_up(s);
    copy_now(to, from, n);
  } else {
    submit(s, [=] { copy_now(to, from, n); }, true);
  }
  return cudaSuccess;
}
cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t n, cudaStream_t stream) {
  return cudaMemcpyAsync(to, from, n, cudaMemcpyDefault, stream);
}
cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                              size_t height, cudaMemcpyKind kind, cudaStream_t stream) {
  for (size_t i = 0; i < height; i++)
    cudaMemcpyAsync((char*)to + i * to_pitch, (const char*)from + i * from_pitch, width, kind, stream);
  return cudaSuccess;
}
cudaError_t cudaMemset(void* p, int value, size_t n) {
  Lock lock(state().mutex);
  catch_up(real(nullptr));
  if (n <= state().skip_bytes) memset(p, value, n);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* p, int value, size_t n, cudaStream_t stream) {
  Lock lock(state().mutex);
  record(Entry::fill, real(stream), n);
  submit(real(stream), [=] {
    if (n <= state().skip_bytes) memset(p, value, n);
  });
  return cudaSuccess;
}
#if CUDA_VERSION >= 13000
cudaError_t cudaMemPrefetchAsync(const void*, size_t, long long, unsigned, cudaStream_t) { return cudaSuccess; }
#else
cudaError_t cudaMemPrefetchAsync(const void*, size_t, int, cudaStream_t) { return cudaSuccess; }
#endif

// ---- virtual memory: an address range is one block, physical handles only count bytes ----
CUresult cuMemGetAllocationGranularity(size_t* n, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
  *n = PAGE;
  return CUDA_SUCCESS;
}
CUresult cuMemAddressReserve(CUdeviceptr* p, size_t n, size_t, CUdeviceptr, unsigned long long) {
  Lock lock(state().mutex);
  void* q = map_memory(n);
  if (!q) return CUDA_ERROR_OUT_OF_MEMORY;
  state().blocks[(uintptr_t)q] = {n, Kind::reserved, current_device, true};
  *p = (CUdeviceptr)q;
  return CUDA_SUCCESS;
}
CUresult cuMemAddressFree(CUdeviceptr p, size_t) {
  return device_free((void*)p) == cudaSuccess ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t n, const CUmemAllocationProp* prop,
                     unsigned long long) {
  Lock lock(state().mutex);
  State& s = state();
  int d = prop ? prop->location.id : current_device;
  if (s.used[d] + n > s.capacity[d]) return CUDA_ERROR_OUT_OF_MEMORY;
  s.used[d] += n;
  s.peak[d] = std::max(s.peak[d], s.used[d]);
  *handle = s.next_handle++;
  s.handles[*handle] = {d, n};
  return CUDA_SUCCESS;
}
CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  Lock lock(state().mutex);
  auto i = state().handles.find(handle);
  if (i == state().handles.end()) return CUDA_ERROR_INVALID_VALUE;
  state().used[i->second.first] -= i->second.second;
  state().handles.erase(i);
  return CUDA_SUCCESS;
}
CUresult cuMemMap(CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long) {
  return CUDA_SUCCESS;
}
CUresult cuMemUnmap(CUdeviceptr p, size_t n) {
  Lock lock(state().mutex);
  catch_up_all();
  madvise((void*)p, n, MADV_DONTNEED);
  return CUDA_SUCCESS;
}
CUresult cuMemSetAccess(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t) { return CUDA_SUCCESS; }
CUresult cuMemsetD32Async(CUdeviceptr p, unsigned value, size_t n, CUstream stream) {
  Lock lock(state().mutex);
  submit(real((cudaStream_t)stream), [=] {
    if (n * 4 <= state().skip_bytes) std::fill_n((unsigned*)p, n, value);
  });
  return CUDA_SUCCESS;
}
CUresult cuPointerGetAttribute(void* value, CUpointer_attribute which, CUdeviceptr p) {
  Lock lock(state().mutex);
  auto block = find_block((void*)p);
  if (!block) return CUDA_ERROR_INVALID_VALUE;
  bool device = block->kind == Kind::device || block->kind == Kind::reserved;
  if (which == CU_POINTER_ATTRIBUTE_MEMORY_TYPE) *(unsigned*)value = device ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
  else if (which == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL) *(int*)value = block->device;
  else if (which == CU_POINTER_ATTRIBUTE_DEVICE_POINTER) *(CUdeviceptr*)value = p;
  else return CUDA_ERROR_NOT_SUPPORTED;
  return CUDA_SUCCESS;
}
CUresult cuMemGetAddressRange_v2(CUdeviceptr* base, size_t* n, CUdeviceptr p) {
  Lock lock(state().mutex);
  uintptr_t begin;
  auto block = find_block((void*)p, &begin);
  if (!block) return CUDA_ERROR_NOT_FOUND;
  if (base) *base = begin;
  if (n) *n = block->bytes;
  return CUDA_SUCCESS;
}
}
