// Kernels are registered and launched, and do nothing.
#include <dlfcn.h>

#include <unordered_set>

#include "state.h"

namespace standin {
// Libraries of others whose kernels were launched: nothing puts values in their place.
static std::set<std::string>& foreign_names() {
  static auto* names = new std::set<std::string>;
  return *names;
}
static void note_library(const void* kernel) {
  static thread_local std::unordered_set<const void*> known;
  Dl_info found;
  if (!known.insert(kernel).second || !dladdr(kernel, &found) || !found.dli_fname) return;
  std::string path = found.dli_fname;
  if (path.find("/torch/lib/") != std::string::npos) return;
  Lock lock(state().mutex);
  foreign_names().insert(path.substr(path.rfind('/') + 1));
}

struct Call {
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
};
static thread_local std::vector<Call> calls;

static cudaError_t launched(const void* kernel, dim3 grid, dim3 block) {
  note_library(kernel);
  const char* name = "?";
  if (state().log) {
    Lock lock(state().mutex);
    auto i = state().kernel_names.find(kernel);
    if (i != state().kernel_names.end()) name = i->second.c_str();
  }
  unsigned g[3] = {grid.x, grid.y, grid.z}, b[3] = {block.x, block.y, block.z};
  count_launch(name, g, b);
  return cudaSuccess;
}
}  // namespace standin

using namespace standin;

extern "C" {
const char* standin_foreign_libraries() {
  static std::string text;
  Lock lock(state().mutex);
  text.clear();
  for (auto& name : foreign_names()) text += name + "\n";
  return text.c_str();
}
void** __cudaRegisterFatBinary(void*) {
  static void* one[4];
  return one;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
char __cudaInitModule(void**) { return 1; }
void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*,
                            int*) {
  if (state().log) state().kernel_names[host] = name;
}
void __cudaRegisterVar(void**, char* host, char*, const char*, int, size_t size, int, int) {
  state().symbols[host] = {nullptr, size};
}
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void* stream) {
  calls.push_back({grid, block, shared, (cudaStream_t)stream});
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  if (calls.empty()) return fail(cudaErrorInvalidConfiguration);
  Call c = calls.back();
  calls.pop_back();
  *grid = c.grid;
  *block = c.block;
  *shared = c.shared;
  *(cudaStream_t*)stream = c.stream;
  return cudaSuccess;
}
cudaError_t __cudaGetKernel(void** kernel, const void* f) {
  *kernel = (void*)f;
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(void* f, dim3 grid, dim3 block, void**, size_t, cudaStream_t) {
  return launched(f, grid, block);
}
cudaError_t cudaLaunchKernel(const void* f, dim3 grid, dim3 block, void**, size_t, cudaStream_t) {
  return launched(f, grid, block);
}
cudaError_t cudaLaunchCooperativeKernel(const void* f, dim3 grid, dim3 block, void**, size_t, cudaStream_t) {
  return launched(f, grid, block);
}
#if CUDA_VERSION >= 11080
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* c, const void* f, void**) {
  return launched(f, c->gridDim, c->blockDim);
}
#endif

// ---- what a kernel needs: one guess for all ----
constexpr int REGISTERS = 32;
// What the driver would load of PyTorch's code: CUB asks for it, and has a policy for what was compiled only.
static int loaded_architecture() {
  static const int own = state().gpu.major * 10 + state().gpu.minor;
  int best = 0;
  for (int compiled : {STANDIN_ARCHS})
    if (compiled <= own) best = std::max(best, compiled);
  return best ? best : own;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* a, const void*) {
  memset(a, 0, sizeof *a);
  a->maxThreadsPerBlock = 1024;
  a->numRegs = REGISTERS;
  a->ptxVersion = a->binaryVersion = loaded_architecture();
  a->maxDynamicSharedSizeBytes = 48 * KIB;
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int value) {
  return value > state().gpu.shared_per_block_optin ? fail(cudaErrorInvalidValue) : cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* n, const void*, int block, size_t shared,
                                                                   unsigned) {
  block = std::max(block, 1);
  int by_threads = state().gpu.threads_per_multiprocessor() / block;
  int by_shared = shared ? (int)(state().gpu.shared_per_multiprocessor / (shared + KIB)) : 32;
  int by_registers = 65536 / (REGISTERS * block);
  *n = std::max(1, std::min({by_threads, by_shared, by_registers, 32}));
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* n, const void* f, int block, size_t shared) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(n, f, block, shared, 0);
}

// ---- libraries of kernels, symbols ----
cudaError_t cudaLibraryLoadData(void** library, const void*, void*, void**, unsigned, void*, void**, unsigned) {
  static int one;
  *library = &one;
  return cudaSuccess;
}
cudaError_t cudaLibraryUnload(void*) { return cudaSuccess; }
cudaError_t cudaLibraryGetKernel(void** kernel, void*, const char* name) {
  *kernel = strdup(name);
  if (state().log) {
    Lock lock(state().mutex);
    state().kernel_names[*kernel] = name;
  }
  return cudaSuccess;
}
cudaError_t cudaKernelSetAttributeForDevice(void*, cudaFuncAttribute, int, int) { return cudaSuccess; }
cudaError_t cudaGetSymbolAddress(void** p, const void* symbol) {
  Lock lock(state().mutex);
  auto& s = state().symbols[symbol];
  if (!s.first) s.first = calloc(1, std::max<size_t>(s.second, 16));
  *p = s.first;
  return cudaSuccess;
}
cudaError_t cudaMemcpyToSymbol(const void* symbol, const void* from, size_t n, size_t offset, cudaMemcpyKind) {
  void* p;
  cudaGetSymbolAddress(&p, symbol);
  memcpy((char*)p + offset, from, n);
  return cudaSuccess;
}
}
