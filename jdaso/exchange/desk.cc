// A desk: a queue of calls, which a thread of Python takes one by one.

#include "desk.h"

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

namespace jdaso {
namespace {

constexpr char kExiting[] = "the interpreter is exiting, no exchange can start or end";

class Desk {
 public:
  // Waits for the answer, which is in the call then.
  void Ask(Call* call) {
    std::unique_lock<std::mutex> lock(mutex_);
    call->error = closed_ ? kExiting : std::exchange(failure_, {});
    if (!call->error.empty()) return;
    calls_.push_back(call);
    changed_.notify_all();
    changed_.wait(lock, [&] { return call->answered; });
  }

  void Leave(const Call& call) {
    std::lock_guard<std::mutex> lock(mutex_);
    calls_.push_back(new Call(call));
    calls_.back()->left = true;
    changed_.notify_all();
  }

  // The next call, or nullptr when there will be none.
  Call* Next() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return ended_ || !calls_.empty(); });
    if (calls_.empty()) return nullptr;
    Call* call = calls_.front();
    calls_.pop_front();
    return call;
  }

  void Answer(Call* call, const char* error, void* const* rows, const float* header) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (call->left) {
      if (error != nullptr && failure_.empty()) failure_ = error;
      delete call;
      return;
    }
    if (error != nullptr) call->error = error;
    if (header != nullptr) std::memcpy(call->header, header, sizeof(call->header));
    call->rows = rows;
    call->answered = true;
    changed_.notify_all();
  }

  // Nobody is answered any more; what has been left is still taken, until the end.
  void Close() {
    std::lock_guard<std::mutex> lock(mutex_);
    closed_ = true;
    std::deque<Call*> left;
    for (Call* call : calls_) {
      if (call->left) {
        left.push_back(call);
      } else {
        call->error = kExiting;
        call->answered = true;
      }
    }
    calls_.swap(left);
    changed_.notify_all();
  }

  void End() {
    std::lock_guard<std::mutex> lock(mutex_);
    ended_ = true;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Call*> calls_;
  std::string failure_;  // of a call that was left
  bool closed_ = false, ended_ = false;
};

// Desks are known by number: a compiled program may outlive the process that compiled it, in JAX's
// persistent cache, and pointers do not.
// They are never destroyed: a process that MPI aborts would wait in exit() for their threads.
auto& desks_mutex = *new std::mutex;
auto& desks = *new std::vector<std::unique_ptr<Desk>>;

Desk* At(int32_t desk) {
  std::lock_guard<std::mutex> lock(desks_mutex);
  return desk >= 0 && desk < static_cast<int32_t>(desks.size()) ? desks[desk].get() : nullptr;
}

}  // namespace

ffi::Error Ask(int32_t desk, Call* call) {
  Desk* at = At(desk);
  if (at == nullptr) return ffi::Error::InvalidArgument("this program is of another process");
  at->Ask(call);
  return call->error.empty() ? ffi::Error::Success() : ffi::Error::Internal(call->error);
}

void Leave(int32_t desk, const Call& call) { At(desk)->Leave(call); }

double Now() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double>(now).count();
}

extern "C" {

int32_t jdaso_header() { return kHeader; }

int32_t jdaso_open() {
  std::lock_guard<std::mutex> lock(desks_mutex);
  desks.push_back(std::make_unique<Desk>());
  return static_cast<int32_t>(desks.size()) - 1;
}

void* jdaso_next(int32_t desk) { return At(desk)->Next(); }

void jdaso_answer(int32_t desk, void* call, const char* error, void* const* rows,
                  const float* header) {
  At(desk)->Answer(static_cast<Call*>(call), error, rows, header);
}

void jdaso_close(int32_t desk) { At(desk)->Close(); }

void jdaso_end(int32_t desk) { At(desk)->End(); }

}  // extern "C"

}  // namespace jdaso
