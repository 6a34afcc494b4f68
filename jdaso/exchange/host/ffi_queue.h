// A queue of calls from compiled programs to Python. A Python thread takes each call, executes it,
// and completes it; see ffi_bridge.py.

#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace jdaso {

namespace ffi = xla::ffi;

constexpr int kHeader = 8, kFinite = 3;  // HEADER_SIZE and FINITE of core/exchange.py
enum Kind : int32_t { kReserve = 0, kPost = 1, kCollect = 2, kFail = 3 };

// RECORD of buffers.py.
struct Record {
  std::atomic<int32_t> reads;
  int32_t unused;
  double copy_to_host[2];
  double copy_to_device[2];
};
static_assert(sizeof(Record) == 40);

// PLACE of buffers.py: a leaf or a sum in the staging buffers, and the bytes that may be copied. The
// address is nullptr if another device sends the leaf.
struct Place {
  char* address;
  uint64_t least_bytes, most_bytes;
};
static_assert(sizeof(Place) == 24);

// `_Arguments` of ffi_bridge.py.
struct Arguments {
  int32_t kind, number, step;
  int32_t device;    // index of the device in the mesh
  int32_t argument;  // kReserve: index of the layout; kCollect: number of readers
  int32_t pin;       // whether devices copy to and from the buffers, which are then pinned
  float header[kHeader] = {};  // kCollect: of the result
  char message[256] = {};      // kFail: the error message
};

// A call and its result.
struct Call {
  Arguments in;
  // The result: the place of each leaf or sum and of the record, or an error.
  const Place* places = nullptr;
  int32_t num_places = 0;
  std::string error = {};
  bool completed = false;
  bool detached = false;  // no thread waits for the result
};

// Submits a call to the queue with this index and waits until it is completed.
ffi::Error SubmitAndWait(int32_t queue, Call* call);

// A program copies the sums of an exchange in parts, one after the other. Each is a call of its own
// with some of the sums.
struct Part {
  int32_t first;  // index of the part's first sum
  int32_t last;   // whether this is the last part
};
constexpr Part kWhole = {0, 1};

// Submits the call with the first part of an exchange, and returns its result for the other parts.
ffi::Error Begin(int32_t queue, Call* call, Part part);

// The places of a part whose leaves or sums have these sizes in the program. nullptr, and an error,
// if the buffers are those of other leaves.
const Place* CheckedPlaces(Call* call, const std::vector<size_t>& sizes, Part part);

// The record of the exchange.
inline Record* RecordOf(const Call& call) {
  return reinterpret_cast<Record*>(call.places[call.num_places - 1].address);
}

// Reports an error to Python and returns it. Python discards the reserved exchange, and aborts the
// job where other devices may be waiting for this one.
ffi::Error ReportFailure(int32_t queue, int32_t number, const std::string& message);

// Submits a copy of a call and returns. If it fails, the next SubmitAndWait returns its error.
void SubmitDetached(int32_t queue, const Call& call);

// How a leaf is sent, as in ffi_calls.py: 0 as it is, otherwise the bits of a number.
enum Wire : int32_t { kAsItIs = 0, kFloat4 = 4, kInt8 = 8, kBFloat16 = 16 };

// The signature of the functions that post, after a context if there is one. Attributes: the index
// of the queue, the indices of the leaves' layouts on each wire that may be used, and for each of
// these the Wire of each leaf. With error feedback, the residuals and the anchors of the first leaves,
// if there are any, come after the leaves, and the residuals change in their places. Without it, there
// is one layout.
template <typename Binding>
auto BindPost(Binding&& binding) {
  return std::forward<Binding>(binding)
      .template Arg<ffi::Buffer<ffi::S32>>()  // token
      .template Arg<ffi::Buffer<ffi::S32>>()  // device
      .template Arg<ffi::Buffer<ffi::S32>>()  // number
      .template Arg<ffi::Buffer<ffi::S32>>()  // step
      .template Arg<ffi::Buffer<ffi::S32>>()  // index of the layout to use
      .template Arg<ffi::Buffer<ffi::S32>>()  // whether this device sends
      .template Arg<ffi::Buffer<ffi::F32>>()  // header
      .RemainingArgs()                        // leaves, residuals, anchors
      .template Ret<ffi::Buffer<ffi::S32>>()  // token
      .RemainingRets()                        // residuals
      .template Attr<int32_t>("queue")
      .template Attr<ffi::Span<const int32_t>>("layouts")
      .template Attr<ffi::Span<const int32_t>>("wires");
}

// The signature of the functions that collect. `readers` is the number of devices that do. With error
// feedback, there are arguments: bits of a number if the sums are of blocks, the residuals of the
// first leaves, and the anchors, if there are any. `residuals` is their number. The results are then
// the means of these leaves, the sums of the others, and the residuals.
template <typename Binding>
auto BindCollect(Binding&& binding) {
  return std::forward<Binding>(binding)
      .template Arg<ffi::Buffer<ffi::S32>>()  // token
      .template Arg<ffi::Buffer<ffi::S32>>()  // device
      .template Arg<ffi::Buffer<ffi::S32>>()  // number
      .RemainingArgs()                        // of error feedback
      .template Ret<ffi::Buffer<ffi::S32>>()  // token
      .template Ret<ffi::Buffer<ffi::F32>>()  // header
      .RemainingRets()                        // sums, or means and residuals
      .template Attr<int32_t>("queue")
      .template Attr<int32_t>("first")
      .template Attr<int32_t>("last")
      .template Attr<int32_t>("readers")
      .template Attr<int32_t>("residuals");
}

inline ffi::Error NotInPlace(const char* function) {
  return ffi::Error::Internal(std::string("results of ") + function +
                              " must be in the places of its arguments");
}

// Returns arguments in their places, as many as there are results. What uses a result comes after
// it, and it comes after what computes the arguments. Further arguments are copied to the results
// from the second one on.
template <typename Copy>
ffi::Error ReturnInPlace(ffi::RemainingArgs arguments, ffi::RemainingRets results, Copy copy) {
  for (size_t i = 0; i < arguments.size(); ++i) {
    const bool in_place = i < results.size();
    auto from = arguments.get<ffi::AnyBuffer>(i);
    auto to = results.get<ffi::AnyBuffer>(in_place ? i : i - results.size() + 1);
    if (from.has_error() || to.has_error() || from->size_bytes() != (*to)->size_bytes() ||
        (in_place && from->untyped_data() != (*to)->untyped_data())) {
      return NotInPlace("jdaso_order");
    }
    if (!in_place) copy((*to)->untyped_data(), from->untyped_data(), from->size_bytes());
  }
  return ffi::Error::Success();
}

// Seconds of the clock that time.monotonic reads.
double Now();

}  // namespace jdaso
