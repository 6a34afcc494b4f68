// Where code for CUDA devices is tested on a CPU: XLA gives it a stream that is none of CUDA's.

#ifndef STAND_IN_H_
#define STAND_IN_H_

#include <memory>
#include <optional>

#include "driver.h"
#include "xla/ffi/api/ffi.h"

namespace stand_in {

CUstream Begin(int device);
void End(CUstream stream);  // when all that was given to it is done

// The stream of a program. It ends with the call, as XLA goes on on a CPU with what is there then.
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
