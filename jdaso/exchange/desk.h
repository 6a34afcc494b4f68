// What compiled code asks of Python, at a desk, where a thread takes calls, and answers them. So a
// program itself needs no interpreter, and JAX may dispatch it the fast way, which it does not
// where a program calls back into Python.

#ifndef JDASO_EXCHANGE_DESK_H_
#define JDASO_EXCHANGE_DESK_H_

#include <atomic>
#include <cstdint>
#include <string>
#include <utility>

#include "xla/ffi/api/ffi.h"

namespace jdaso {

namespace ffi = xla::ffi;

constexpr int kHeader = 8;  // HEADER_SIZE of _base.py
enum Kind : int32_t { kReserve = 0, kPost = 1, kCollect = 2, kFail = 3 };

// RECORD of _staging.py.
struct Record {
  std::atomic<int32_t> taken;
  int32_t unused;
  double fill[2];
  double take[2];
};
static_assert(sizeof(Record) == 40);

// A call of the program, and Python's answer. Call of _native.py, down to `problem`.
struct Call {
  int32_t kind, number, step, about;
  int32_t pins;  // whether devices copy from and to the memory that is asked for
  float header[kHeader] = {};
  char problem[256] = {};  // of a call that says what has failed
  // The answer: where each leaf is, and the record; or what went wrong.
  void* const* rows = nullptr;
  std::string error = {};
  bool answered = false;
  bool left = false;  // nobody waits for the answer
};

// Asks at a desk, by its number, and waits for the answer, which is in the call then.
ffi::Error Ask(int32_t desk, Call* call);

// Leaves a call there; an error becomes the answer to whoever asks next.
void Leave(int32_t desk, const Call& call);

// What XLA gives to the function that posts, after a context if there is one. Attributes: which
// desk; which specs, by their number; and which leaves are to be halved to bfloat16 on the way.
template <typename Binding>
auto BindPost(Binding&& binding) {
  return std::forward<Binding>(binding)
      .template Arg<ffi::Buffer<ffi::S32>>()  // ticket
      .template Arg<ffi::Buffer<ffi::S32>>()  // number
      .template Arg<ffi::Buffer<ffi::S32>>()  // step
      .template Arg<ffi::Buffer<ffi::F32>>()  // header
      .RemainingArgs()                        // leaves
      .template Ret<ffi::Buffer<ffi::S32>>()  // ticket
      .template Attr<int32_t>("desk")
      .template Attr<int32_t>("specs")
      .template Attr<ffi::Span<const int32_t>>("narrow");
}

// And to the function that collects, for one of so many takers.
template <typename Binding>
auto BindCollect(Binding&& binding) {
  return std::forward<Binding>(binding)
      .template Arg<ffi::Buffer<ffi::S32>>()  // ticket
      .template Arg<ffi::Buffer<ffi::S32>>()  // number
      .template Ret<ffi::Buffer<ffi::S32>>()  // ticket
      .template Ret<ffi::Buffer<ffi::F32>>()  // header
      .RemainingRets()                        // sums
      .template Attr<int32_t>("desk")
      .template Attr<int32_t>("takers");
}

// Seconds of the clock that time.monotonic reads.
double Now();

}  // namespace jdaso

#endif  // JDASO_EXCHANGE_DESK_H_
