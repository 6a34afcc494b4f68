// Copies between XLA's buffers and the host memory of an exchange, inside the program: no
// interpreter, no MPI. Addresses come from Python as operands, one row for each leaf; the thread
// that speaks MPI works on the same memory.

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

constexpr const char* kRows = "one address for each leaf, and one for the record";

// RECORD of _staging.py.
struct Record {
  std::atomic<int32_t> taken;
  int32_t unused;
  double fill[2];
  double take[2];
};
static_assert(sizeof(Record) == 40);

// Seconds of the clock that time.monotonic reads.
double Now() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double>(now).count();
}

char* At(const ffi::Buffer<ffi::U32>& addresses, size_t row) {
  const uint32_t* halves = addresses.typed_data() + 2 * row;
  return reinterpret_cast<char*>(static_cast<uintptr_t>(halves[0]) |
                                 static_cast<uintptr_t>(halves[1]) << 32);
}

bool HasRows(const ffi::Buffer<ffi::U32>& addresses, size_t leaves) {
  return addresses.element_count() == 2 * (leaves + 1);
}

// Rounds to nearest, ties to even, as XLA does; a NaN stays one.
uint16_t ToBFloat16(uint32_t bits) {
  const bool nan = (bits & 0x7fffffff) > 0x7f800000;
  const uint32_t rounded = bits + 0x7fff + ((bits >> 16) & 1);
  return static_cast<uint16_t>((nan ? bits | 0x400000 : rounded) >> 16);
}

// The leaves, to the memory they are sent from; in bfloat16 if they are float32 and `narrow` is
// set. Zeros, if this node does not contribute.
ffi::Error Fill(ffi::Buffer<ffi::U32> addresses, ffi::Buffer<ffi::F32> header,
                ffi::RemainingArgs leaves, ffi::Result<ffi::Buffer<ffi::S32>> done,
                ffi::Span<const int32_t> narrow) {
  if (!HasRows(addresses, leaves.size()) || narrow.size() != leaves.size()) {
    return ffi::Error::InvalidArgument(kRows);
  }
  auto* record = reinterpret_cast<Record*>(At(addresses, leaves.size()));
  record->fill[0] = Now();
  const bool contributes = header.typed_data()[0] > 0;
  for (size_t i = 0; i < leaves.size(); ++i) {
    auto leaf = leaves.get<ffi::AnyBuffer>(i);
    if (leaf.has_error()) return leaf.error();
    char* to = At(addresses, i);
    const size_t bytes = leaf->size_bytes();
    if (!contributes) {
      std::memset(to, 0, narrow[i] ? bytes / 2 : bytes);
    } else if (narrow[i]) {
      const auto* from = static_cast<const uint32_t*>(leaf->untyped_data());
      auto* half = reinterpret_cast<uint16_t*>(to);
      for (size_t k = 0; k < bytes / 4; ++k) half[k] = ToBFloat16(from[k]);
    } else {
      std::memcpy(to, leaf->untyped_data(), bytes);
    }
  }
  record->fill[1] = Now();
  done->typed_data()[0] = 0;
  return ffi::Error::Success();
}

// The sums, from where they have arrived.
ffi::Error Take(ffi::Buffer<ffi::U32> addresses, ffi::Result<ffi::Buffer<ffi::S32>> done,
                ffi::RemainingRets sums) {
  if (!HasRows(addresses, sums.size())) return ffi::Error::InvalidArgument(kRows);
  auto* record = reinterpret_cast<Record*>(At(addresses, sums.size()));
  record->take[0] = Now();
  for (size_t i = 0; i < sums.size(); ++i) {
    auto sum = sums.get<ffi::AnyBuffer>(i);
    if (sum.has_error()) return sum.error();
    std::memcpy((*sum)->untyped_data(), At(addresses, i), (*sum)->size_bytes());
  }
  record->take[1] = Now();
  record->taken.fetch_add(1);
  done->typed_data()[0] = 0;
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jdaso_fill, Fill,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::Buffer<ffi::U32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .RemainingArgs()
                                  .Ret<ffi::Buffer<ffi::S32>>()
                                  .Attr<ffi::Span<const int32_t>>("narrow"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(jdaso_take, Take,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::Buffer<ffi::U32>>()
                                  .Ret<ffi::Buffer<ffi::S32>>()
                                  .RemainingRets());
