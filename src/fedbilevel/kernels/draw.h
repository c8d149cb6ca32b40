// Random row numbers: the words of jax.random.bits (Threefry-2x32 of 20 rounds, counters partitionable) bit by bit, in one call.
//
// J. Salmon, M. Moraes, R. Dror, D. Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011. XLA would compile its loops
// for every program anew, and run each of the keys that lead to a client's own as a dozen small steps.

#ifndef FEDBILEVEL_KERNELS_DRAW_H_
#define FEDBILEVEL_KERNELS_DRAW_H_

#include <algorithm>
#include <cstdint>

#include "batches.h"

namespace fedbilevel {

constexpr int64_t kWords = 16;  // drawn together
typedef uint32_t Words __attribute__((vector_size(kWords * sizeof(uint32_t))));

// `Word`: one number, or a vector of them. Encrypts the counter (first, second) in place.
template <typename Word>
inline void Threefry(const uint32_t* key, Word& first, Word& second) {
  constexpr int kTurns[2][4] = {{13, 15, 26, 6}, {17, 29, 16, 24}};
  const uint32_t keys[3] = {key[0], key[1], key[0] ^ key[1] ^ 0x1BD11BDAu};
  first += keys[0];
  second += keys[1];
  for (uint32_t group = 0; group < 5; ++group) {
    for (int turn = 0; turn < 4; ++turn) {
      const int by = kTurns[group % 2][turn];
      first += second;
      second = (second << by) | (second >> (32 - by));
      second ^= first;
    }
    first += keys[(group + 1) % 3];
    second += keys[(group + 2) % 3] + group + 1;
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
      Threefry(key, first, second);
      key[0] = first;
      key[1] = second;
    }
    std::copy(key, key + 2, folded[e]);
  }
  return ffi::Error::Success();
}

// key [2], sizes [2] -> rows [n]: words scaled to [0, size), the first `train` of them by the first size.
inline ffi::Error DrawRows(ffi::RemainingArgs operands, ffi::RemainingRets results, int32_t train) {
  const auto operand = [&](size_t k) { return *operands.get<ffi::AnyBuffer>(k); };
  if (operands.size() != 2 || results.size() != 1) {
    return ffi::Error::InvalidArgument("fedbilevel kernel: not the operands of 'draw'");
  }
  const ffi::AnyBuffer result = **results.get<ffi::AnyBuffer>(0);
  const int64_t count = SizeOf(result, 1);
  Batches all(result, 1);
  const auto keys = all.Bind<const uint32_t>("key", operand(0), {2});
  const auto sizes = all.Bind<const int32_t>("sizes", operand(1), {2});
  const auto rows = all.Bind<int32_t>("result", result, {count});
  if (!all.error().empty()) return ffi::Error::InvalidArgument(all.error());
  for (int64_t e = 0; e < all.count(); ++e) {
    const uint32_t* key = keys[e];
    const uint64_t size[2] = {static_cast<uint32_t>(sizes[e][0]), static_cast<uint32_t>(sizes[e][1])};
    int32_t* own = rows[e];
    for (int64_t begin = 0; begin < count; begin += kWords) {
      Words first = {}, second;
      for (int64_t k = 0; k < kWords; ++k) second[k] = static_cast<uint32_t>(begin + k);
      Threefry(key, first, second);
      first ^= second;
      const int64_t here = std::min(kWords, count - begin), split = std::clamp<int64_t>(train - begin, 0, here);
      for (int64_t k = 0; k < split; ++k) own[begin + k] = static_cast<int32_t>((first[k] * size[0]) >> 32);
      for (int64_t k = split; k < here; ++k) own[begin + k] = static_cast<int32_t>((first[k] * size[1]) >> 32);
    }
  }
  return ffi::Error::Success();
}

}  // namespace fedbilevel

#endif  // FEDBILEVEL_KERNELS_DRAW_H_
