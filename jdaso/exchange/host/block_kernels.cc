// What compiled code computes of leaves and sums on CPUs. The results have the same bits as those of
// XLA and of core/block_format.py.

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "xla/ffi/api/ffi.h"

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

// What such a version calls must be part of it, or it would not use the vector unit.
#ifdef __GNUC__
#define JDASO_INLINE inline __attribute__((always_inline))
#else
#define JDASO_INLINE inline
#endif

namespace jdaso {
namespace {

namespace ffi = xla::ffi;

// The constants of core/block_format.py.
constexpr size_t kBlock = 64;
constexpr int kMinExponent = -100;

JDASO_INLINE uint32_t BitsOf(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}

JDASO_INLINE float FromBits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

JDASO_INLINE float PowerOfTwo(int exponent) { return FromBits(static_cast<uint32_t>(127 + exponent) << 23); }

// The format int8 of core/block_format.py. A code is an integer.
struct Int8 {
  static constexpr float kLimit = 127;
  static constexpr int kMaxExponent = 121;
  static constexpr size_t kRow = 1 + kBlock;

  static JDASO_INLINE uint32_t Doublings(uint32_t) { return 0; }
  static JDASO_INLINE void Store(const int8_t* codes, uint8_t* row) { std::memcpy(row + 1, codes, kBlock); }
  static JDASO_INLINE void Load(const uint8_t* row, float* integers) {
    for (size_t i = 0; i < kBlock; ++i) integers[i] = static_cast<int8_t>(row[1 + i]);
  }
};

// The format float4. Integers are multiples of 1 below 4, of 2 below 8, of 4 from there on.
struct Float4 {
  static constexpr float kLimit = 12;
  static constexpr int kMaxExponent = 124;
  static constexpr size_t kHalf = kBlock / 2, kRow = 1 + kHalf;

  static JDASO_INLINE uint32_t Doublings(uint32_t magnitude) { return std::max(magnitude >> 23, 128u) - 128; }
  static JDASO_INLINE void Store(const int8_t* codes, uint8_t* row) {
    for (size_t i = 0; i < kHalf; ++i) row[1 + i] = (codes[i] & 15) | static_cast<uint8_t>(codes[kHalf + i]) << 4;
  }
  // One loop for each half, and maxima in place of conditions, so that compilers vectorize them.
  static JDASO_INLINE void Load(const uint8_t* row, float* integers) {
    for (size_t i = 0; i < kHalf; ++i) integers[i] = Integer(static_cast<int8_t>(row[1 + i] << 4) >> 4);
    for (size_t i = 0; i < kHalf; ++i) integers[kHalf + i] = Integer(static_cast<int8_t>(row[1 + i]) >> 4);
  }
  static JDASO_INLINE float Integer(int code) {
    const int negative = code >> 31, size = (code ^ negative) - negative;
    const int integer = size + std::max(size, 4) - 4 + 2 * (std::max(size, 6) - 6);
    return static_cast<float>((integer ^ negative) - negative);
  }
};

// Packs a block, and returns the rounded numbers as well.
template <typename Format>
JDASO_INLINE void Pack(const float* block, float* rounded, uint8_t* row) {
  int32_t largest = 0;
  for (size_t i = 0; i < kBlock; ++i) {
    largest = std::max(largest, static_cast<int32_t>(BitsOf(block[i]) & 0x7fffffff));
  }
  const uint32_t limit = BitsOf(Format::kLimit), carry = 0x7fffff - (limit & 0x7fffff);
  const int above_limit = static_cast<int>((static_cast<uint32_t>(largest) + carry) >> 23) -
                          static_cast<int>(limit >> 23);
  const int exponent = std::clamp(above_limit, kMinExponent, Format::kMaxExponent);
  const float inverse = PowerOfTwo(-exponent), scale = PowerOfTwo(exponent);
  row[0] = static_cast<uint8_t>(exponent);
  int8_t codes[kBlock];
  for (size_t i = 0; i < kBlock; ++i) {
    // Integers in place of comparisons of floats, so that compilers vectorize the loop.
    const uint32_t bits = BitsOf(block[i] * inverse), magnitude = std::min(bits & 0x7fffffff, limit);
    const float inside = FromBits(magnitude | (bits & 0x80000000));
    const uint32_t twice = 2 * Format::Doublings(magnitude), negative = 0 - (bits >> 31);
    // In float32 numbers of the size of this one, the last bit stands for 2^doublings. A sum with
    // one is rounded to a multiple of that, which is in its lowest bits.
    const float rounder = FromBits(0x4b400000 + (twice << 22));
    const float sum = inside + rounder;
    codes[i] = static_cast<int8_t>(BitsOf(sum) + ((twice ^ negative) - negative));
    rounded[i] = (sum - rounder) * scale;
  }
  Format::Store(codes, row);
}

// Packs numbers, of which the last block is padded with zeros. `rounded` or `rows` may be null.
template <typename Format>
JDASO_INLINE void PackAll(const float* numbers, size_t size, float* rounded, uint8_t* rows) {
  for (size_t i = 0; i < size; i += kBlock) {
    const size_t count = std::min(kBlock, size - i);
    float block[kBlock] = {}, near[kBlock];
    uint8_t row[Format::kRow];
    std::copy_n(numbers + i, count, block);
    Pack<Format>(block, near, row);
    if (rounded) std::copy_n(near, count, rounded + i);
    if (rows) rows = std::copy_n(row, Format::kRow, rows);
  }
}

JDASO_VECTORIZED
void PackAll(int64_t bits, const float* numbers, size_t size, float* rounded, uint8_t* rows) {
  if (bits == 8) {
    PackAll<Int8>(numbers, size, rounded, rows);
  } else {
    PackAll<Float4>(numbers, size, rounded, rows);
  }
}

template <typename Format>
JDASO_INLINE void Unpack(const uint8_t* row, float* block) {
  const float scale = PowerOfTwo(static_cast<int8_t>(row[0]));
  float integers[kBlock];
  Format::Load(row, integers);
  for (size_t i = 0; i < kBlock; ++i) block[i] = integers[i] * scale;
}

template <typename Format>
JDASO_INLINE void SumAll(const uint8_t* terms, size_t members, size_t rows, float* sums,
                   uint8_t* packed) {
  for (size_t row = 0; row < rows; ++row, sums += kBlock, packed += Format::kRow) {
    float term[kBlock], rounded[kBlock];
    Unpack<Format>(terms + row * Format::kRow, sums);
    for (size_t member = 1; member < members; ++member) {
      Unpack<Format>(terms + (member * rows + row) * Format::kRow, term);
      for (size_t i = 0; i < kBlock; ++i) sums[i] += term[i];
    }
    Pack<Format>(sums, rounded, packed);
  }
}

template <typename Format>
JDASO_INLINE void UnpackAll(const uint8_t* packed, size_t rows, float* numbers) {
  for (size_t row = 0; row < rows; ++row) {
    Unpack<Format>(packed + row * Format::kRow, numbers + row * kBlock);
  }
}

// Whether no number has the exponent of infinity, which NaN has as well.
template <typename Bits>
JDASO_INLINE bool NoneHas(Bits infinity, const void* numbers, size_t size) {
  const auto* bits = static_cast<const Bits*>(numbers);
  Bits found = 0;
  for (size_t i = 0; i < size; ++i) found |= (bits[i] & infinity) == infinity;
  return found == 0;
}

JDASO_VECTORIZED
bool NoneHas(uint64_t infinity, const void* numbers, size_t size, size_t bytes) {
  if (bytes == 2) return NoneHas(static_cast<uint16_t>(infinity), numbers, size);
  if (bytes == 4) return NoneHas(static_cast<uint32_t>(infinity), numbers, size);
  return NoneHas(infinity, numbers, size);
}

// The bits of infinity, or 0 for a type that is not supported.
uint64_t InfinityOf(ffi::DataType type) {
  switch (type) {
    case ffi::F16: return 0x7c00;
    case ffi::BF16: return 0x7f80;
    case ffi::F32: return 0x7f800000;
    case ffi::F64: return uint64_t{0x7ff} << 52;
    default: return 0;
  }
}

// Finds out whether all numbers of each leaf are finite. XLA would need up to five kernels for each.
ffi::Error FiniteLeaves(ffi::RemainingArgs leaves, ffi::Result<ffi::Buffer<ffi::PRED>> finite) {
  for (size_t i = 0; i < leaves.size(); ++i) {
    const auto leaf = *leaves.get<ffi::AnyBuffer>(i);
    const uint64_t infinity = InfinityOf(leaf.element_type());
    if (infinity == 0) return ffi::Error::Internal("leaves must be float16, bfloat16, float32 or float64");
    finite->typed_data()[i] = NoneHas(infinity, leaf.untyped_data(), leaf.element_count(),
                                      ffi::ByteWidth(leaf.element_type()));
  }
  return ffi::Error::Success();
}

// Rounds leaves to numbers that rows of int8 or float4 can hold. For 300 leaves, XLA would compile
// most of a minute.
ffi::Error RoundLeaves(ffi::Buffer<ffi::S32> bits, ffi::RemainingArgs leaves, ffi::RemainingRets rounded) {
  for (size_t i = 0; i < leaves.size(); ++i) {
    const auto leaf = leaves.get<ffi::Buffer<ffi::F32>>(i);
    auto result = rounded.get<ffi::Buffer<ffi::F32>>(i);
    if (!leaf || !result) return ffi::Error::Internal("leaves must be float32");
    PackAll(bits.typed_data()[0], leaf->typed_data(), leaf->element_count(), (*result)->typed_data(), nullptr);
  }
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    jdaso_round, RoundLeaves,
    ffi::Ffi::Bind().Arg<ffi::Buffer<ffi::S32>>().RemainingArgs().RemainingRets());

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    jdaso_finite_leaves, FiniteLeaves, ffi::Ffi::Bind().RemainingArgs().Ret<ffi::Buffer<ffi::PRED>>());

// Rounds to nearest, ties to even. A NaN stays a NaN.
JDASO_VECTORIZED
static void ToBFloat16(const float* from, uint16_t* to, size_t size) {
  for (size_t i = 0; i < size; ++i) {
    const uint32_t bits = BitsOf(from[i]), rounded = bits + 0x7fff + ((bits >> 16) & 1);
    const bool nan = (bits & 0x7fffffff) > 0x7f800000;
    to[i] = static_cast<uint16_t>((nan ? bits | 0x400000 : rounded) >> 16);
  }
}

int64_t WireBytes(int64_t bits, size_t size) {
  if (bits == 16) return size * sizeof(uint16_t);
  return (size + kBlock - 1) / kBlock * (bits == 8 ? Int8::kRow : Float4::kRow);
}

void ToWire(int64_t bits, const float* numbers, size_t size, char* to) {
  if (bits == 16) {
    ToBFloat16(numbers, reinterpret_cast<uint16_t*>(to), size);
  } else {
    PackAll(bits, numbers, size, nullptr, reinterpret_cast<uint8_t*>(to));
  }
}

extern "C" {

// Adds rows of blocks of several members in their order. `packed` receives the rounded sums.
JDASO_VECTORIZED
void jdaso_sum_blocks(int32_t bits, const uint8_t* terms, size_t members, size_t rows, float* sums,
                      uint8_t* packed) {
  if (bits == 8) {
    SumAll<Int8>(terms, members, rows, sums, packed);
  } else {
    SumAll<Float4>(terms, members, rows, sums, packed);
  }
}

JDASO_VECTORIZED
void jdaso_unpack_blocks(int32_t bits, const uint8_t* packed, size_t rows, float* numbers) {
  if (bits == 8) {
    UnpackAll<Int8>(packed, rows, numbers);
  } else {
    UnpackAll<Float4>(packed, rows, numbers);
  }
}

}  // extern "C"

}  // namespace jdaso
