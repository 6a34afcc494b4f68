#include "ffi_queue.h"

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <tuple>
#include <vector>

namespace jdaso {
namespace {

constexpr char kClosed[] =
    "the exchange is closed, or the interpreter is exiting: no exchange can start or end";

class CallQueue {
 public:
  void SubmitAndWait(Call* call) {
    std::unique_lock<std::mutex> lock(mutex_);
    call->error = closed_ ? kClosed : std::exchange(detached_error_, {});
    if (!call->error.empty()) return;
    calls_.push_back(call);
    changed_.notify_all();
    changed_.wait(lock, [&] { return call->completed; });
  }

  // The first part of an exchange is submitted. The others get its result.
  void Begin(Call* call, Part part) {
    const auto key = std::make_tuple(call->in.kind, call->in.number, call->in.device);
    if (part.first == 0) SubmitAndWait(call);
    std::lock_guard<std::mutex> lock(mutex_);
    if (part.first == 0 && !part.last && call->error.empty()) {
      begun_[key] = *call;
    } else if (part.first > 0) {
      auto begun = begun_.find(key);
      if (begun == begun_.end()) {
        call->error = kClosed;
        return;
      }
      *call = begun->second;
      if (part.last) begun_.erase(begun);
    }
  }

  void SubmitDetached(const Call& call) {
    std::lock_guard<std::mutex> lock(mutex_);
    calls_.push_back(new Call(call));
    calls_.back()->detached = true;
    changed_.notify_all();
  }

  // Waits for the next call and copies its arguments. Returns nullptr once the queue is empty and
  // shut down.
  Call* Next(Arguments* arguments) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return shut_down_ || !calls_.empty(); });
    if (calls_.empty()) return nullptr;
    Call* call = calls_.front();
    calls_.pop_front();
    taken_.insert(call);
    *arguments = call->in;
    return call;
  }

  void Complete(Call* call, const char* error, const Place* places, int32_t num_places,
                const float* header) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (taken_.erase(call) == 0) return;  // it has failed, and its memory may be gone
    if (call->detached) {
      if (error != nullptr && detached_error_.empty()) detached_error_ = error;
      delete call;
      return;
    }
    if (error != nullptr) call->error = error;
    if (header != nullptr) std::memcpy(call->in.header, header, sizeof(call->in.header));
    call->places = places;
    call->num_places = num_places;
    call->completed = true;
    changed_.notify_all();
  }

  // Fails all calls that a thread waits for, now and later. Detached calls stay in the queue.
  void Close() {
    std::lock_guard<std::mutex> lock(mutex_);
    closed_ = true;
    begun_.clear();
    std::deque<Call*> detached;
    for (Call* call : calls_) {
      if (call->detached) {
        detached.push_back(call);
      } else {
        Fail(call);
      }
    }
    calls_.swap(detached);
    changed_.notify_all();
  }

  // Fails the calls that Python has taken and not completed.
  void FailTaken() {
    std::lock_guard<std::mutex> lock(mutex_);
    for (Call* call : taken_) {
      if (call->detached) {
        delete call;
      } else {
        Fail(call);
      }
    }
    taken_.clear();
    changed_.notify_all();
  }

  void ShutDown() {
    std::lock_guard<std::mutex> lock(mutex_);
    shut_down_ = true;
    changed_.notify_all();
  }

 private:
  static void Fail(Call* call) {
    call->error = kClosed;
    call->completed = true;
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Call*> calls_;
  std::set<Call*> taken_;       // by Python, and not completed
  std::map<std::tuple<int32_t, int32_t, int32_t>, Call> begun_;  // by kind, number and device
  std::string detached_error_;  // the first error of a detached call, until it is returned
  bool closed_ = false, shut_down_ = false;
};

// Programs refer to a queue by its index. JAX's persistent cache may load a compiled program into
// another process, where pointers would be invalid.
// Queues are never destroyed. A process that MPI aborts would wait in exit() for their threads.
auto& queues_mutex = *new std::mutex;
auto& queues = *new std::vector<std::unique_ptr<CallQueue>>;

CallQueue* At(int32_t queue) {
  std::lock_guard<std::mutex> lock(queues_mutex);
  return queue >= 0 && queue < static_cast<int32_t>(queues.size()) ? queues[queue].get() : nullptr;
}

}  // namespace

ffi::Error SubmitAndWait(int32_t queue, Call* call) { return Begin(queue, call, kWhole); }

ffi::Error Begin(int32_t queue, Call* call, Part part) {
  CallQueue* at = At(queue);
  if (at == nullptr) {
    return ffi::Error::InvalidArgument("the program uses an exchange of another process");
  }
  at->Begin(call, part);
  return call->error.empty() ? ffi::Error::Success() : ffi::Error::Internal(call->error);
}

void SubmitDetached(int32_t queue, const Call& call) { At(queue)->SubmitDetached(call); }

const Place* CheckedPlaces(Call* call, const std::vector<size_t>& sizes, Part part) {
  const size_t leaves = call->num_places - 1, end = part.first + sizes.size();
  const std::string exchange = "exchange " + std::to_string(call->in.number);
  if (part.last ? end != leaves : end > leaves) {
    call->error = exchange + " has " + std::to_string(leaves) + " leaves, the program copies " +
                  std::to_string(end);
    return nullptr;
  }
  const Place* places = call->places + part.first;
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (places[i].address == nullptr) continue;
    if (sizes[i] < places[i].least_bytes || sizes[i] > places[i].most_bytes) {
      call->error = "leaf " + std::to_string(part.first + i) + " of " + exchange + " has " +
                    std::to_string(places[i].most_bytes) + " bytes, the program copies " +
                    std::to_string(sizes[i]);
      return nullptr;
    }
  }
  return places;
}

ffi::Error ReportFailure(int32_t queue, int32_t number, const std::string& message) {
  Call call{{kFail, number}};
  std::strncpy(call.in.message, message.c_str(), sizeof(call.in.message) - 1);
  auto error = SubmitAndWait(queue, &call);
  return error.failure() ? error : ffi::Error::Internal(message);
}

double Now() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double>(now).count();
}

extern "C" {

int32_t jdaso_header() { return kHeader; }

int32_t jdaso_open() {
  std::lock_guard<std::mutex> lock(queues_mutex);
  queues.push_back(std::make_unique<CallQueue>());
  return static_cast<int32_t>(queues.size()) - 1;
}

void* jdaso_next(int32_t queue, void* arguments) {
  return At(queue)->Next(static_cast<Arguments*>(arguments));
}

void jdaso_complete(int32_t queue, void* call, const char* error, const void* places,
                    int32_t num_places, const float* header) {
  At(queue)->Complete(static_cast<Call*>(call), error, static_cast<const Place*>(places),
                      num_places, header);
}

void jdaso_close(int32_t queue) { At(queue)->Close(); }

void jdaso_fail_taken(int32_t queue) { At(queue)->FailTaken(); }

void jdaso_shut_down(int32_t queue) { At(queue)->ShutDown(); }

}  // extern "C"

}  // namespace jdaso
