#include "blocks.h"

#include <algorithm>
#include <cstring>

// One version for each vector unit. The loader takes the best one that the processor has.
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#if __GNUC__ >= 12
#define JDASO_VECTORIZED __attribute__((target_clones("arch=x86-64-v4", "avx2", "default")))
#else
#define JDASO_VECTORIZED __attribute__((target_clones("avx2", "default")))
#endif
#else
#define JDASO_VECTORIZED
#endif

namespace jdaso {
namespace {

// The constants of core/int8.py.
constexpr size_t kBlock = 64, kRow = 1 + kBlock;
constexpr int kMinExponent = -100, kMaxExponent = 121;

inline uint32_t BitsOf(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}

inline float FromBits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

inline float PowerOfTwo(int exponent) { return FromBits(static_cast<uint32_t>(127 + exponent) << 23); }

inline float FiniteOrZero(float x) { return (BitsOf(x) & 0x7f800000) == 0x7f800000 ? 0.0f : x; }

inline uint16_t RoundedToBFloat16(uint32_t bits) {
  const bool nan = (bits & 0x7fffffff) > 0x7f800000;
  const uint32_t rounded = bits + 0x7fff + ((bits >> 16) & 1);
  return static_cast<uint16_t>((nan ? bits | 0x400000 : rounded) >> 16);
}

// Packs a block, and returns the rounded numbers as well.
inline void Pack(const float* block, float* rounded, uint8_t* row) {
  int32_t largest = 0;
  for (size_t i = 0; i < kBlock; ++i) {
    largest = std::max(largest, static_cast<int32_t>(BitsOf(block[i]) & 0x7fffffff));
  }
  const int exponent = std::clamp(((largest + 0x1ffff) >> 23) - 133, kMinExponent, kMaxExponent);
  const float inverse = PowerOfTwo(-exponent), scale = PowerOfTwo(exponent);
  row[0] = static_cast<uint8_t>(exponent);
  // In float32 numbers of this size, the last bit stands for 1. A sum with one is rounded to an
  // integer, which is in its lowest bits.
  constexpr float kRounder = 12582912.0f;  // 1.5 2^23
  for (size_t i = 0; i < kBlock; ++i) {
    const float x = block[i] * inverse;
    const float above = x > -127.0f ? x : -127.0f;
    const float integer = (above < 127.0f ? above : 127.0f) + kRounder;
    row[1 + i] = static_cast<uint8_t>(BitsOf(integer));
    rounded[i] = (integer - kRounder) * scale;
  }
}

inline void Unpack(const uint8_t* row, float* block) {
  const float scale = PowerOfTwo(static_cast<int8_t>(row[0]));
  for (size_t i = 0; i < kBlock; ++i) block[i] = static_cast<int8_t>(row[1 + i]) * scale;
}

inline void SendBlock(const float* leaf, const float* anchor, float* residual, uint8_t* row) {
  float wanted[kBlock], rounded[kBlock];
  uint8_t unused[kRow];
  if (anchor != nullptr) {
    for (size_t i = 0; i < kBlock; ++i) wanted[i] = leaf[i] - anchor[i] + residual[i];
  } else {
    for (size_t i = 0; i < kBlock; ++i) wanted[i] = leaf[i] + residual[i];
  }
  Pack(wanted, rounded, row != nullptr ? row : unused);
  for (size_t i = 0; i < kBlock; ++i) residual[i] = FiniteOrZero(wanted[i] - rounded[i]);
}

inline void ReceiveBlock(const float* sums, float members, const float* anchor, float* residual,
                         float* mean) {
  float rounded[kBlock];
  uint8_t unused[kRow];
  Pack(sums, rounded, unused);
  for (size_t i = 0; i < kBlock; ++i) residual[i] += FiniteOrZero(sums[i] - rounded[i]);
  for (size_t i = 0; i < kBlock; ++i) {
    mean[i] = (anchor != nullptr ? anchor[i] : 0.0f) + rounded[i] / members;
  }
}

// The numbers of the last block of a leaf, with zeros after them.
struct Padded {
  float numbers[kBlock] = {};
  size_t size;
  Padded(const float* leaf, size_t count) : size(count) {
    if (leaf != nullptr) std::copy_n(leaf, count, numbers);
  }
  void CopyTo(float* leaf) const { std::copy_n(numbers, size, leaf); }
};

}  // namespace

JDASO_VECTORIZED
void ToBFloat16(const float* from, uint16_t* to, size_t size) {
  for (size_t i = 0; i < size; ++i) to[i] = RoundedToBFloat16(BitsOf(from[i]));
}

JDASO_VECTORIZED
void SendFloat32(const float* leaf, float* residual, float* to, size_t size) {
  if (to != nullptr) {
    for (size_t i = 0; i < size; ++i) to[i] = leaf[i] + residual[i];
  }
  std::fill_n(residual, size, 0.0f);
}

JDASO_VECTORIZED
void SendBFloat16(const float* leaf, float* residual, uint16_t* to, size_t size) {
  for (size_t i = 0; i < size; ++i) {
    const float wanted = leaf[i] + residual[i];
    const uint16_t sent = RoundedToBFloat16(BitsOf(wanted));
    residual[i] = FiniteOrZero(wanted - FromBits(static_cast<uint32_t>(sent) << 16));
    if (to != nullptr) to[i] = sent;
  }
}

JDASO_VECTORIZED
void SendBlocks(const float* leaf, const float* anchor, float* residual, uint8_t* to, size_t size) {
  size_t at = 0;
  for (; at + kBlock <= size; at += kBlock) {
    SendBlock(leaf + at, anchor ? anchor + at : nullptr, residual + at, to);
    if (to != nullptr) to += kRow;
  }
  if (at == size) return;
  Padded last(leaf + at, size - at), base(anchor ? anchor + at : nullptr, size - at);
  Padded error(residual + at, size - at);
  SendBlock(last.numbers, anchor ? base.numbers : nullptr, error.numbers, to);
  error.CopyTo(residual + at);
}

JDASO_VECTORIZED
void ReceiveBlocks(const float* sums, float members, const float* anchor, float* residual,
                   float* mean, size_t size) {
  size_t at = 0;
  for (; at + kBlock <= size; at += kBlock) {
    ReceiveBlock(sums + at, members, anchor ? anchor + at : nullptr, residual + at, mean + at);
  }
  if (at == size) return;
  Padded last(sums + at, size - at), base(anchor ? anchor + at : nullptr, size - at);
  Padded error(residual + at, size - at);
  ReceiveBlock(last.numbers, members, base.numbers, error.numbers, base.numbers);
  error.CopyTo(residual + at);
  base.CopyTo(mean + at);
}

JDASO_VECTORIZED
void ReceiveMean(const float* sums, float members, float* mean, size_t size) {
  for (size_t i = 0; i < size; ++i) mean[i] = 0.0f + sums[i] / members;
}

extern "C" {

// Adds rows of int8 blocks of several members in their order. `packed` receives the rounded sums.
JDASO_VECTORIZED
void jdaso_sum_blocks(const uint8_t* terms, size_t members, size_t rows, float* sums,
                      uint8_t* packed) {
  for (size_t row = 0; row < rows; ++row, sums += kBlock, packed += kRow) {
    float term[kBlock], rounded[kBlock];
    Unpack(terms + row * kRow, sums);
    for (size_t member = 1; member < members; ++member) {
      Unpack(terms + (member * rows + row) * kRow, term);
      for (size_t i = 0; i < kBlock; ++i) sums[i] += term[i];
    }
    Pack(sums, rounded, packed);
  }
}

JDASO_VECTORIZED
void jdaso_unpack_blocks(const uint8_t* packed, size_t rows, float* numbers) {
  for (size_t row = 0; row < rows; ++row) Unpack(packed + row * kRow, numbers + row * kBlock);
}

}  // extern "C"

}  // namespace jdaso
