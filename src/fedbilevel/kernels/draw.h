// Random row numbers: the words of jax.random.bits (Threefry-2x32 of 20 rounds, counters partitionable) bit by bit, in one call.
//
// J. Salmon, M. Moraes, R. Dror, D. Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011. XLA would compile its loops
// for every program anew, and run each of the keys that lead to a client's own as a dozen small steps.

#ifndef FEDBILEVEL_KERNELS_DRAW_H_
#define FEDBILEVEL_KERNELS_DRAW_H_

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "batches.h"
#include "rows.h"

namespace fedbilevel {

typedef uint32_t Words __attribute__((vector_size(kVectorBytes)));
constexpr int64_t kWide = kVectorBytes / sizeof(uint32_t);
constexpr int kChains = 4;  // drawn side by side: each turn of a word waits for the turn before
constexpr int64_t kWords = kChains * kWide;

// Four turns, by so many bits each, and the keys that follow them. The bits are known when this is compiled: a vector is then
// turned by one instruction, and all of them stay in registers.
template <int kCount, int... kBits, typename Word>
inline __attribute__((always_inline)) void FourTurns(const uint32_t* keys, uint32_t group, Word* first, Word* second) {
  const auto turn = [&](auto by) __attribute__((always_inline)) {
    constexpr int kBy = decltype(by)::value;
#pragma GCC unroll 8
    for (int c = 0; c < kCount; ++c) {
      first[c] += second[c];
      second[c] = ((second[c] << kBy) | (second[c] >> (32 - kBy))) ^ first[c];
    }
  };
  (turn(std::integral_constant<int, kBits>()), ...);
#pragma GCC unroll 8
  for (int c = 0; c < kCount; ++c) {
    first[c] += keys[group % 3];
    second[c] += keys[(group + 1) % 3] + group;
  }
}

// `Word`: one number, or a vector of them. Encrypts the counters (first, second) in place.
template <int kCount, typename Word>
inline void Threefry(const uint32_t* key, Word* first, Word* second) {
  const uint32_t keys[3] = {key[0], key[1], key[0] ^ key[1] ^ 0x1BD11BDAu};
  Word left[kCount], right[kCount];
#pragma GCC unroll 8
  for (int c = 0; c < kCount; ++c) {
    left[c] = first[c] + keys[0];
    right[c] = second[c] + keys[1];
  }
  FourTurns<kCount, 13, 15, 26, 6>(keys, 1, left, right);
  FourTurns<kCount, 17, 29, 16, 24>(keys, 2, left, right);
  FourTurns<kCount, 13, 15, 26, 6>(keys, 3, left, right);
  FourTurns<kCount, 17, 29, 16, 24>(keys, 4, left, right);
  FourTurns<kCount, 13, 15, 26, 6>(keys, 5, left, right);
#pragma GCC unroll 8
  for (int c = 0; c < kCount; ++c) {
    first[c] = left[c];
    second[c] = right[c];
  }
}

// key [2], numbers [F] -> key [2]: each number folded in after the other.
inline ffi::Error FoldIn(ffi::RemainingArgs operands, ffi::RemainingRets results) {
  const auto operand = [&](size_t k) { return *operands.get<ffi::AnyBuffer>(k); };
  if (operands.size() != 2 || results.size() != 1) {
    return ffi::Error::InvalidArgument("fedbilevel kernel: not the operands of 'fold'");
  }
  const ffi::AnyBuffer result = **results.get<ffi::AnyBuffer>(0);
  const int64_t count = SizeOf(operand(1), 1);
  Batches all(result, 1);
  const auto keys = all.Bind<const uint32_t>("key", operand(0), {2});
  const auto numbers = all.Bind<const uint32_t>("numbers", operand(1), {count});
  const auto folded = all.Bind<uint32_t>("result", result, {2});
  if (!all.error().empty()) return ffi::Error::InvalidArgument(all.error());
  for (int64_t e = 0; e < all.count(); ++e) {
    uint32_t key[2] = {keys[e][0], keys[e][1]};
    for (int64_t k = 0; k < count; ++k) {
      uint32_t first = 0, second = numbers[e][k];
      Threefry<1>(key, &first, &second);
      key[0] = first;
      key[1] = second;
    }
    std::copy(key, key + 2, folded[e]);
  }
  return ffi::Error::Success();
}

// key [2], sizes [2], number [] -> the row numbers of step `number` of so many `steps`, in pieces of any shape; the first
// `train_pieces` of them are below the first size, the others below the second. A client's words of a round are those of the
// training rows of all its steps, then those of the validation rows.
inline ffi::Error DrawRows(ffi::RemainingArgs operands, ffi::RemainingRets results, int32_t steps, int32_t train_pieces) {
  const auto operand = [&](size_t k) { return *operands.get<ffi::AnyBuffer>(k); };
  const int64_t pieces = results.size();
  if (operands.size() != 3 || pieces < 1 || train_pieces < 0 || train_pieces > pieces) {
    return ffi::Error::InvalidArgument("fedbilevel kernel: not the operands of 'draw'");
  }
  // The batch dimensions are those of any operand: the results' own dimensions are none of this kernel's business.
  const size_t rank = operand(0).dimensions().size() - 1;
  std::vector<Operand<int32_t>> rows;
  std::vector<int64_t> sizes_of;
  Batches all((**results.get<ffi::AnyBuffer>(0)), (**results.get<ffi::AnyBuffer>(0)).dimensions().size() - rank);
  const auto keys = all.Bind<const uint32_t>("key", operand(0), {2});
  const auto sizes = all.Bind<const int32_t>("sizes", operand(1), {2});
  const auto numbers = all.Bind<const int32_t>("number", operand(2), {});
  int64_t counts[2] = {0, 0};
  for (int64_t k = 0; k < pieces; ++k) {
    const ffi::AnyBuffer result = **results.get<ffi::AnyBuffer>(k);
    Sizes own;
    if (result.dimensions().size() >= rank) own.assign(result.dimensions().begin() + rank, result.dimensions().end());
    rows.push_back(all.Bind<int32_t>("result", result, own));
    int64_t size = 1;
    for (size_t d = 0; d < own.size(); ++d) size *= own[d];
    sizes_of.push_back(size);
    counts[k < train_pieces ? 0 : 1] += size;
  }
  if (!all.error().empty()) return ffi::Error::InvalidArgument(all.error());
  Words places;
  for (int64_t k = 0; k < kWide; ++k) places[k] = k;
  for (int64_t e = 0; e < all.count(); ++e) {
    const int64_t number = *numbers[e], first[2] = {number * counts[0], steps * counts[0] + number * counts[1]};
    int64_t piece = 0, place = 0;
    for (int part = 0; part < 2; ++part) {
      const uint64_t size = static_cast<uint32_t>(sizes[e][part]);
      for (int64_t begin = 0; begin < counts[part]; begin += kWords) {
        Words high[kChains] = {}, low[kChains];
        for (int c = 0; c < kChains; ++c) low[c] = places + static_cast<uint32_t>(first[part] + begin + c * kWide);
        Threefry<kChains>(keys[e], high, low);
        for (int c = 0; c < kChains; ++c) high[c] ^= low[c];
        uint32_t words[kWords];
        int32_t drawn[kWords];
        std::memcpy(words, high, sizeof(words));
        for (int64_t k = 0; k < kWords; ++k) drawn[k] = static_cast<int32_t>((words[k] * size) >> 32);
        for (int64_t k = 0, here = std::min(kWords, counts[part] - begin); k < here;) {
          const int64_t fitting = std::min(here - k, sizes_of[piece] - place);
          std::copy_n(drawn + k, fitting, rows[piece][e] + place);
          k += fitting;
          place += fitting;
          if (place == sizes_of[piece]) {
            ++piece;
            place = 0;
          }
        }
      }
    }
  }
  return ffi::Error::Success();
}

}  // namespace fedbilevel

#endif  // FEDBILEVEL_KERNELS_DRAW_H_
