// What a program on CPU devices does at an exchange, as functions that XLA calls: it copies
// parameters to host memory and sums back. No MPI here: the progress thread speaks it.

#include <cstring>

#include "desk.h"

namespace jdaso {
namespace {

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
  Call call{kReserve, number.typed_data()[0], step.typed_data()[0], specs, 0};
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
  Call post{kPost, number.typed_data()[0], step.typed_data()[0], specs, 0};
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
  Call call{kCollect, number.typed_data()[0], 0, takers, 0};
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

XLA_FFI_DEFINE_HANDLER_SYMBOL(jdaso_post, Post, BindPost(ffi::Ffi::Bind()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(jdaso_collect, Collect, BindCollect(ffi::Ffi::Bind()));

}  // namespace jdaso
