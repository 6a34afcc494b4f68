// Tests of code for CUDA devices on a CPU: gives the code a simulated stream in place of CUDA's.

#ifndef STAND_IN_H_
#define STAND_IN_H_

#include <memory>
#include <optional>

#include "cuda_driver.h"
#include "xla/ffi/api/ffi.h"

namespace stand_in {

CUstream Begin(int device);
void End(CUstream stream);  // waits until its work is done

// The stream of a program. The call waits for it, because on a CPU XLA uses results immediately.
class Stream {
 public:
  explicit Stream(int device) : stream_(Begin(device), End) {}
  operator CUstream() const { return stream_.get(); }

 private:
  std::shared_ptr<CUstream_st> stream_;
};

struct Program {};

}  // namespace stand_in

namespace xla::ffi {

template <>
struct CtxDecoding<stand_in::Program> {
  using Type = stand_in::Stream;
  static std::optional<Type> Decode(const XLA_FFI_Api* api, XLA_FFI_ExecutionContext* context,
                                    DiagnosticEngine& diagnostic) {
    auto device = CtxDecoding<DeviceOrdinal>::Decode(api, context, diagnostic);
    if (!device.has_value()) return std::nullopt;
    return Type(*device);
  }
};

}  // namespace xla::ffi

#endif  // STAND_IN_H_
