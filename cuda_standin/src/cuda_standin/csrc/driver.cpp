// libcuda.so.1: what Triton and Inductor's launcher ask a driver for. A module is a cubin that Triton's own ptxas made;
// its kernels' register counts and stack sizes are read from it (Inductor chooses by them), and no kernel runs.
// The entry points that PyTorch's C++ uses (virtual memory, pointers, contexts) are in runtime/.
#define __CUDA_API_VERSION_INTERNAL 1
#include <cuda.h>
#include <elf.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

extern "C" void standin_count_launch(const char* name, const unsigned* grid, const unsigned* block);
extern "C" void standin_record_kernel(void* stream);

namespace {
struct Function {
  std::string name;
  int registers = 32, stack = 0, shared = 0, max_dynamic_shared = 48 << 10;
};
struct Module {
  std::map<std::string, Function*> functions;
  Function* named(const char* name) {
    auto& f = functions[name];
    if (!f) f = new Function{name};
    return f;
  }
};
std::mutex mutex;

constexpr unsigned char SIZED_ATTRIBUTE = 4, REGISTER_COUNT = 0x2f, FRAME_SIZE = 0x11;

// Registers, stack and static shared memory of each kernel, from the ELF sections .nv.info, .nv.shared.* and .symtab.
// Nothing where the image is no ELF (PTX, or what our own nvrtc makes).
void read_cubin(const unsigned char* image, Module* module) {
  if (memcmp(image, ELFMAG, 4)) return;
  auto header = (const Elf64_Ehdr*)image;
  auto sections = (const Elf64_Shdr*)(image + header->e_shoff);
  auto section_names = (const char*)(image + sections[header->e_shstrndx].sh_offset);
  const Elf64_Sym* symbols = nullptr;
  const char* symbol_names = nullptr;
  size_t symbol_count = 0;
  for (int i = 0; i < header->e_shnum; i++) {
    if (sections[i].sh_type != SHT_SYMTAB) continue;
    symbols = (const Elf64_Sym*)(image + sections[i].sh_offset);
    symbol_count = sections[i].sh_size / sizeof *symbols;
    symbol_names = (const char*)(image + sections[sections[i].sh_link].sh_offset);
  }
  for (int i = 0; i < header->e_shnum; i++) {
    const char* name = section_names + sections[i].sh_name;
    if (!strncmp(name, ".nv.shared.", 11)) module->named(name + 11)->shared = sections[i].sh_size;
    if (strcmp(name, ".nv.info")) continue;
    auto at = image + sections[i].sh_offset, end = at + sections[i].sh_size;
    while (at + 4 <= end) {  // a format, an attribute, then a value, or its size and the value behind it
      unsigned char format = at[0], which = at[1];
      unsigned short size;
      memcpy(&size, at + 2, 2);
      at += 4;
      if (format != SIZED_ATTRIBUTE) continue;
      unsigned value[2];  // the symbol, and its number
      if (size >= sizeof value) {
        memcpy(value, at, sizeof value);
        if (symbols && value[0] < symbol_count) {
          auto f = module->named(symbol_names + symbols[value[0]].st_name);
          if (which == REGISTER_COUNT) f->registers = value[1];
          if (which == FRAME_SIZE) f->stack = value[1];
        }
      }
      at += size;
    }
  }
}
int attribute(CUdevice_attribute which) {
  int value;
  cuDeviceGetAttribute(&value, which, 0);
  return value;
}
CUresult launch(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                CUstream stream) {
  unsigned grid[3] = {gx, gy, gz}, block[3] = {bx, by, bz};
  standin_count_launch(((Function*)f)->name.c_str(), grid, block);
  standin_record_kernel(stream);
  return CUDA_SUCCESS;
}
}  // namespace

extern "C" {
CUresult cuModuleLoadData(CUmodule* out, const void* image) {
  auto module = new Module;
  read_cubin((const unsigned char*)image, module);
  *out = (CUmodule)module;
  return CUDA_SUCCESS;
}
CUresult cuModuleLoadDataEx(CUmodule* out, const void* image, unsigned, CUjit_option*, void**) {
  return cuModuleLoadData(out, image);
}
CUresult cuModuleLoad(CUmodule* out, const char* path) {
  FILE* file = fopen(path, "rb");
  if (!file) return CUDA_ERROR_FILE_NOT_FOUND;
  fseek(file, 0, SEEK_END);
  std::string image(ftell(file), '\0');
  rewind(file);
  size_t read = fread(image.data(), 1, image.size(), file);
  fclose(file);
  if (read != image.size() || read < 4) return CUDA_ERROR_INVALID_IMAGE;
  return cuModuleLoadData(out, image.data());
}
CUresult cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }
CUresult cuModuleGetFunction(CUfunction* out, CUmodule module, const char* name) {
  std::lock_guard<std::mutex> lock(mutex);
  *out = (CUfunction)((Module*)module)->named(name);
  return CUDA_SUCCESS;
}
CUresult cuFuncGetAttribute(int* value, CUfunction_attribute which, CUfunction function) {
  auto f = (Function*)function;
  switch (which) {
    case CU_FUNC_ATTRIBUTE_NUM_REGS: *value = f->registers; break;
    case CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES: *value = f->stack; break;
    case CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES: *value = f->shared; break;
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *value = 1024; break;
    case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: *value = f->max_dynamic_shared; break;
    default: *value = 0;
  }
  return CUDA_SUCCESS;
}
CUresult cuFuncSetAttribute(CUfunction f, CUfunction_attribute which, int value) {
  if (which != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) return CUDA_SUCCESS;
  if (value > attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)) return CUDA_ERROR_INVALID_VALUE;
  ((Function*)f)->max_dynamic_shared = value;
  return CUDA_SUCCESS;
}
CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return CUDA_SUCCESS; }
CUresult cuLaunchKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                        unsigned, CUstream stream, void**, void**) {
  return launch(f, gx, gy, gz, bx, by, bz, stream);
}
CUresult cuLaunchCooperativeKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                                   unsigned bz, unsigned, CUstream stream, void**) {
  return launch(f, gx, gy, gz, bx, by, bz, stream);
}
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* n, CUfunction function, int block, size_t shared) {
  auto f = (Function*)function;
  block = std::max(block, 1);
  int blocks = std::min(32, attribute(CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR) / block);
  if (int registers = f->registers * block) blocks = std::min(blocks, 65536 / registers);
  if (size_t each = shared + f->shared) {
    int here = attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR);
    blocks = std::min(blocks, here / (int)(each + 1024));
  }
  *n = blocks;
  return CUDA_SUCCESS;
}
#if CUDA_VERSION >= 11080
CUresult cuLaunchKernelEx(const CUlaunchConfig* c, CUfunction f, void**, void**) {
  return launch(f, c->gridDimX, c->gridDimY, c->gridDimZ, c->blockDimX, c->blockDimY, c->blockDimZ,
                c->hStream);
}
CUresult cuOccupancyMaxActiveClusters(int* n, CUfunction, const CUlaunchConfig*) {
  *n = attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT) / 2;
  return CUDA_SUCCESS;
}
#endif
}
