// The functions of the CUDA driver that are used, declared as in cuda.h. They are looked up in the
// driver's library at run time, so jdaso can be built on machines without CUDA.

#pragma once

#include <cstddef>

typedef struct CUctx_st* CUcontext;
typedef struct CUstream_st* CUstream;
typedef struct CUevent_st* CUevent;
typedef struct CUmemPoolHandle_st* CUmemoryPool;
typedef unsigned long long CUdeviceptr;

namespace jdaso {

constexpr unsigned kStreamNonBlocking = 1;     // CU_STREAM_NON_BLOCKING
constexpr unsigned kEventDisableTiming = 2;    // CU_EVENT_DISABLE_TIMING
constexpr unsigned kHostRegisterPortable = 1;  // CU_MEMHOSTREGISTER_PORTABLE
constexpr int kReleaseThreshold = 4;           // CU_MEMPOOL_ATTR_RELEASE_THRESHOLD

// Each function returns a CUresult, which is 0 on success.
#define JDASO_DRIVER_FUNCTIONS(function)                                           \
  function(cuCtxPushCurrent_v2, (CUcontext))                                       \
  function(cuCtxPopCurrent_v2, (CUcontext*))                                       \
  function(cuCtxGetDevice, (int*))                                                 \
  function(cuDevicePrimaryCtxRetain, (CUcontext*, int))                            \
  function(cuDeviceGetDefaultMemPool, (CUmemoryPool*, int))                        \
  function(cuMemPoolSetAttribute, (CUmemoryPool, int, void*))                      \
  function(cuMemAllocHost_v2, (void**, size_t))                                    \
  function(cuStreamCreate, (CUstream*, unsigned))                                  \
  function(cuStreamGetCtx, (CUstream, CUcontext*))                                 \
  function(cuStreamSynchronize, (CUstream))                                        \
  function(cuStreamWaitEvent, (CUstream, CUevent, unsigned))                       \
  function(cuEventCreate, (CUevent*, unsigned))                                    \
  function(cuEventRecord, (CUevent, CUstream))                                     \
  function(cuLaunchHostFunc, (CUstream, void (*)(void*), void*))                   \
  function(cuMemAllocAsync, (CUdeviceptr*, size_t, CUstream))                      \
  function(cuMemFreeAsync, (CUdeviceptr, CUstream))                                \
  function(cuMemcpyDtoDAsync_v2, (CUdeviceptr, CUdeviceptr, size_t, CUstream))     \
  function(cuMemcpyDtoHAsync_v2, (void*, CUdeviceptr, size_t, CUstream))           \
  function(cuMemcpyHtoDAsync_v2, (CUdeviceptr, const void*, size_t, CUstream))     \
  function(cuMemHostRegister_v2, (void*, size_t, unsigned))                        \
  function(cuMemHostUnregister, (void*))                                           \
  function(cuGetErrorString, (int, const char**))

struct Driver {
#define JDASO_MEMBER(name, arguments) int(*name) arguments = nullptr;
  JDASO_DRIVER_FUNCTIONS(JDASO_MEMBER)
#undef JDASO_MEMBER
};

}  // namespace jdaso
