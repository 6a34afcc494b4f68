// XLA custom calls for CUDA devices. The program's stream copies the leaves to a snapshot in device
// memory. A second stream copies the snapshot to the host while the program continues, and a third
// stream copies sums from the host. The program's stream waits only for sums that are due. The
// thread that dispatches the program waits for the device once a post and once a collect, to read
// the numbers that say which exchange it is.
//
// Calls that may wait for a device are not made inside a program, because another device of this
// process may be waiting for this one: streams are created when an exchange is made
// (`jdaso_prepare`), and the memory of slots is pinned when a program is traced (`jdaso_reserve`).

#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <vector>

#include "cuda_driver.h"
#include "slots.h"

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

// Scalar arguments that the program computes, in pinned memory.
struct Scalars {
  int32_t device, number, step;
  float header[kHeader];
};

// What is added to each device.
struct Device {
  CUcontext context;
  CUstream to_host = nullptr, from_host = nullptr;
  CUevent program_reached = nullptr;  // this place of the program's stream
  CUevent sums_copied = nullptr;
  CUevent posted = nullptr;
  Scalars* scalars = nullptr;
  std::mutex reading;                     // guards the scalars
  std::map<int32_t, Scalars> collecting;  // by table, of the exchange that arrives in parts
  explicit Device(CUcontext context) : context(context) {}
};

// Guards the two variables below and the use of events. The objects are never destroyed, because
// threads of XLA may outlive main.
auto& mutex = *new std::mutex;
auto& devices = *new std::deque<Device>;  // a deque, because its elements never move
CUevent last_posted = nullptr;            // of all devices

// The device with this context, which is made ready when it is first asked for.
Device& DeviceWith(CUcontext context) {
  std::lock_guard<std::mutex> lock(mutex);
  for (Device& device : devices) {
    if (device.context == context) return device;
  }
  InContext in(context);
  Device& device = devices.emplace_back(context);
  try {
    for (CUstream* created : {&device.to_host, &device.from_host}) {
      CUDA(cuStreamCreate, created, kStreamNonBlocking);
    }
    for (CUevent* created : {&device.program_reached, &device.sums_copied, &device.posted}) {
      CUDA(cuEventCreate, created, kEventDisableTiming);
    }
    void* scalars;
    CUDA(cuMemAllocHost_v2, &scalars, sizeof(Scalars));
    device.scalars = static_cast<Scalars*>(scalars);
    // The pool keeps the memory of a snapshot for the next one. Otherwise it returns the memory
    // at each synchronization, and every post would allocate it anew.
    int ordinal;
    CUmemoryPool pool;
    uint64_t kept = UINT64_MAX;
    CUDA(cuCtxGetDevice, &ordinal);
    CUDA(cuDeviceGetDefaultMemPool, &pool, ordinal);
    CUDA(cuMemPoolSetAttribute, pool, kReleaseThreshold, &kept);
  } catch (...) {
    devices.pop_back();
    throw;
  }
  return device;
}

Device& DeviceOf(CUstream stream) {
  CUcontext context;
  CUDA(cuStreamGetCtx, stream, &context);
  return DeviceWith(context);
}

// Work that is enqueued on `later` from now on waits for all work enqueued on `earlier`.
void Order(CUstream earlier, CUevent event, CUstream later) {
  std::lock_guard<std::mutex> lock(mutex);
  CUDA(cuEventRecord, event, earlier);
  CUDA(cuStreamWaitEvent, later, event, 0);
}

template <typename Array>
void ReadAsync(void* to, const Array& array, CUstream stream) {
  CUDA(cuMemcpyDtoHAsync_v2, to, Pointer(array.untyped_data()), array.size_bytes(), stream);
}

// Waits until all copies to and from the host are done and all exchanges are in a queue, and for a
// program that has failed, if there is one. Errors are reported by other calls.
void AwaitCopies(CUstream program = nullptr) {
  std::vector<Device*> all;
  {
    std::lock_guard<std::mutex> lock(mutex);
    for (Device& device : devices) all.push_back(&device);
  }
  CUcontext context = nullptr;
  if (program != nullptr) driver.cuStreamGetCtx(program, &context);
  for (const Device* device : all) {
    if (driver.cuCtxPushCurrent_v2(device->context) != 0) continue;
    if (device->context == context) driver.cuStreamSynchronize(program);
    driver.cuStreamSynchronize(device->to_host);
    driver.cuStreamSynchronize(device->from_host);
    CUcontext popped;
    driver.cuCtxPopCurrent_v2(&popped);
  }
}

// What a device sends of one leaf.
struct Copy {
  const void* from;
  char* to;
  size_t bytes;
};

// Copies leaves to the host by way of a contiguous snapshot. Leaves that are adjacent on the host as
// well, as those of one wire dtype are, are copied together.
void CopyToHost(const Device& device, CUstream stream, const std::vector<Copy>& copies) {
  size_t bytes = 0;
  for (const Copy& copy : copies) bytes += copy.bytes;
  if (bytes == 0) return;
  CUdeviceptr snapshot;
  Check(driver.cuMemAllocAsync(&snapshot, bytes, stream),
        ("cuMemAllocAsync of " + std::to_string(bytes) + " bytes next to the memory of XLA (lower "
         "XLA_PYTHON_CLIENT_MEM_FRACTION)").c_str());
  CUdeviceptr at = snapshot;
  for (const Copy& copy : copies) {
    if (copy.bytes > 0) CUDA(cuMemcpyDtoDAsync_v2, at, Pointer(copy.from), copy.bytes, stream);
    at += copy.bytes;
  }
  Order(stream, device.program_reached, device.to_host);
  at = snapshot;
  for (size_t i = 0, next; i < copies.size(); i = next) {
    size_t size = copies[i].bytes;
    for (next = i + 1; next < copies.size() && copies[next].to == copies[i].to + size; ++next) {
      size += copies[next].bytes;
    }
    if (size == 0) continue;
    CUDA(cuMemcpyDtoHAsync_v2, copies[i].to, at, size, device.to_host);
    at += size;
  }
  CUDA(cuMemFreeAsync, snapshot, device.to_host);
}

struct PostArguments {
  std::shared_ptr<Table> table;
  Slot* slot;
};

// Runs on a thread of the driver. It must not call the driver, nor wait for who might: it only takes
// the table's mutex.
void PostFromDriver(void* argument) {
  std::unique_ptr<PostArguments> post(static_cast<PostArguments*>(argument));
  post->table->EndPost(post->slot);
}

// Copies the leaves that this device sends to a slot, which is filled when all are there. A node that
// does not contribute sends zeros.
ffi::Error Post(CUstream stream, ffi::Buffer<ffi::S32> token, ffi::Buffer<ffi::S32> index,
                ffi::Buffer<ffi::S32> number, ffi::Buffer<ffi::S32> step,
                ffi::Buffer<ffi::F32> header, ffi::RemainingArgs leaves,
                ffi::Result<ffi::Buffer<ffi::S32>> done, int32_t id, int32_t layout) {
  const auto table = At(id);
  if (!table) return ffi::Error::Internal(kForeign);
  Slot* slot = nullptr;
  try {
    Device& device = DeviceOf(stream);
    InContext in(device.context);
    Scalars scalars;
    {
      std::lock_guard<std::mutex> lock(device.reading);
      ReadAsync(&device.scalars->device, index, stream);
      ReadAsync(&device.scalars->number, number, stream);
      ReadAsync(&device.scalars->step, step, stream);
      ReadAsync(device.scalars->header, header, stream);
      CUDA(cuStreamSynchronize, stream);
      scalars = *device.scalars;
    }
    const Place* place =
        CheckedLeaves(table->LayoutAt(layout), scalars.number, scalars.device, leaves);
    slot = table->BeginPost(scalars.number, scalars.step, scalars.header, layout, true);
    std::vector<Copy> copies;
    for (size_t i = 0; i < leaves.size(); ++i, ++place) {
      if (std::max(scalars.number, 0) % place->copies != place->copy) continue;
      const auto bytes = static_cast<size_t>(place->wire_bytes);
      copies.push_back({leaves.get<ffi::AnyBuffer>(i)->untyped_data(), slot->memory + place->sent,
                        bytes});
      if (!(scalars.header[0] > 0)) std::memset(copies.back().to, 0, bytes);
    }
    if (scalars.header[0] > 0) CopyToHost(device, stream, copies);
    CUDA(cuMemcpyDtoDAsync_v2, Pointer(done->untyped_data()), Pointer(token.untyped_data()), 4,
         stream);
    auto post = std::make_unique<PostArguments>(PostArguments{table, slot});
    // Exchanges are posted in the order of the program, which is the same on all nodes, also where
    // another device has posted the previous one.
    std::lock_guard<std::mutex> lock(mutex);
    if (last_posted != nullptr) CUDA(cuStreamWaitEvent, device.to_host, last_posted, 0);
    CUDA(cuLaunchHostFunc, device.to_host, PostFromDriver, post.get());
    post.release();
    slot = nullptr;
    CUDA(cuEventRecord, device.posted, device.to_host);
    last_posted = device.posted;
    return ffi::Error::Success();
  } catch (const std::exception& failure) {
    AwaitCopies(stream);
    if (slot != nullptr) table->Discard(slot);
    return Failed(table.get(), failure.what());
  }
}

struct CollectArguments {
  std::shared_ptr<Table> table;
  Slot* slot;
  float header[kHeader];
  std::deque<std::vector<double>> wide;  // sums of float32 for leaves of float64
};

void FinishCollect(void* argument) {
  std::unique_ptr<CollectArguments> collect(static_cast<CollectArguments*>(argument));
  collect->table->EndCollect(collect->slot);
}

// Waits until an exchange is done, while the program is dispatched, and copies a part of its sums,
// and its header, to the program. The program's stream waits only for these copies.
ffi::Error Collect(CUstream stream, ffi::Buffer<ffi::S32> token, ffi::Buffer<ffi::S32> index,
                   ffi::Buffer<ffi::S32> number, ffi::Result<ffi::Buffer<ffi::S32>> done,
                   ffi::Result<ffi::Buffer<ffi::F32>> header, ffi::RemainingRets rets, int32_t id,
                   int32_t first, int32_t last, int32_t readers) {
  const auto table = At(id);
  if (!table) return ffi::Error::Internal(kForeign);
  Slot* slot = nullptr;
  try {
    Device& device = DeviceOf(stream);
    InContext in(device.context);
    Scalars scalars;
    {
      // Only for the first part of an exchange the host waits for the device.
      std::lock_guard<std::mutex> lock(device.reading);
      if (first == 0) {
        ReadAsync(&device.scalars->device, index, stream);
        ReadAsync(&device.scalars->number, number, stream);
        CUDA(cuStreamSynchronize, stream);
        device.collecting[id] = *device.scalars;
      }
      scalars = device.collecting.at(id);
    }
    slot = table->BeginCollect(scalars.number, readers);
    const std::vector<Result> results = ResultsOf(rets);
    const Place* place =
        CheckedSums(table->LayoutAt(slot->layout), slot, scalars.device, results, first, last);
    auto collect = std::make_unique<CollectArguments>(CollectArguments{table, slot, {}, {}});
    std::copy_n(slot->total, kHeader, collect->header);
    if (last) table->Count(slot, readers);
    Order(stream, device.program_reached, device.from_host);  // it may still use the outputs
    for (const Result& result : results) {
      const void* from = slot->memory + place->sums;
      if (result.Widens(*place++)) {
        const auto* floats = static_cast<const float*>(from);
        collect->wide.emplace_back(floats, floats + result.bytes / sizeof(double));
        from = collect->wide.back().data();
      }
      if (result.bytes == 0) continue;
      CUDA(cuMemcpyHtoDAsync_v2, Pointer(result.data), from, result.bytes, device.from_host);
    }
    CUDA(cuMemcpyHtoDAsync_v2, Pointer(header->untyped_data()), collect->header,
         sizeof(collect->header), device.from_host);
    Order(device.from_host, device.sums_copied, stream);
    CUDA(cuLaunchHostFunc, device.from_host, FinishCollect, collect.get());
    collect.release();
    slot = nullptr;
    CUDA(cuMemcpyDtoDAsync_v2, Pointer(done->untyped_data()), Pointer(token.untyped_data()), 4,
         stream);
    return ffi::Error::Success();
  } catch (const std::exception& failure) {
    AwaitCopies(stream);
    if (slot != nullptr) table->EndCollect(slot);
    return Failed(table.get(), failure.what());
  }
}

ffi::Error OrderCuda(CUstream stream, ffi::RemainingArgs arguments, ffi::RemainingRets results) try {
  InContext in(DeviceOf(stream).context);
  return ReturnInPlace(arguments, results, [stream](void* to, const void* from, size_t bytes) {
    if (bytes > 0) CUDA(cuMemcpyDtoDAsync_v2, Pointer(to), Pointer(from), bytes, stream);
  });
} catch (const std::exception& failure) {
  return ffi::Error::Internal(failure.what());
}

CUcontext AnyContext() {
  std::lock_guard<std::mutex> lock(mutex);
  return devices.at(0).context;
}

// Pins host memory, so that devices copy to and from it asynchronously. Returns whether it did.
bool Pin(void* memory, size_t bytes) try {
  InContext in(AnyContext());
  return driver.cuMemHostRegister_v2(memory, bytes, kHostRegisterPortable) == 0;
} catch (const std::exception&) {
  return false;
}

void Unpin(void* memory) try {
  InContext in(AnyContext());
  driver.cuMemHostUnregister(memory);
} catch (const std::exception&) {  // CUDA has already shut down
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
  pin_memory = Pin, unpin_memory = Unpin;
  return nullptr;
}

// Makes a device ready, given by its index among those that the process sees.
void jdaso_prepare(int device, char* error, size_t size) {
  try {
    CUcontext context;
    CUDA(cuDevicePrimaryCtxRetain, &context, device);
    DeviceWith(context);
  } catch (const std::exception& failure) {
    std::strncpy(error, failure.what(), size - 1);
  }
}

void jdaso_await_copies() { AwaitCopies(); }

}  // extern "C"

}  // namespace jdaso
