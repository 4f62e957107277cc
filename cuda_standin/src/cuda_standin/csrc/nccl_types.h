// Names and numbers of NCCL's interface that PyTorch uses (its public documentation, "API" chapter), and of the CUDA
// runtime underneath. Declared here so that no header of either is needed.
#pragma once
#include <cstddef>
#include <cstdint>

extern "C" {
typedef struct CUstream_st* cudaStream_t;
int cudaGetDevice(int*);
int cudaMalloc(void**, size_t);
int cudaFree(void*);
int cudaStreamSynchronize(cudaStream_t);
int cudaStreamIsCapturing(cudaStream_t, int*);
int cudaLaunchHostFunc(cudaStream_t, void (*)(void*), void*);

enum ncclResult_t {
  ncclSuccess = 0,
  ncclUnhandledCudaError,
  ncclSystemError,
  ncclInternalError,
  ncclInvalidArgument,
  ncclInvalidUsage,
  ncclRemoteError,
  ncclInProgress
};
enum ncclDataType_t {
  ncclInt8 = 0,
  ncclUint8,
  ncclInt32,
  ncclUint32,
  ncclInt64,
  ncclUint64,
  ncclFloat16,
  ncclFloat32,
  ncclFloat64,
  ncclBfloat16,
  ncclFloat8e4m3,
  ncclFloat8e5m2
};
// From ncclOwnOps on: what ncclRedOpCreatePreMulSum made.
enum ncclRedOp_t { ncclSum = 0, ncclProd, ncclMax, ncclMin, ncclAvg, ncclOwnOps };
struct ncclUniqueId {
  char internal[128];
};
typedef struct ncclComm* ncclComm_t;
}
