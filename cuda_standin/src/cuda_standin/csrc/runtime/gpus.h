// What each GPU says of itself: the properties that PyTorch's host code decides by (kernels, grids, workspaces).
//
// Names, compute capabilities, multiprocessors, shared memory and caches are NVIDIA's (data sheets; CUDA C++
// programming guide, table "technical specifications per compute capability"). `memory_mib` is what a process sees as
// total memory: where a message of PyTorch's was found ("total capacity of 15.78 GiB"), that; else nvidia-smi's number.
#pragma once
#include <cstddef>
#include <cstring>

namespace standin {

struct Gpu {
  const char *id, *name;
  int major, minor, multiprocessors;
  size_t memory_mib;
  int shared_per_multiprocessor, shared_per_block_optin, l2_bytes, bus_bits, clock_khz, memory_clock_khz;
  int threads_per_multiprocessor() const {
    if (major == 7 && minor == 5) return 1024;
    return (major == 8 && minor != 0) || major == 12 ? 1536 : 2048;
  }
};

constexpr int KIB = 1 << 10, MIB = 1 << 20;
constexpr Gpu GPUS[] = {
    {"h100", "NVIDIA H100 80GB HBM3", 9, 0, 132, 81079, 228 * KIB, 227 * KIB, 50 * MIB, 5120, 1980000, 2619000},
    {"h100-pcie", "NVIDIA H100 PCIe", 9, 0, 114, 81090, 228 * KIB, 227 * KIB, 50 * MIB, 5120, 1755000, 1593000},
    {"h200", "NVIDIA H200", 9, 0, 132, 143155, 228 * KIB, 227 * KIB, 50 * MIB, 6144, 1980000, 3201000},
    {"b200", "NVIDIA B200", 10, 0, 148, 182643, 228 * KIB, 227 * KIB, 126 * MIB, 7680, 1965000, 3996000},
    {"a100-80gb", "NVIDIA A100-SXM4-80GB", 8, 0, 108, 81153, 164 * KIB, 163 * KIB, 40 * MIB, 5120, 1410000, 1593000},
    {"a100-40gb", "NVIDIA A100-SXM4-40GB", 8, 0, 108, 40339, 164 * KIB, 163 * KIB, 40 * MIB, 5120, 1410000, 1215000},
    {"a10", "NVIDIA A10G", 8, 6, 80, 22515, 100 * KIB, 99 * KIB, 6 * MIB, 384, 1710000, 6251000},
    {"l4", "NVIDIA L4", 8, 9, 58, 22478, 100 * KIB, 99 * KIB, 48 * MIB, 192, 2040000, 6251000},
    {"l40s", "NVIDIA L40S", 8, 9, 142, 45589, 100 * KIB, 99 * KIB, 96 * MIB, 384, 2520000, 9001000},
    {"rtx3090", "NVIDIA GeForce RTX 3090", 8, 6, 82, 24258, 100 * KIB, 99 * KIB, 6 * MIB, 384, 1695000, 9751000},
    {"rtx4090", "NVIDIA GeForce RTX 4090", 8, 9, 128, 24217, 100 * KIB, 99 * KIB, 72 * MIB, 384, 2520000, 10501000},
    {"rtx5090", "NVIDIA GeForce RTX 5090", 12, 0, 170, 32109, 100 * KIB, 99 * KIB, 96 * MIB, 512, 2407000, 14001000},
    {"t4", "Tesla T4", 7, 5, 40, 14930, 64 * KIB, 64 * KIB, 4 * MIB, 256, 1590000, 5001000},
    {"v100-16gb", "Tesla V100-SXM2-16GB", 7, 0, 80, 16160, 96 * KIB, 96 * KIB, 6 * MIB, 4096, 1530000, 877000},
    {"v100-32gb", "Tesla V100-SXM2-32GB", 7, 0, 80, 32510, 96 * KIB, 96 * KIB, 6 * MIB, 4096, 1530000, 877000},
};
constexpr struct {
  const char *alias, *id;
} ALIASES[] = {
    {"a100", "a100-80gb"}, {"v100", "v100-16gb"}, {"a10g", "a10"},
    {"h100-sxm", "h100"},  {"4090", "rtx4090"},   {"3090", "rtx3090"},
};

inline const Gpu* find_gpu(const char* id) {
  for (auto& a : ALIASES)
    if (!strcmp(id, a.alias)) id = a.id;
  for (auto& g : GPUS)
    if (!strcmp(id, g.id)) return &g;
  return nullptr;
}

}  // namespace standin
