// What compiled code computes while it copies leaves and sums on CPUs. The results have the same bits
// as those of core/int8.py and core/error_feedback.py.

#pragma once

#include <cstddef>
#include <cstdint>

namespace jdaso {

// The bytes of a number of floats in blocks of int8.
constexpr size_t BlockBytes(size_t size) { return (size + 63) / 64 * 65; }

// Rounds to nearest, ties to even, as XLA does. A NaN stays a NaN.
void ToBFloat16(const float* from, uint16_t* to, size_t size);

// The functions that send a leaf change its residual to the rounding error of what they send. If
// `to` is nullptr, another device sends the leaf.

// Sends leaf + residual.
void SendFloat32(const float* leaf, float* residual, float* to, size_t size);
void SendBFloat16(const float* leaf, float* residual, uint16_t* to, size_t size);

// Sends leaf - anchor + residual in blocks of int8. Without an anchor, it is nullptr.
void SendBlocks(const float* leaf, const float* anchor, float* residual, uint8_t* to, size_t size);

// Rounds sums as int8 does and adds the rounding errors to the residual. The mean is the anchor plus
// the rounded sum divided by the number of members. It may be in the place of the anchor.
void ReceiveBlocks(const float* sums, float members, const float* anchor, float* residual,
                   float* mean, size_t size);

// The mean of sums that are not in int8.
void ReceiveMean(const float* sums, float members, float* mean, size_t size);

}  // namespace jdaso
