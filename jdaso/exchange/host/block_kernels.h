// What compiled code computes of leaves and sums on CPUs. The results have the same bits as those of
// XLA and of core/block_format.py.

#pragma once

#include <cstddef>
#include <cstdint>

namespace jdaso {

// Rounds to nearest, ties to even, as XLA does. A NaN stays a NaN.
void ToBFloat16(const float* from, uint16_t* to, size_t size);

}  // namespace jdaso
