// XLA custom calls for CPU devices. They copy leaves to the staging buffers and sums back, and compute
// error feedback meanwhile. Only the progress thread calls MPI.

#include <cstring>

#include "block_kernels.h"
#include "ffi_queue.h"

namespace jdaso {
namespace {

// The numbers of an argument or a result; nullptr if there are not so many.
template <typename T>
const T* Data(ffi::RemainingArgs arguments, size_t i) {
  if (i >= arguments.size()) return nullptr;
  return static_cast<const T*>(arguments.get<ffi::AnyBuffer>(i)->untyped_data());
}

template <typename T>
T* Data(ffi::RemainingRets results, size_t i) {
  return static_cast<T*>((*results.get<ffi::AnyBuffer>(i))->untyped_data());
}

// The bytes of `size` bytes of numbers on a wire.
size_t WireBytes(int32_t wire, size_t size) {
  if (wire == kInt8 || wire == kFloat4) return BlockBytes(wire, size / sizeof(float));
  return wire == kBFloat16 ? size / 2 : size;
}

// Sends a leaf of float32 numbers with error feedback.
void SendWithFeedback(int32_t wire, const float* leaf, const float* anchor, float* residual,
                      char* to, size_t size) {
  if (wire == kInt8 || wire == kFloat4) {
    SendBlocks(wire, leaf, anchor, residual, reinterpret_cast<uint8_t*>(to), size);
  } else if (wire == kBFloat16) {
    SendBFloat16(leaf, residual, reinterpret_cast<uint16_t*>(to), size);
  } else {
    SendFloat32(leaf, residual, reinterpret_cast<float*>(to), size);
  }
}

// Copies the leaves to the staging buffers, and posts the exchange. A node that does not contribute
// sends zeros and keeps its residuals.
ffi::Error Post(ffi::Buffer<ffi::S32> token, ffi::Buffer<ffi::S32> device,
                ffi::Buffer<ffi::S32> number, ffi::Buffer<ffi::S32> step,
                ffi::Buffer<ffi::S32> choice, ffi::Buffer<ffi::S32> sender,
                ffi::Buffer<ffi::F32> header, ffi::RemainingArgs arguments,
                ffi::Result<ffi::Buffer<ffi::S32>> done, ffi::RemainingRets residuals,
                int32_t queue, ffi::Span<const int32_t> layouts,
                ffi::Span<const int32_t> all_wires) {
  const size_t leaves = all_wires.size() / layouts.size();
  const int32_t layout = layouts[choice.typed_data()[0]];
  const int32_t* wires = all_wires.begin() + choice.typed_data()[0] * leaves;
  std::vector<size_t> sizes, wire_sizes;
  for (size_t i = 0; i < leaves; ++i) {
    auto leaf = arguments.get<ffi::AnyBuffer>(i);
    if (leaf.has_error()) return leaf.error();
    sizes.push_back(leaf->size_bytes());
    wire_sizes.push_back(WireBytes(wires[i], sizes[i]));
  }
  for (size_t i = 0; i < residuals.size(); ++i) {
    if (Data<float>(residuals, i) != Data<float>(arguments, leaves + i)) {
      return NotInPlace("jdaso_post");
    }
  }
  const bool sends = sender.typed_data()[0], contributes = header.typed_data()[0] > 0;
  const int32_t k = number.typed_data()[0];
  Call call{{kReserve, k, step.typed_data()[0], device.typed_data()[0], layout}};
  const Place* places = nullptr;
  if (sends) {
    if (auto error = Begin(queue, &call, kWhole); error.failure()) return error;
    places = CheckedPlaces(&call, wire_sizes, kWhole);
    if (places == nullptr) return ReportFailure(queue, call.in.number, call.error);
    RecordOf(call)->copy_to_host[0] = Now();
  }
  for (size_t i = 0; i < leaves; ++i) {
    const auto* leaf = Data<float>(arguments, i);
    char* place = sends ? places[i].address : nullptr;
    if (!contributes) {
      if (place != nullptr) std::memset(place, 0, wire_sizes[i]);
    } else if (i < residuals.size()) {
      SendWithFeedback(wires[i], leaf, Data<float>(arguments, leaves + residuals.size() + i),
                       Data<float>(residuals, i), place, sizes[i] / sizeof(float));
    } else if (place != nullptr && wires[i] == kBFloat16) {
      ToBFloat16(leaf, reinterpret_cast<uint16_t*>(place), sizes[i] / sizeof(float));
    } else if (place != nullptr) {
      std::memcpy(place, leaf, sizes[i]);
    }
  }
  done->typed_data()[0] = token.typed_data()[0];
  if (!sends) return ffi::Error::Success();
  RecordOf(call)->copy_to_host[1] = Now();
  Call post{{kPost, k, step.typed_data()[0]}};
  std::memcpy(post.in.header, header.typed_data(), sizeof(post.in.header));
  return SubmitAndWait(queue, &post);
}

// Waits until an exchange is complete, and copies a part of its sums, and its header, to the
// program. With error feedback, it updates the residuals of the first leaves and copies their means
// instead, to the places of the anchors or to others. If the sums cannot be used, the means are the
// anchors.
ffi::Error Collect(ffi::Buffer<ffi::S32> token, ffi::Buffer<ffi::S32> device,
                   ffi::Buffer<ffi::S32> number, ffi::RemainingArgs feedback,
                   ffi::Result<ffi::Buffer<ffi::S32>> done,
                   ffi::Result<ffi::Buffer<ffi::F32>> header, ffi::RemainingRets results,
                   int32_t queue, int32_t first, int32_t last, int32_t readers,
                   int32_t residuals) {
  const size_t with_feedback = residuals, leaves = results.size() - with_feedback;
  std::vector<size_t> sizes;
  for (size_t i = 0; i < leaves; ++i) {
    auto result = results.get<ffi::AnyBuffer>(i);
    if (result.has_error()) return result.error();
    sizes.push_back((*result)->size_bytes());
    if (i < with_feedback &&
        Data<float>(results, leaves + i) != Data<float>(feedback, 1 + i)) {
      return NotInPlace("jdaso_collect");
    }
  }
  Call call{{kCollect, number.typed_data()[0], 0, device.typed_data()[0], readers}};
  if (auto error = Begin(queue, &call, {first, last}); error.failure()) return error;
  const Place* places = CheckedPlaces(&call, sizes, {first, last});
  if (places == nullptr) return ReportFailure(queue, call.in.number, call.error);
  Record* record = RecordOf(call);
  if (first == 0) record->copy_to_device[0] = Now();
  const float members = call.in.header[0];
  const int32_t bits = with_feedback > 0 ? *Data<int32_t>(feedback, 0) : 0;
  for (size_t i = 0; i < leaves; ++i) {
    auto* sum = reinterpret_cast<const float*>(places[i].address);
    auto* result = Data<float>(results, i);
    const size_t size = sizes[i] / sizeof(float);
    if (i >= with_feedback) {
      std::memcpy(result, sum, sizes[i]);
      continue;
    }
    const auto* anchor = Data<float>(feedback, 1 + with_feedback + i);
    if (members <= 0 || call.in.header[kFinite] <= 0) {
      if (anchor == nullptr) {
        std::memset(result, 0, sizes[i]);
      } else if (anchor != result) {
        std::memcpy(result, anchor, sizes[i]);
      }
    } else if (bits > 0) {
      ReceiveBlocks(bits, sum, members, anchor, Data<float>(results, leaves + i), result, size);
    } else {
      ReceiveMean(sum, members, result, size);
    }
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
