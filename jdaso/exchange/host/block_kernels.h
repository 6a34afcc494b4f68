// What compiled code computes while it copies leaves and sums on CPUs. The results have the same bits
// as those of core/block_format.py and core/error_feedback.py.

#pragma once

#include <cstddef>
#include <cstdint>

namespace jdaso {

// The bytes of a number of floats in blocks with 8 or 4 bits of each number.
constexpr size_t BlockBytes(int32_t bits, size_t size) { return (size + 63) / 64 * (1 + 8 * bits); }

// Rounds to nearest, ties to even, as XLA does. A NaN stays a NaN.
void ToBFloat16(const float* from, uint16_t* to, size_t size);

// The functions that send a leaf change its residual to the rounding error of what they send. If
// `to` is nullptr, another device sends the leaf.

// Sends leaf + residual.
void SendFloat32(const float* leaf, float* residual, float* to, size_t size);
void SendBFloat16(const float* leaf, float* residual, uint16_t* to, size_t size);

// Sends leaf - anchor + residual in blocks of 8 or 4 bits. Without an anchor, it is nullptr.
void SendBlocks(int32_t bits, const float* leaf, const float* anchor, float* residual, uint8_t* to,
                size_t size);

// Rounds sums to blocks and adds the rounding errors to the residual. The mean is the anchor plus the
// rounded sum divided by the number of members. It may be in the place of the anchor.
void ReceiveBlocks(int32_t bits, const float* sums, float members, const float* anchor,
                   float* residual, float* mean, size_t size);

// The mean of sums that are not of blocks.
void ReceiveMean(const float* sums, float members, float* mean, size_t size);

}  // namespace jdaso
