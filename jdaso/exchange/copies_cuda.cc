// What a program on CUDA devices does at an exchange. Its own stream only copies parameters from
// one place of the device to another; a second stream takes them to the host while the program
// goes on, and a third brings sums back. The program's stream waits for sums that are due, and for
// nothing else. The thread that dispatches the program waits for the numbers that it has to read.

#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <vector>

#include "desk.h"
#include "driver.h"

#ifndef JDASO_STREAM  // what stands in for the driver, in tests, has streams of its own
#define JDASO_STREAM ffi::PlatformStream<CUstream>
#endif

namespace jdaso {
namespace {

Driver driver;

void Check(int result, const char* call) {
  if (result == 0) return;
  const char* problem = nullptr;
  driver.cuGetErrorString(result, &problem);
  throw std::runtime_error(std::string(call) + ": " + (problem ? problem : "unknown error"));
}
#define CUDA(name, ...) Check(driver.name(__VA_ARGS__), #name)

CUdeviceptr On(const void* device) { return reinterpret_cast<CUdeviceptr>(device); }

class InContext {
 public:
  explicit InContext(CUcontext context) { CUDA(cuCtxPushCurrent_v2, context); }
  ~InContext() {
    CUcontext context;
    driver.cuCtxPopCurrent_v2(&context);
  }
};

// What there is for each device beside the program's stream.
struct Device {
  CUcontext context = nullptr;
  CUstream out = nullptr, back = nullptr;  // to the host, and from it
  CUevent copied = nullptr;                // to the snapshot
  CUevent arrived = nullptr;               // from the host
  CUevent left = nullptr;                  // at the desk
};

// Guards what follows and the use of events. Never destroyed: threads of XLA's may outlive main.
auto& mutex = *new std::mutex;
auto& devices = *new std::deque<Device>;  // whose elements stay where they are
CUevent last_left = nullptr;              // of all devices

Device& Of(CUstream stream) {
  CUcontext context;
  CUDA(cuStreamGetCtx, stream, &context);
  std::lock_guard<std::mutex> lock(mutex);
  for (Device& device : devices) {
    if (device.context == context) return device;
  }
  InContext in(context);
  Device device{context};
  for (CUstream* made : {&device.out, &device.back}) CUDA(cuStreamCreate, made, kStreamNonBlocking);
  for (CUevent* made : {&device.copied, &device.arrived, &device.left}) {
    CUDA(cuEventCreate, made, kEventDisableTiming);
  }
  devices.push_back(device);
  return devices.back();
}

// What is given to `later` from now on happens after what was given to `earlier`.
void Order(CUstream earlier, CUevent event, CUstream later) {
  std::lock_guard<std::mutex> lock(mutex);
  CUDA(cuEventRecord, event, earlier);
  CUDA(cuStreamWaitEvent, later, event, 0);
}

// Numbers that the program computes, once it has: the host waits, the device has more to do.
struct Numbers {
  int32_t number = 0, step = 0;
  float header[kHeader] = {};
};

template <typename Array>
void Read(void* to, const Array& array, CUstream stream) {
  CUDA(cuMemcpyDtoHAsync_v2, to, On(array.untyped_data()), array.size_bytes(), stream);
}

// Until nothing is on its way to or from the host, and all that was posted is left at a desk.
void AwaitCopies() {
  std::deque<Device> all;
  {
    std::lock_guard<std::mutex> lock(mutex);
    all = devices;
  }
  for (const Device& device : all) {
    if (driver.cuCtxPushCurrent_v2(device.context) != 0) continue;
    driver.cuStreamSynchronize(device.out);  // what fails here has been told, or will be
    driver.cuStreamSynchronize(device.back);
    CUcontext context;
    driver.cuCtxPopCurrent_v2(&context);
  }
}

// Tells Python, too: other devices may be waiting for this one, and the memory is given up.
ffi::Error Failed(int32_t desk, int32_t number, const std::exception& problem) {
  AwaitCopies();
  Call call{kFail, number, 0, 0, 0};
  std::strncpy(call.problem, problem.what(), sizeof(call.problem) - 1);
  auto error = Ask(desk, &call);
  return error.failure() ? error : ffi::Error::Internal(problem.what());
}

// Leaves lie end to end in a snapshot; on the host, those of one wire dtype do, too.
void CopyOut(const Device& device, CUstream stream, ffi::RemainingArgs leaves, void* const* rows) {
  std::vector<size_t> sizes;
  size_t bytes = 0;
  for (size_t i = 0; i < leaves.size(); ++i) {
    sizes.push_back(leaves.get<ffi::AnyBuffer>(i)->size_bytes());
    bytes += sizes.back();
  }
  if (bytes == 0) return;
  CUdeviceptr snapshot;
  Check(driver.cuMemAllocAsync(&snapshot, bytes, stream),
        ("cuMemAllocAsync of " + std::to_string(bytes) + " bytes beside what XLA has taken "
         "(XLA_PYTHON_CLIENT_MEM_FRACTION)").c_str());
  CUdeviceptr at = snapshot;
  for (size_t i = 0; i < leaves.size(); at += sizes[i++]) {
    CUDA(cuMemcpyDtoDAsync_v2, at, On(leaves.get<ffi::AnyBuffer>(i)->untyped_data()), sizes[i],
         stream);
  }
  Order(stream, device.copied, device.out);
  at = snapshot;
  for (size_t i = 0, next; i < leaves.size(); i = next) {
    auto* row = static_cast<char*>(rows[i]);
    size_t run = sizes[i];
    for (next = i + 1; next < leaves.size() && rows[next] == row + run; ++next) run += sizes[next];
    CUDA(cuMemcpyDtoHAsync_v2, row, at, run, device.out);
    at += run;
  }
  CUDA(cuMemFreeAsync, snapshot, device.out);
}

struct Posting {
  int32_t desk;
  Call call;
  Record* record;
};

// By a thread of the driver: it may neither call the driver nor wait for Python, which may.
void LetFly(void* argument) {
  std::unique_ptr<Posting> posting(static_cast<Posting*>(argument));
  posting->record->fill[1] = Now();
  Leave(posting->desk, posting->call);
}

// Copies the leaves to the host, zeros if this node does not contribute, and lets them fly.
ffi::Error Post(CUstream stream, ffi::Buffer<ffi::S32> ticket, ffi::Buffer<ffi::S32> number,
                ffi::Buffer<ffi::S32> step, ffi::Buffer<ffi::F32> header,
                ffi::RemainingArgs leaves, ffi::Result<ffi::Buffer<ffi::S32>> done, int32_t desk,
                int32_t specs, ffi::Span<const int32_t>) {
  Numbers read;
  try {
    Device& device = Of(stream);
    InContext in(device.context);
    Read(&read.number, number, stream);
    Read(&read.step, step, stream);
    Read(read.header, header, stream);
    CUDA(cuStreamSynchronize, stream);
    Call call{kReserve, read.number, read.step, specs, 1};
    if (auto error = Ask(desk, &call); error.failure()) return error;
    auto* record = static_cast<Record*>(call.rows[leaves.size()]);
    record->fill[0] = Now();
    if (read.header[0] > 0) {
      CopyOut(device, stream, leaves, call.rows);
    } else {
      for (size_t i = 0; i < leaves.size(); ++i) {
        std::memset(call.rows[i], 0, leaves.get<ffi::AnyBuffer>(i)->size_bytes());
      }
    }
    auto posting = std::make_unique<Posting>();
    *posting = {desk, Call{kPost, read.number, read.step, specs, 0}, record};
    std::copy_n(read.header, kHeader, posting->call.header);
    {
      // In the order of the program, whichever device it was that posted before: all nodes alike.
      std::lock_guard<std::mutex> lock(mutex);
      if (last_left != nullptr) CUDA(cuStreamWaitEvent, device.out, last_left, 0);
      CUDA(cuLaunchHostFunc, device.out, LetFly, posting.get());
      posting.release();
      CUDA(cuEventRecord, device.left, device.out);
      last_left = device.left;
    }
    CUDA(cuMemcpyDtoDAsync_v2, On(done->untyped_data()), On(ticket.untyped_data()), 4, stream);
    return ffi::Error::Success();
  } catch (const std::exception& problem) {
    return Failed(desk, read.number, problem);
  }
}

struct Taking {
  Record* record;
  float header[kHeader];
};

void HasTaken(void* argument) {
  std::unique_ptr<Taking> taking(static_cast<Taking*>(argument));
  taking->record->take[1] = Now();
  taking->record->taken.fetch_add(1);  // from now on the memory may be used again
}

// Waits until an exchange has ended, and copies its sums and header to the program.
ffi::Error Collect(CUstream stream, ffi::Buffer<ffi::S32> ticket, ffi::Buffer<ffi::S32> number,
                   ffi::Result<ffi::Buffer<ffi::S32>> done,
                   ffi::Result<ffi::Buffer<ffi::F32>> header, ffi::RemainingRets sums,
                   int32_t desk, int32_t takers) {
  Numbers read;
  try {
    Device& device = Of(stream);
    InContext in(device.context);
    Read(&read.number, number, stream);
    CUDA(cuStreamSynchronize, stream);  // so nothing uses the memory of the sums either
    Call call{kCollect, read.number, 0, takers, 1};
    if (auto error = Ask(desk, &call); error.failure()) return error;
    auto taking = std::make_unique<Taking>();
    taking->record = static_cast<Record*>(call.rows[sums.size()]);
    std::copy_n(call.header, kHeader, taking->header);
    taking->record->take[0] = Now();
    for (size_t i = 0; i < sums.size(); ++i) {
      auto sum = *sums.get<ffi::AnyBuffer>(i);
      CUDA(cuMemcpyHtoDAsync_v2, On(sum->untyped_data()), call.rows[i], sum->size_bytes(),
           device.back);
    }
    CUDA(cuMemcpyHtoDAsync_v2, On(header->untyped_data()), taking->header, sizeof(taking->header),
         device.back);
    Order(device.back, device.arrived, stream);
    CUDA(cuLaunchHostFunc, device.back, HasTaken, taking.get());
    taking.release();
    CUDA(cuMemcpyDtoDAsync_v2, On(done->untyped_data()), On(ticket.untyped_data()), 4, stream);
    return ffi::Error::Success();
  } catch (const std::exception& problem) {
    return Failed(desk, read.number, problem);
  }
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

extern "C" {

// Looks up the driver; returns what is wrong, or nullptr.
const char* jdaso_driver(const char* library) {
  void* loaded = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  if (loaded == nullptr) return dlerror();
  Driver found;
#define JDASO_LOOK_UP(name, arguments)                                   \
  found.name = reinterpret_cast<int(*) arguments>(dlsym(loaded, #name)); \
  if (found.name == nullptr) return "it has no " #name ", and is too old";
  JDASO_DRIVER_FUNCTIONS(JDASO_LOOK_UP)
#undef JDASO_LOOK_UP
  if (driver.cuGetErrorString == nullptr) driver = found;
  return nullptr;
}

// Pins host memory, for devices to copy from and to, when one has called; whether that was done.
bool jdaso_pin(void* memory, size_t bytes) try {
  InContext in(AnyContext());
  return driver.cuMemHostRegister_v2(memory, bytes, kHostRegisterPortable) == 0;
} catch (const std::exception&) {
  return false;
}

void jdaso_unpin(void* memory) try {
  InContext in(AnyContext());
  driver.cuMemHostUnregister(memory);
} catch (const std::exception&) {  // CUDA has ended before
}

void jdaso_await_copies() { AwaitCopies(); }

}  // extern "C"

}  // namespace jdaso
