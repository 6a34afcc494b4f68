// A simulated CUDA driver. Device memory is host memory. Streams are threads that execute their
// work in order, with random delays. Code that does not wait as CUDA demands therefore reads data
// that is not written yet, or is freed. Calls without the context that CUDA demands fail, and so does
// a call that stand_in_fail names. It does not simulate device memory that the host cannot read, nor a
// busy device.

#include "cuda_driver.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <thread>

#include "stand_in.h"

namespace {

constexpr int kInvalidValue = 1, kAlreadyRegistered = 712, kNotRegistered = 713;
constexpr int kNotPermitted = 800, kNoContext = 201, kInvalidHandle = 400, kInjected = 2;
constexpr size_t kStagedBytes = 64;  // smaller copies of unpinned memory do not wait

thread_local bool in_host_function = false;
thread_local std::deque<CUcontext> contexts;
std::mutex host_functions;  // one at a time, of all streams

std::mutex pins_mutex;
std::map<uintptr_t, size_t> pins;

bool Pinned(const void* memory, size_t bytes) {
  std::lock_guard<std::mutex> lock(pins_mutex);
  const auto from = reinterpret_cast<uintptr_t>(memory);
  auto after = pins.upper_bound(from);
  if (after == pins.begin()) return false;
  const auto& [start, size] = *std::prev(after);
  return from + bytes <= start + size;
}

}  // namespace

struct CUstream_st {
  CUstream_st(CUcontext context, int delay) : context(context), delay(0, delay) {
    thread = std::thread([this] { Run(); });
  }
  ~CUstream_st() {
    Enqueue(nullptr);
    thread.join();
  }

  int Enqueue(std::function<void()> work) {
    if (in_host_function) return kNotPermitted;
    std::lock_guard<std::mutex> lock(mutex);
    queue.push_back(std::move(work));
    changed.notify_all();
    return 0;
  }

  int Wait() {
    if (in_host_function) return kNotPermitted;
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [this] { return queue.empty(); });
    return 0;
  }

  void Run() {
    while (true) {
      std::function<void()> work;
      {
        std::unique_lock<std::mutex> lock(mutex);
        changed.wait(lock, [this] { return !queue.empty(); });
        work = queue.front();
      }
      std::this_thread::sleep_for(std::chrono::microseconds(delay(random)));
      if (work) work();
      std::lock_guard<std::mutex> lock(mutex);
      queue.pop_front();
      changed.notify_all();
      if (!work) return;
    }
  }

  CUcontext context;
  std::uniform_int_distribution<int> delay;
  std::minstd_rand random;
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> queue;
  std::thread thread;
};

namespace {

// Whether a stream has reached a recorded event.
struct Recorded {
  std::mutex mutex;
  std::condition_variable changed;
  bool reached = false;
};

}  // namespace

struct CUevent_st {
  CUcontext context;
  std::mutex mutex;
  std::shared_ptr<Recorded> recorded;
};

namespace {

std::atomic<int64_t> blocking_bytes{0};
std::atomic<int> max_delay{10000};

std::mutex fails_mutex;
std::string fails;  // a function, of which a call fails
int calls_until = 0;

// Begins a call. It fails if it is the one that stand_in_fail has named, or if no context is
// current, or another one than that of the stream.
int Enter(const std::string& name, CUstream stream) {
  if (in_host_function) return kNotPermitted;
  if (contexts.empty() || (stream != nullptr && contexts.back() != stream->context)) {
    std::fprintf(stderr, "%s without its context\n", name.c_str());
    return kNoContext;
  }
  std::lock_guard<std::mutex> lock(fails_mutex);
  return name == fails && --calls_until == 0 ? kInjected : 0;
}
#define BEGIN(stream) \
  if (const int problem = Enter(__func__, stream); problem != 0) return problem

// Large copies of unpinned memory block the caller. They are told, for the test that finds one.
int Copy(const char* name, const void* host, bool pinned, size_t bytes, CUstream stream,
         std::function<void()> work) {
  const int problem = stream->Enqueue(std::move(work));
  if (problem != 0 || pinned || bytes <= kStagedBytes) return problem;
  std::fprintf(stderr, "%s of %zu bytes at %p blocks\n", name, bytes, host);
  blocking_bytes += bytes;
  return stream->Wait();
}

}  // namespace

namespace stand_in {

CUstream Begin(int device) {
  return new CUstream_st(reinterpret_cast<CUcontext>(static_cast<intptr_t>(device + 1)), 200);
}

void End(CUstream stream) {
  stream->Wait();
  delete stream;
}

}  // namespace stand_in

extern "C" {

// Sets the largest delay of copies.
void stand_in_set_delay(int microseconds) { max_delay = microseconds; }

// Makes the n-th call of a function from now on fail.
void stand_in_fail(const char* function, int n) {
  std::lock_guard<std::mutex> lock(fails_mutex);
  fails = function, calls_until = n;
}

// Bytes of copies that blocked a program.
int64_t stand_in_blocking_bytes() { return blocking_bytes; }

int cuCtxPushCurrent_v2(CUcontext context) {
  if (in_host_function) return kNotPermitted;
  contexts.push_back(context);
  return 0;
}

int cuCtxPopCurrent_v2(CUcontext* context) {
  if (contexts.empty()) return kNoContext;
  *context = contexts.back();
  contexts.pop_back();
  return 0;
}

// The index of a device is one less than its context.
int cuCtxGetDevice(int* device) {
  BEGIN(nullptr);
  *device = static_cast<int>(reinterpret_cast<intptr_t>(contexts.back())) - 1;
  return 0;
}

int cuDevicePrimaryCtxRetain(CUcontext* context, int device) {
  *context = reinterpret_cast<CUcontext>(static_cast<intptr_t>(device + 1));
  return 0;
}

int cuDeviceGetDefaultMemPool(CUmemoryPool* pool, int device) {
  BEGIN(nullptr);
  *pool = reinterpret_cast<CUmemoryPool>(static_cast<intptr_t>(device + 1));
  return 0;
}

int cuMemPoolSetAttribute(CUmemoryPool, int attribute, void*) {
  BEGIN(nullptr);
  return attribute == jdaso::kReleaseThreshold ? 0 : kInvalidValue;
}

int cuMemAllocHost_v2(void** memory, size_t bytes) {
  BEGIN(nullptr);
  *memory = std::malloc(bytes);
  std::lock_guard<std::mutex> lock(pins_mutex);
  pins[reinterpret_cast<uintptr_t>(*memory)] = bytes;
  return 0;
}

int cuStreamCreate(CUstream* stream, unsigned) {
  BEGIN(nullptr);
  // Copies of the first device are delayed most. Those of other devices must not overtake them.
  const bool first = contexts.back() == reinterpret_cast<CUcontext>(1);
  *stream = new CUstream_st(contexts.back(), max_delay / (first ? 1 : 10));
  return 0;
}

int cuStreamGetCtx(CUstream stream, CUcontext* context) {
  *context = stream->context;
  return 0;
}

int cuStreamSynchronize(CUstream stream) {
  BEGIN(stream);
  return stream->Wait();
}

int cuEventCreate(CUevent* event, unsigned) {
  BEGIN(nullptr);
  *event = new CUevent_st{contexts.back()};
  return 0;
}

int cuEventRecord(CUevent event, CUstream stream) {
  BEGIN(stream);
  if (event->context != stream->context) return kInvalidHandle;
  auto recorded = std::make_shared<Recorded>();
  {
    std::lock_guard<std::mutex> lock(event->mutex);
    event->recorded = recorded;
  }
  return stream->Enqueue([recorded] {
    std::lock_guard<std::mutex> lock(recorded->mutex);
    recorded->reached = true;
    recorded->changed.notify_all();
  });
}

int cuStreamWaitEvent(CUstream stream, CUevent event, unsigned) {
  BEGIN(nullptr);
  std::lock_guard<std::mutex> lock(event->mutex);
  return stream->Enqueue([recorded = event->recorded] {
    std::unique_lock<std::mutex> lock(recorded->mutex);
    recorded->changed.wait(lock, [&] { return recorded->reached; });
  });
}

int cuLaunchHostFunc(CUstream stream, void (*function)(void*), void* argument) {
  BEGIN(stream);
  return stream->Enqueue([=] {
    std::lock_guard<std::mutex> lock(host_functions);
    in_host_function = true;
    function(argument);
    in_host_function = false;
  });
}

int cuMemAllocAsync(CUdeviceptr* memory, size_t bytes, CUstream stream) {
  BEGIN(stream);
  if (bytes == 0) return kInvalidValue;
  auto* block = static_cast<size_t*>(std::malloc(sizeof(size_t) + bytes));
  *block = bytes;
  *memory = reinterpret_cast<CUdeviceptr>(block + 1);
  return stream->Enqueue([=] { std::memset(block + 1, 0xff, bytes); });
}

int cuMemFreeAsync(CUdeviceptr memory, CUstream stream) {
  BEGIN(stream);
  return stream->Enqueue([=] {
    auto* block = reinterpret_cast<size_t*>(memory) - 1;
    std::memset(block + 1, 0xff, *block);
    std::free(block);
  });
}

int cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
  BEGIN(stream);
  return stream->Enqueue([=] {
    std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), bytes);
  });
}

int cuMemcpyDtoHAsync_v2(void* to, CUdeviceptr from, size_t bytes, CUstream stream) {
  BEGIN(stream);
  const bool pinned = Pinned(to, bytes);
  return Copy(__func__, to, pinned, bytes, stream, [=] {
    if (pinned && !Pinned(to, bytes)) std::abort();  // unpinned too early
    std::memcpy(to, reinterpret_cast<void*>(from), bytes);
  });
}

int cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void* from, size_t bytes, CUstream stream) {
  BEGIN(stream);
  const bool pinned = Pinned(from, bytes);
  return Copy(__func__, from, pinned, bytes, stream, [=] {
    if (pinned && !Pinned(from, bytes)) std::abort();
    std::memcpy(reinterpret_cast<void*>(to), from, bytes);
  });
}

int cuMemHostRegister_v2(void* memory, size_t bytes, unsigned) {
  BEGIN(nullptr);
  std::lock_guard<std::mutex> lock(pins_mutex);
  const auto from = reinterpret_cast<uintptr_t>(memory);
  auto after = pins.lower_bound(from);
  if (after != pins.end() && after->first < from + bytes) return kAlreadyRegistered;
  if (after != pins.begin()) {
    const auto& [start, size] = *std::prev(after);
    if (start + size > from) return kAlreadyRegistered;
  }
  pins[from] = bytes;
  return 0;
}

int cuMemHostUnregister(void* memory) {
  BEGIN(nullptr);
  std::lock_guard<std::mutex> lock(pins_mutex);
  return pins.erase(reinterpret_cast<uintptr_t>(memory)) ? 0 : kNotRegistered;
}

int cuGetErrorString(int, const char** problem) {
  *problem = "refused by the simulated driver";
  return 0;
}

}  // extern "C"
