// What a program does at an exchange, as functions that XLA calls: it copies parameters to host
// memory and sums back, and asks Python, at a desk, for the rest. Python has a thread that takes
// the calls; the program itself needs no interpreter, and JAX may dispatch it the fast way, which
// it does not where a program calls back into Python. No MPI here: the progress thread speaks it.

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

constexpr int kHeader = 8;  // HEADER_SIZE of _base.py
enum Kind : int32_t { kReserve = 0, kPost = 1, kCollect = 2 };

// RECORD of _staging.py.
struct Record {
  std::atomic<int32_t> taken;
  int32_t unused;
  double fill[2];
  double take[2];
};
static_assert(sizeof(Record) == 40);

// A call of the program, and Python's answer. Call of _native.py, down to the first comment.
struct Call {
  int32_t kind, number, step, about;
  float header[kHeader];
  // The answer: where each leaf is, and the record; or what went wrong.
  void* const* rows = nullptr;
  std::string error;
  bool answered = false;
};

class Desk {
 public:
  // Waits for the answer, which is in the call then.
  void Ask(Call* call) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (closed_) {
      call->error = "the interpreter is exiting, no exchange can start or end";
      return;
    }
    calls_.push_back(call);
    changed_.notify_all();
    changed_.wait(lock, [&] { return call->answered; });
  }

  // The next call, or nullptr when the desk has been closed.
  Call* Next() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return closed_ || !calls_.empty(); });
    if (closed_) return nullptr;
    Call* call = calls_.front();
    calls_.pop_front();
    return call;
  }

  void Answer(Call* call, const char* error, void* const* rows, const float* header) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (error != nullptr) call->error = error;
    if (header != nullptr) std::memcpy(call->header, header, sizeof(call->header));
    call->rows = rows;
    call->answered = true;
    changed_.notify_all();
  }

  void Close() {
    std::lock_guard<std::mutex> lock(mutex_);
    closed_ = true;
    for (Call* call : calls_) {
      call->error = "the interpreter is exiting, no exchange can start or end";
      call->answered = true;
    }
    calls_.clear();
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Call*> calls_;
  bool closed_ = false;
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

ffi::Error Ask(int32_t desk, Call* call) {
  Desk* at = At(desk);
  if (at == nullptr) return ffi::Error::InvalidArgument("this program is of another process");
  at->Ask(call);
  return call->error.empty() ? ffi::Error::Success() : ffi::Error::Internal(call->error);
}

// Seconds of the clock that time.monotonic reads.
double Now() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double>(now).count();
}

// Rounds to nearest, ties to even, as XLA does; a NaN stays one.
uint16_t ToBFloat16(uint32_t bits) {
  const bool nan = (bits & 0x7fffffff) > 0x7f800000;
  const uint32_t rounded = bits + 0x7fff + ((bits >> 16) & 1);
  return static_cast<uint16_t>((nan ? bits | 0x400000 : rounded) >> 16);
}

// Copies the leaves to the host, in bfloat16 if they are float32 and `narrow` is set, zeros if
// this node does not contribute; and lets them fly.
ffi::Error Post(ffi::Buffer<ffi::S32> ticket, ffi::Buffer<ffi::S32> number,
                ffi::Buffer<ffi::S32> step, ffi::Buffer<ffi::F32> header,
                ffi::RemainingArgs leaves, ffi::Result<ffi::Buffer<ffi::S32>> done, int32_t desk,
                int32_t specs, ffi::Span<const int32_t> narrow) {
  Call call{kReserve, number.typed_data()[0], step.typed_data()[0], specs, {}};
  if (auto error = Ask(desk, &call); error.failure()) return error;
  auto* record = static_cast<Record*>(call.rows[leaves.size()]);
  record->fill[0] = Now();
  const bool contributes = header.typed_data()[0] > 0;
  for (size_t i = 0; i < leaves.size(); ++i) {
    auto leaf = leaves.get<ffi::AnyBuffer>(i);
    if (leaf.has_error()) return leaf.error();
    const size_t bytes = leaf->size_bytes();
    if (!contributes) {
      std::memset(call.rows[i], 0, narrow[i] ? bytes / 2 : bytes);
    } else if (narrow[i]) {
      const auto* from = static_cast<const uint32_t*>(leaf->untyped_data());
      auto* to = static_cast<uint16_t*>(call.rows[i]);
      for (size_t k = 0; k < bytes / 4; ++k) to[k] = ToBFloat16(from[k]);
    } else {
      std::memcpy(call.rows[i], leaf->untyped_data(), bytes);
    }
  }
  record->fill[1] = Now();
  Call post{kPost, number.typed_data()[0], step.typed_data()[0], specs, {}};
  std::memcpy(post.header, header.typed_data(), sizeof(post.header));
  if (auto error = Ask(desk, &post); error.failure()) return error;
  done->typed_data()[0] = ticket.typed_data()[0];
  return ffi::Error::Success();
}

// Waits until an exchange has ended, and copies its sums and header to the program.
ffi::Error Collect(ffi::Buffer<ffi::S32> ticket, ffi::Buffer<ffi::S32> number,
                   ffi::Result<ffi::Buffer<ffi::S32>> done,
                   ffi::Result<ffi::Buffer<ffi::F32>> header, ffi::RemainingRets sums,
                   int32_t desk, int32_t takers) {
  Call call{kCollect, number.typed_data()[0], 0, takers, {}};
  if (auto error = Ask(desk, &call); error.failure()) return error;
  auto* record = static_cast<Record*>(call.rows[sums.size()]);
  record->take[0] = Now();
  for (size_t i = 0; i < sums.size(); ++i) {
    auto sum = sums.get<ffi::AnyBuffer>(i);
    if (sum.has_error()) return sum.error();
    std::memcpy((*sum)->untyped_data(), call.rows[i], (*sum)->size_bytes());
  }
  std::memcpy(header->typed_data(), call.header, sizeof(call.header));
  done->typed_data()[0] = ticket.typed_data()[0];
  record->take[1] = Now();
  record->taken.fetch_add(1);  // from now on the memory may be used again
  return ffi::Error::Success();
}

}  // namespace

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

}  // extern "C"

XLA_FFI_DEFINE_HANDLER_SYMBOL(jdaso_post, Post,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .RemainingArgs()
                                  .Ret<ffi::Buffer<ffi::S32>>()
                                  .Attr<int32_t>("desk")
                                  .Attr<int32_t>("specs")
                                  .Attr<ffi::Span<const int32_t>>("narrow"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(jdaso_collect, Collect,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .RemainingRets()
                                  .Attr<int32_t>("desk")
                                  .Attr<int32_t>("takers"));
