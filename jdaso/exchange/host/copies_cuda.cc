// XLA custom calls for CUDA devices. The program's stream copies the leaves to a snapshot in device
// memory. A second stream copies the snapshot to the host while the program continues, and a third
// stream copies sums from the host. The program's stream waits only for sums that are due. The
// thread that dispatches the program waits for the scalar arguments that it has to read.

#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <numeric>
#include <stdexcept>
#include <vector>

#include "ffi_queue.h"
#include "cuda_driver.h"

#ifndef JDASO_STREAM  // tests replace the driver and its streams
#define JDASO_STREAM ffi::PlatformStream<CUstream>
#endif

namespace jdaso {
namespace {

Driver driver;

void Check(int result, const char* call) {
  if (result == 0) return;
  const char* message = nullptr;
  driver.cuGetErrorString(result, &message);
  throw std::runtime_error(std::string(call) + ": " + (message ? message : "unknown error"));
}
#define CUDA(name, ...) Check(driver.name(__VA_ARGS__), #name)

CUdeviceptr Pointer(const void* device) { return reinterpret_cast<CUdeviceptr>(device); }

class InContext {
 public:
  explicit InContext(CUcontext context) { CUDA(cuCtxPushCurrent_v2, context); }
  ~InContext() {
    CUcontext context;
    driver.cuCtxPopCurrent_v2(&context);
  }
};

// The streams and events that are added to each device.
struct Device {
  CUcontext context = nullptr;
  CUstream to_host = nullptr, from_host = nullptr;
  CUevent snapshot_copied = nullptr;
  CUevent sums_copied = nullptr;
  CUevent posted = nullptr;
};

// Guards the two variables below and the use of events. The objects are never destroyed, because
// threads of XLA may outlive main.
auto& mutex = *new std::mutex;
auto& devices = *new std::deque<Device>;  // a deque, because its elements never move
CUevent last_posted = nullptr;            // of all devices

Device& DeviceOf(CUstream stream) {
  CUcontext context;
  CUDA(cuStreamGetCtx, stream, &context);
  std::lock_guard<std::mutex> lock(mutex);
  for (Device& device : devices) {
    if (device.context == context) return device;
  }
  InContext in(context);
  Device device{context};
  for (CUstream* created : {&device.to_host, &device.from_host}) {
    CUDA(cuStreamCreate, created, kStreamNonBlocking);
  }
  for (CUevent* created : {&device.snapshot_copied, &device.sums_copied, &device.posted}) {
    CUDA(cuEventCreate, created, kEventDisableTiming);
  }
  devices.push_back(device);
  return devices.back();
}

// Work that is enqueued on `later` from now on waits for all work enqueued on `earlier`.
void Order(CUstream earlier, CUevent event, CUstream later) {
  std::lock_guard<std::mutex> lock(mutex);
  CUDA(cuEventRecord, event, earlier);
  CUDA(cuStreamWaitEvent, later, event, 0);
}

// Scalar arguments that the program computes. The host waits for them.
struct Scalars {
  int32_t device = 0, number = 0, step = 0;
  float header[kHeader] = {};
};

template <typename Array>
void ReadAsync(void* to, const Array& array, CUstream stream) {
  CUDA(cuMemcpyDtoHAsync_v2, to, Pointer(array.untyped_data()), array.size_bytes(), stream);
}

// Waits until all copies to and from the host are done and all exchanges are in a queue.
void AwaitCopies() {
  std::deque<Device> all;
  {
    std::lock_guard<std::mutex> lock(mutex);
    all = devices;
  }
  for (const Device& device : all) {
    if (driver.cuCtxPushCurrent_v2(device.context) != 0) continue;
    driver.cuStreamSynchronize(device.to_host);  // errors are reported by the calls
    driver.cuStreamSynchronize(device.from_host);
    CUcontext context;
    driver.cuCtxPopCurrent_v2(&context);
  }
}

// Copies the leaves to the host by way of a contiguous snapshot. Leaves that are adjacent on the
// host as well, as those of one wire dtype are, are copied together.
void CopyToHost(const Device& device, CUstream stream, ffi::RemainingArgs leaves,
                const std::vector<size_t>& sizes, const Place* places) {
  const size_t bytes = std::accumulate(sizes.begin(), sizes.end(), size_t{0});
  if (bytes == 0) return;
  CUdeviceptr snapshot;
  Check(driver.cuMemAllocAsync(&snapshot, bytes, stream),
        ("cuMemAllocAsync of " + std::to_string(bytes) + " bytes next to the memory of XLA (lower "
         "XLA_PYTHON_CLIENT_MEM_FRACTION)").c_str());
  CUdeviceptr at = snapshot;
  for (size_t i = 0; i < leaves.size(); at += sizes[i++]) {
    if (sizes[i] == 0) continue;
    CUDA(cuMemcpyDtoDAsync_v2, at, Pointer(leaves.get<ffi::AnyBuffer>(i)->untyped_data()), sizes[i],
         stream);
  }
  Order(stream, device.snapshot_copied, device.to_host);
  at = snapshot;
  for (size_t i = 0, next; i < leaves.size(); i = next) {
    char* start = places[i].address;
    size_t size = sizes[i];
    for (next = i + 1; next < leaves.size() && places[next].address == start + size; ++next) {
      size += sizes[next];
    }
    if (size == 0) continue;
    CUDA(cuMemcpyDtoHAsync_v2, start, at, size, device.to_host);
    at += size;
  }
  CUDA(cuMemFreeAsync, snapshot, device.to_host);
}

struct PostArguments {
  int32_t queue;
  Call call;
  Record* record;
};

// Runs on a thread of the driver. It must not call the driver, nor wait for Python, which might.
void PostFromDriver(void* argument) {
  std::unique_ptr<PostArguments> post(static_cast<PostArguments*>(argument));
  post->record->copy_to_host[1] = Now();
  SubmitDetached(post->queue, post->call);
}

// Copies the leaves to the host, and posts the exchange when all are there. A node that does not
// contribute sends zeros. XLA has computed the error feedback.
ffi::Error Post(CUstream stream, ffi::Buffer<ffi::S32> token, ffi::Buffer<ffi::S32> index,
                ffi::Buffer<ffi::S32> number, ffi::Buffer<ffi::S32> step, ffi::Buffer<ffi::S32>,
                ffi::Buffer<ffi::S32>, ffi::Buffer<ffi::F32> header, ffi::RemainingArgs leaves,
                ffi::Result<ffi::Buffer<ffi::S32>> done, ffi::RemainingRets, int32_t queue,
                ffi::Span<const int32_t> layouts, ffi::Span<const int32_t>) {
  Scalars scalars;
  try {
    Device& device = DeviceOf(stream);
    InContext in(device.context);
    ReadAsync(&scalars.device, index, stream);
    ReadAsync(&scalars.number, number, stream);
    ReadAsync(&scalars.step, step, stream);
    ReadAsync(scalars.header, header, stream);
    CUDA(cuStreamSynchronize, stream);
    std::vector<size_t> sizes;
    for (size_t i = 0; i < leaves.size(); ++i) {
      sizes.push_back(leaves.get<ffi::AnyBuffer>(i)->size_bytes());
    }
    Call call{{kReserve, scalars.number, scalars.step, scalars.device, layouts[0], 1}};
    if (auto error = Begin(queue, &call, kWhole); error.failure()) return error;
    const Place* places = CheckedPlaces(&call, sizes, kWhole);
    if (places == nullptr) throw std::runtime_error(call.error);
    Record* record = RecordOf(call);
    for (size_t i = 0; i < sizes.size(); ++i) {
      if (places[i].address == nullptr) sizes[i] = 0;  // another device sends this leaf
    }
    record->copy_to_host[0] = Now();
    if (scalars.header[0] > 0) {
      CopyToHost(device, stream, leaves, sizes, places);
    } else {
      for (size_t i = 0; i < leaves.size(); ++i) {
        if (sizes[i] > 0) std::memset(places[i].address, 0, sizes[i]);
      }
    }
    CUDA(cuMemcpyDtoDAsync_v2, Pointer(done->untyped_data()), Pointer(token.untyped_data()), 4,
         stream);
    auto post = std::make_unique<PostArguments>();
    *post = {queue, Call{{kPost, scalars.number, scalars.step}}, record};
    std::copy_n(scalars.header, kHeader, post->call.in.header);
    {
      // Exchanges are posted in the order of the program, which is the same on all nodes, also
      // where another device has posted the previous one.
      std::lock_guard<std::mutex> lock(mutex);
      if (last_posted != nullptr) CUDA(cuStreamWaitEvent, device.to_host, last_posted, 0);
      CUDA(cuLaunchHostFunc, device.to_host, PostFromDriver, post.get());
      post.release();
      CUDA(cuEventRecord, device.posted, device.to_host);
      last_posted = device.posted;
    }
    return ffi::Error::Success();
  } catch (const std::exception& failure) {
    AwaitCopies();
    return ReportFailure(queue, scalars.number, failure.what());
  }
}

struct CollectArguments {
  Record* record;
  bool last;
  float header[kHeader];
};

void FinishCollect(void* argument) {
  std::unique_ptr<CollectArguments> collect(static_cast<CollectArguments*>(argument));
  if (!collect->last) return;
  collect->record->copy_to_device[1] = Now();
  collect->record->reads.fetch_add(1);  // from here on the buffers may be reused
}

// Waits until an exchange is complete, and copies a part of its sums, and its header, to the
// program.
ffi::Error Collect(CUstream stream, ffi::Buffer<ffi::S32> token, ffi::Buffer<ffi::S32> index,
                   ffi::Buffer<ffi::S32> number, ffi::RemainingArgs,
                   ffi::Result<ffi::Buffer<ffi::S32>> done,
                   ffi::Result<ffi::Buffer<ffi::F32>> header, ffi::RemainingRets sums,
                   int32_t queue, int32_t first, int32_t last, int32_t readers, int32_t) {
  Scalars scalars;
  try {
    Device& device = DeviceOf(stream);
    InContext in(device.context);
    ReadAsync(&scalars.device, index, stream);
    ReadAsync(&scalars.number, number, stream);
    CUDA(cuStreamSynchronize, stream);  // afterwards nothing uses the outputs either
    std::vector<size_t> sizes;
    for (size_t i = 0; i < sums.size(); ++i) {
      sizes.push_back((*sums.get<ffi::AnyBuffer>(i))->size_bytes());
    }
    Call call{{kCollect, scalars.number, 0, scalars.device, readers, 1}};
    if (auto error = Begin(queue, &call, {first, last}); error.failure()) return error;
    const Place* places = CheckedPlaces(&call, sizes, {first, last});
    if (places == nullptr) throw std::runtime_error(call.error);
    auto collect = std::make_unique<CollectArguments>();
    *collect = {RecordOf(call), last != 0};
    std::copy_n(call.in.header, kHeader, collect->header);
    if (first == 0) collect->record->copy_to_device[0] = Now();
    for (size_t i = 0; i < sums.size(); ++i) {
      auto sum = *sums.get<ffi::AnyBuffer>(i);
      CUDA(cuMemcpyHtoDAsync_v2, Pointer(sum->untyped_data()), places[i].address, sizes[i],
           device.from_host);
    }
    CUDA(cuMemcpyHtoDAsync_v2, Pointer(header->untyped_data()), collect->header,
         sizeof(collect->header), device.from_host);
    Order(device.from_host, device.sums_copied, stream);
    CUDA(cuLaunchHostFunc, device.from_host, FinishCollect, collect.get());
    collect.release();
    CUDA(cuMemcpyDtoDAsync_v2, Pointer(done->untyped_data()), Pointer(token.untyped_data()), 4,
         stream);
    return ffi::Error::Success();
  } catch (const std::exception& failure) {
    AwaitCopies();
    return ReportFailure(queue, scalars.number, failure.what());
  }
}

ffi::Error OrderCuda(CUstream stream, ffi::RemainingArgs arguments, ffi::RemainingRets results) try {
  return ReturnInPlace(arguments, results, [stream](void* to, const void* from, size_t bytes) {
    if (bytes > 0) CUDA(cuMemcpyDtoDAsync_v2, Pointer(to), Pointer(from), bytes, stream);
  });
} catch (const std::exception& failure) {
  return ffi::Error::Internal(failure.what());
}

CUcontext AnyContext() {
  std::lock_guard<std::mutex> lock(mutex);
  return devices.front().context;
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jdaso_post_cuda, Post,
                              BindPost(ffi::Ffi::Bind().Ctx<JDASO_STREAM>()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(jdaso_collect_cuda, Collect,
                              BindCollect(ffi::Ffi::Bind().Ctx<JDASO_STREAM>()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    jdaso_order_cuda, OrderCuda,
    ffi::Ffi::Bind().Ctx<JDASO_STREAM>().RemainingArgs().RemainingRets());

extern "C" {

// Loads the functions of the driver. Returns an error message, or nullptr.
const char* jdaso_driver(const char* library) {
  void* loaded = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  if (loaded == nullptr) return dlerror();
  Driver found;
#define JDASO_LOOK_UP(name, arguments)                                   \
  found.name = reinterpret_cast<int(*) arguments>(dlsym(loaded, #name)); \
  if (found.name == nullptr) return "it has no " #name "; install a newer driver";
  JDASO_DRIVER_FUNCTIONS(JDASO_LOOK_UP)
#undef JDASO_LOOK_UP
  if (driver.cuGetErrorString == nullptr) driver = found;
  return nullptr;
}

// Pins host memory, so that devices copy to and from it asynchronously. Returns whether it did.
bool jdaso_pin(void* memory, size_t bytes) try {
  InContext in(AnyContext());
  return driver.cuMemHostRegister_v2(memory, bytes, kHostRegisterPortable) == 0;
} catch (const std::exception&) {
  return false;
}

void jdaso_unpin(void* memory) try {
  InContext in(AnyContext());
  driver.cuMemHostUnregister(memory);
} catch (const std::exception&) {  // CUDA has already shut down
}

void jdaso_await_copies() { AwaitCopies(); }

}  // extern "C"

}  // namespace jdaso
