// Devices and their properties, versions, errors, and the driver's entry points.
#include <dlfcn.h>

#include "state.h"

namespace standin {
int attribute(int which) {
  const Gpu& g = state().gpu;
  switch (which) {
    case cudaDevAttrMaxThreadsPerBlock: return 1024;
    case cudaDevAttrMaxBlockDimX:
    case cudaDevAttrMaxBlockDimY: return 1024;
    case cudaDevAttrMaxBlockDimZ: return 64;
    case cudaDevAttrMaxGridDimX: return 2147483647;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ: return 65535;
    case cudaDevAttrMaxSharedMemoryPerBlock: return 48 * KIB;
    case cudaDevAttrTotalConstantMemory: return 65536;
    case cudaDevAttrWarpSize: return 32;
    case cudaDevAttrMaxPitch: return 2147483647;
    case cudaDevAttrMaxRegistersPerBlock:
    case cudaDevAttrMaxRegistersPerMultiprocessor: return 65536;
    case cudaDevAttrClockRate: return g.clock_khz;
    case cudaDevAttrMemoryClockRate: return g.memory_clock_khz;
    case cudaDevAttrTextureAlignment: return 512;
    case cudaDevAttrGpuOverlap:
    case cudaDevAttrConcurrentKernels:
    case cudaDevAttrUnifiedAddressing: return 1;
    case cudaDevAttrMultiProcessorCount: return g.multiprocessors;
    case cudaDevAttrCanMapHostMemory:
    case cudaDevAttrEccEnabled: return 1;
    case cudaDevAttrGlobalMemoryBusWidth: return g.bus_bits;
    case cudaDevAttrL2CacheSize: return g.l2_bytes;
    case cudaDevAttrMaxThreadsPerMultiProcessor: return g.threads_per_multiprocessor();
    case cudaDevAttrAsyncEngineCount: return 3;
    case cudaDevAttrComputeCapabilityMajor: return g.major;
    case cudaDevAttrComputeCapabilityMinor: return g.minor;
    case cudaDevAttrStreamPrioritiesSupported:
    case cudaDevAttrGlobalL1CacheSupported: return 1;
    case cudaDevAttrLocalL1CacheSupported: return 1;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return g.shared_per_multiprocessor;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return g.shared_per_block_optin;
    case cudaDevAttrReservedSharedMemoryPerBlock: return KIB;
    case cudaDevAttrManagedMemory:
    case cudaDevAttrConcurrentManagedAccess: return 1;
    case cudaDevAttrComputePreemptionSupported: return 1;
    case cudaDevAttrCanUseHostPointerForRegisteredMem:
    case cudaDevAttrHostRegisterSupported: return 1;
    case cudaDevAttrCooperativeLaunch: return 1;
    case cudaDevAttrMaxBlocksPerMultiprocessor: return 32;
    case 102 /* virtual memory management */: return 1;
    case 120 /* cluster launch */: return g.major >= 9;
    default: return 0;
  }
}
static bool unknown(int d) { return d < 0 || d >= state().devices; }
static void uuid(char bytes[16], int d) {
  memcpy(bytes, "standin-device-0", 16);
  bytes[15] += d;
}
static int primary_context;
}  // namespace standin

using namespace standin;

extern "C" {
cudaError_t cudaGetDeviceCount(int* n) {
  *n = state().devices;
  return *n ? cudaSuccess : fail(cudaErrorNoDevice);
}
cudaError_t cudaGetDevice(int* d) {
  *d = current_device;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int d) {
  if (unknown(d)) return fail(cudaErrorInvalidDevice);
  current_device = d;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int) {
  *value = attribute(which);
  return cudaSuccess;
}
#if CUDA_VERSION >= 12000 && CUDA_VERSION < 13000
#undef cudaGetDeviceProperties
#define cudaGetDeviceProperties cudaGetDeviceProperties_v2
#endif
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int d) {
  if (unknown(d)) return fail(cudaErrorInvalidDevice);
  const Gpu& g = state().gpu;
  memset(p, 0, sizeof *p);
  snprintf(p->name, sizeof p->name, "%s", g.name);
  uuid(p->uuid.bytes, d);
  p->totalGlobalMem = state().capacity[d];
  p->sharedMemPerBlock = 48 * KIB;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536;
  p->warpSize = 32;
  p->memPitch = 2147483647;
  p->maxThreadsPerBlock = p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->totalConstMem = 65536;
  p->major = g.major;
  p->minor = g.minor;
  p->textureAlignment = 512;
  p->texturePitchAlignment = 32;
  p->multiProcessorCount = g.multiprocessors;
  p->canMapHostMemory = p->concurrentKernels = p->ECCEnabled = p->unifiedAddressing = p->managedMemory = 1;
  p->pciBusID = d + 1;
  p->asyncEngineCount = 3;
  p->memoryBusWidth = g.bus_bits;
  p->l2CacheSize = g.l2_bytes;
  p->maxThreadsPerMultiProcessor = g.threads_per_multiprocessor();
  p->streamPrioritiesSupported = p->globalL1CacheSupported = p->localL1CacheSupported = p->cooperativeLaunch = 1;
  p->sharedMemPerMultiprocessor = g.shared_per_multiprocessor;
  p->sharedMemPerBlockOptin = g.shared_per_block_optin;
  p->maxBlocksPerMultiProcessor = 32;
  p->reservedSharedMemPerBlock = KIB;
#if CUDA_VERSION < 13000
  p->clockRate = g.clock_khz;
  p->memoryClockRate = g.memory_clock_khz;
  p->deviceOverlap = 1;
#endif
#if CUDA_VERSION >= 12000
  p->hostRegisterSupported = 1;
  p->clusterLaunch = g.major >= 9;
#endif
#if CUDA_VERSION >= 13000
  p->hostNumaId = -1;
#endif
  return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char* text, int n, int d) {
  snprintf(text, n, "0000:%02x:00.0", d + 1);
  return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 1;
  return cudaSuccess;
}
cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int* low, int* high) {
  *low = 0;
  *high = -5;
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDA_VERSION;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDA_VERSION;
  return cudaSuccess;
}
cudaError_t cudaProfilerStart() { return cudaSuccess; }
cudaError_t cudaProfilerStop() { return cudaSuccess; }

// ---- errors ----
cudaError_t cudaGetLastError() { return take_last_error(); }
cudaError_t cudaPeekAtLastError() { return last_error(); }
static const struct {
  cudaError_t code;
  const char *name, *text;
} ERRORS[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInvalidConfiguration, "cudaErrorInvalidConfiguration", "invalid configuration argument"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {cudaErrorIllegalState, "cudaErrorIllegalState",
     "the operation cannot be performed in the present state"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorHostMemoryAlreadyRegistered, "cudaErrorHostMemoryAlreadyRegistered",
     "part or all of the requested memory range is already mapped"},
    {cudaErrorHostMemoryNotRegistered, "cudaErrorHostMemoryNotRegistered",
     "pointer does not correspond to a registered memory region"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported"},
};
const char* cudaGetErrorName(cudaError_t e) {
  for (auto& known : ERRORS)
    if (known.code == e) return known.name;
  return "cudaErrorUnknown";
}
const char* cudaGetErrorString(cudaError_t e) {
  for (auto& known : ERRORS)
    if (known.code == e) return known.text;
  static thread_local std::string text;
  text = "error " + std::to_string((int)e) + " of the stand-in runtime";
  return text.c_str();
}

// ---- the driver ----
CUresult cuInit(unsigned) { return state().devices ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE; }
CUresult cuDriverGetVersion(int* version) {
  *version = CUDA_VERSION;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGet(CUdevice* d, int i) {
  *d = i;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetCount(int* n) {
  *n = state().devices;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetName(char* text, int n, CUdevice) {
  snprintf(text, n, "%s", state().gpu.name);
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute which, CUdevice) {
  *value = attribute((int)which);
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetUuid_v2(CUuuid* u, CUdevice d) {
  uuid(u->bytes, d);
  return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) {
  *flags = 0;
  *active = 1;
  return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext* c, CUdevice) {
  *c = (CUcontext)&primary_context;
  return CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext* c) {
  *c = (CUcontext)&primary_context;
  return CUDA_SUCCESS;
}
CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }
CUresult cuCtxPushCurrent_v2(CUcontext) { return CUDA_SUCCESS; }
CUresult cuCtxPopCurrent_v2(CUcontext* c) { return cuCtxGetCurrent(c); }
CUresult cuCtxGetDevice(CUdevice* d) {
  *d = current_device;
  return CUDA_SUCCESS;
}
CUresult cuCtxGetLimit(size_t* value, CUlimit) {
  *value = 1 << 20;
  return CUDA_SUCCESS;
}
CUresult cuCtxSetLimit(CUlimit, size_t) { return CUDA_SUCCESS; }
CUresult cuCtxSynchronize() {
  Lock lock(state().mutex);
  count_wait();
  catch_up_all();
  return CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult, const char** text) {
  *text = "error of the stand-in driver";
  return CUDA_SUCCESS;
}
CUresult cuGetErrorName(CUresult, const char** text) {
  *text = "CUDA_ERROR_STANDIN";
  return CUDA_SUCCESS;
}
CUresult cuTensorMapEncodeTiled() { return CUDA_SUCCESS; }
CUresult cuTensorMapEncodeIm2col() { return CUDA_SUCCESS; }

// By name, as PyTorch and Triton ask for them; a name that nobody has answers "not supported".
static CUresult no_such_entry() { return CUDA_ERROR_NOT_SUPPORTED; }
static cudaError_t entry_point(const char* name, void** f, int* result) {
  std::string n(name);
  *f = dlsym(RTLD_DEFAULT, n.c_str());
  if (!*f) *f = dlsym(RTLD_DEFAULT, (n + "_v2").c_str());
  if (!*f) {
    *f = (void*)no_such_entry;
    standin_unsupported(name, 801);
  }
  if (result) *result = 0;
  return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** f, unsigned, unsigned long long, int* result) {
  return entry_point(name, f, result);
}
#if CUDA_VERSION >= 12000
cudaError_t cudaGetDriverEntryPoint(const char* name, void** f, unsigned long long, int* result) {
  return entry_point(name, f, result);
}
CUresult cuGetProcAddress_v2(const char* name, void** f, int, cuuint64_t, CUdriverProcAddressQueryResult* result) {
  entry_point(name, f, (int*)result);
  return CUDA_SUCCESS;
}
#else
cudaError_t cudaGetDriverEntryPoint(const char* name, void** f, unsigned long long) {
  return entry_point(name, f, nullptr);
}
#endif
}
