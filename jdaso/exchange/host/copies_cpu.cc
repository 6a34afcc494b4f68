// XLA custom calls for CPU devices. They copy leaves to the staging buffers and sums back. Only the
// progress thread calls MPI.

#include <cstring>

#include "ffi_queue.h"

namespace jdaso {
namespace {

// Rounds to nearest, ties to even, as XLA does. A NaN stays a NaN.
uint16_t ToBFloat16(uint32_t bits) {
  const bool nan = (bits & 0x7fffffff) > 0x7f800000;
  const uint32_t rounded = bits + 0x7fff + ((bits >> 16) & 1);
  return static_cast<uint16_t>((nan ? bits | 0x400000 : rounded) >> 16);
}

// Copies a part of the leaves to the staging buffers, and posts the exchange after the last part.
// Leaves with `narrow` are float32 and are rounded to bfloat16. A node that does not contribute
// sends zeros.
ffi::Error Post(ffi::Buffer<ffi::S32> token, ffi::Buffer<ffi::S32> device,
                ffi::Buffer<ffi::S32> number, ffi::Buffer<ffi::S32> step,
                ffi::Buffer<ffi::F32> header, ffi::RemainingArgs leaves,
                ffi::Result<ffi::Buffer<ffi::S32>> done, int32_t queue, int32_t first, int32_t last,
                int32_t layout, ffi::Span<const int32_t> narrow) {
  std::vector<size_t> sizes;
  for (size_t i = 0; i < leaves.size(); ++i) {
    auto leaf = leaves.get<ffi::AnyBuffer>(i);
    if (leaf.has_error()) return leaf.error();
    sizes.push_back(narrow[i] ? leaf->size_bytes() / 2 : leaf->size_bytes());
  }
  const int32_t k = number.typed_data()[0];
  Call call{{kReserve, k, step.typed_data()[0], device.typed_data()[0], layout}};
  if (auto error = Begin(queue, &call, {first, last}); error.failure()) return error;
  const Place* places = CheckedPlaces(&call, sizes, {first, last});
  if (places == nullptr) return ReportFailure(queue, call.in.number, call.error);
  Record* record = RecordOf(call);
  if (first == 0) record->copy_to_host[0] = Now();
  const bool contributes = header.typed_data()[0] > 0;
  for (size_t i = 0; i < leaves.size(); ++i) {
    const void* leaf = leaves.get<ffi::AnyBuffer>(i)->untyped_data();
    char* place = places[i].address;
    if (place == nullptr) continue;
    if (!contributes) {
      std::memset(place, 0, sizes[i]);
    } else if (narrow[i]) {
      const auto* from = static_cast<const uint32_t*>(leaf);
      auto* to = reinterpret_cast<uint16_t*>(place);
      for (size_t n = 0; n < sizes[i] / 2; ++n) to[n] = ToBFloat16(from[n]);
    } else {
      std::memcpy(place, leaf, sizes[i]);
    }
  }
  done->typed_data()[0] = token.typed_data()[0];
  if (!last) return ffi::Error::Success();
  record->copy_to_host[1] = Now();
  Call post{{kPost, k, step.typed_data()[0]}};
  std::memcpy(post.in.header, header.typed_data(), sizeof(post.in.header));
  return SubmitAndWait(queue, &post);
}

// Waits until an exchange is complete, and copies a part of its sums, and its header, to the
// program.
ffi::Error Collect(ffi::Buffer<ffi::S32> token, ffi::Buffer<ffi::S32> device,
                   ffi::Buffer<ffi::S32> number, ffi::Result<ffi::Buffer<ffi::S32>> done,
                   ffi::Result<ffi::Buffer<ffi::F32>> header, ffi::RemainingRets sums,
                   int32_t queue, int32_t first, int32_t last, int32_t readers) {
  std::vector<size_t> sizes;
  for (size_t i = 0; i < sums.size(); ++i) {
    auto sum = sums.get<ffi::AnyBuffer>(i);
    if (sum.has_error()) return sum.error();
    sizes.push_back((*sum)->size_bytes());
  }
  Call call{{kCollect, number.typed_data()[0], 0, device.typed_data()[0], readers}};
  if (auto error = Begin(queue, &call, {first, last}); error.failure()) return error;
  const Place* places = CheckedPlaces(&call, sizes, {first, last});
  if (places == nullptr) return ReportFailure(queue, call.in.number, call.error);
  Record* record = RecordOf(call);
  if (first == 0) record->copy_to_device[0] = Now();
  for (size_t i = 0; i < sums.size(); ++i) {
    std::memcpy((*sums.get<ffi::AnyBuffer>(i))->untyped_data(), places[i].address, sizes[i]);
  }
  std::memcpy(header->typed_data(), call.in.header, sizeof(call.in.header));
  done->typed_data()[0] = token.typed_data()[0];
  if (!last) return ffi::Error::Success();
  record->copy_to_device[1] = Now();
  record->reads.fetch_add(1);  // from here on the buffers may be reused
  return ffi::Error::Success();
}

ffi::Error OrderCpu(ffi::RemainingArgs arguments, ffi::RemainingRets results) {
  return ReturnInPlace(arguments, results, std::memcpy);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jdaso_post, Post, BindPost(ffi::Ffi::Bind()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(jdaso_collect, Collect, BindCollect(ffi::Ffi::Bind()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(jdaso_order, OrderCpu,
                              ffi::Ffi::Bind().RemainingArgs().RemainingRets());

}  // namespace jdaso
