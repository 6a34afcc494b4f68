// A stand-in for CUDA's driver. Memory of the device is memory of the host; streams are threads
// that do what they are given one after the other, and are late, now more and now less, so that
// whoever does not wait as CUDA demands finds what is not there yet, or there no more. What it does
// not have: memory that the host cannot read, and a device that is busy.

#include "driver.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
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
constexpr int kNotPermitted = 800, kNoContext = 201;
constexpr size_t kStaged = 64;  // bytes

thread_local bool in_host_function = false;
thread_local std::deque<CUcontext> contexts;
std::mutex host_functions;  // one at a time, of whatever stream

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
  CUstream_st(CUcontext context, int late) : context(context), late(0, late) {
    thread = std::thread([this] { Run(); });
  }
  ~CUstream_st() {
    Give(nullptr);
    thread.join();
  }

  int Give(std::function<void()> work) {
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
      std::this_thread::sleep_for(std::chrono::microseconds(late(random)));
      if (work) work();
      std::lock_guard<std::mutex> lock(mutex);
      queue.pop_front();
      changed.notify_all();
      if (!work) return;
    }
  }

  CUcontext context;
  std::uniform_int_distribution<int> late;
  std::minstd_rand random;
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> queue;
  std::thread thread;
};

namespace {

// What an event stands for is over when its stream has come so far.
struct Over {
  std::mutex mutex;
  std::condition_variable changed;
  bool is = false;
};

}  // namespace

struct CUevent_st {
  std::mutex mutex;
  std::shared_ptr<Over> over;
};

namespace {

std::atomic<int64_t> waited_for{0};
std::atomic<int> late{10000};

// Whoever copies more than a little of memory that is not pinned waits for it.
int Copy(bool pinned, size_t bytes, CUstream stream, std::function<void()> work) {
  const int problem = stream->Give(std::move(work));
  if (problem != 0 || pinned || bytes <= kStaged) return problem;
  waited_for += bytes;
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

// By how many microseconds copies of this process are late at most.
void stand_in_late(int microseconds) { late = microseconds; }

// Bytes that were copied while a program waited.
int64_t stand_in_waited_for() { return waited_for; }


int cuCtxPushCurrent_v2(CUcontext context) {
  if (in_host_function) return kNotPermitted;
  contexts.push_back(context);
  return 0;
}

int cuCtxPopCurrent_v2(CUcontext* context) {
  *context = contexts.back();
  contexts.pop_back();
  return 0;
}

int cuStreamCreate(CUstream* stream, unsigned) {
  if (contexts.empty()) return kNoContext;
  // The first device's copies are much later than those of others, which may not overtake them.
  const bool first = contexts.back() == reinterpret_cast<CUcontext>(1);
  *stream = new CUstream_st(contexts.back(), late / (first ? 1 : 10));
  return 0;
}

int cuStreamGetCtx(CUstream stream, CUcontext* context) {
  *context = stream->context;
  return 0;
}

int cuStreamSynchronize(CUstream stream) { return stream->Wait(); }

int cuEventCreate(CUevent* event, unsigned) {
  *event = new CUevent_st;
  return 0;
}

int cuEventRecord(CUevent event, CUstream stream) {
  auto over = std::make_shared<Over>();
  {
    std::lock_guard<std::mutex> lock(event->mutex);
    event->over = over;
  }
  return stream->Give([over] {
    std::lock_guard<std::mutex> lock(over->mutex);
    over->is = true;
    over->changed.notify_all();
  });
}

int cuStreamWaitEvent(CUstream stream, CUevent event, unsigned) {
  std::lock_guard<std::mutex> lock(event->mutex);
  return stream->Give([over = event->over] {
    std::unique_lock<std::mutex> lock(over->mutex);
    over->changed.wait(lock, [&] { return over->is; });
  });
}

int cuLaunchHostFunc(CUstream stream, void (*function)(void*), void* argument) {
  return stream->Give([=] {
    std::lock_guard<std::mutex> lock(host_functions);
    in_host_function = true;
    function(argument);
    in_host_function = false;
  });
}

int cuMemAllocAsync(CUdeviceptr* memory, size_t bytes, CUstream stream) {
  if (bytes == 0) return kInvalidValue;
  auto* block = static_cast<size_t*>(std::malloc(sizeof(size_t) + bytes));
  *block = bytes;
  *memory = reinterpret_cast<CUdeviceptr>(block + 1);
  return stream->Give([=] { std::memset(block + 1, 0xff, bytes); });  // not before it is given
}

int cuMemFreeAsync(CUdeviceptr memory, CUstream stream) {
  return stream->Give([=] {
    auto* block = reinterpret_cast<size_t*>(memory) - 1;
    std::memset(block + 1, 0xff, *block);
    std::free(block);
  });
}

int cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
  return stream->Give([=] {
    std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), bytes);
  });
}

int cuMemcpyDtoHAsync_v2(void* to, CUdeviceptr from, size_t bytes, CUstream stream) {
  const bool pinned = Pinned(to, bytes);
  return Copy(pinned, bytes, stream, [=] {
    if (pinned && !Pinned(to, bytes)) std::abort();  // no more
    std::memcpy(to, reinterpret_cast<void*>(from), bytes);
  });
}

int cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void* from, size_t bytes, CUstream stream) {
  const bool pinned = Pinned(from, bytes);
  return Copy(pinned, bytes, stream, [=] {
    if (pinned && !Pinned(from, bytes)) std::abort();
    std::memcpy(reinterpret_cast<void*>(to), from, bytes);
  });
}

int cuMemHostRegister_v2(void* memory, size_t bytes, unsigned) {
  if (contexts.empty()) return kNoContext;
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
  std::lock_guard<std::mutex> lock(pins_mutex);
  return pins.erase(reinterpret_cast<uintptr_t>(memory)) ? 0 : kNotRegistered;
}

int cuGetErrorString(int, const char** problem) {
  *problem = "the stand-in for the driver refuses it";
  return 0;
}

}  // extern "C"
