// Rows of any type copied where a minibatch names them: what a general loss needs before it can be evaluated.
//
// A compiler that gathers element by element spends longer on this than on the products that follow.

#ifndef FEDBILEVEL_KERNELS_TAKE_H_
#define FEDBILEVEL_KERNELS_TAKE_H_

#include <cstdint>
#include <cstring>

namespace fedbilevel {

constexpr int64_t kTakeAhead = 8;         // rows between asking for a row and copying it
constexpr int64_t kTakePrefetch = 4096;  // bytes of a row to ask for; the hardware sees the rest of a longer one coming
constexpr int64_t kCacheLine = 64;

// False if an index is out of range; nothing is then read for it.
inline bool Take(const char* rows, int64_t samples, int64_t bytes, const int32_t* indices, int64_t count, char* out) {
  const int64_t asked = bytes < kTakePrefetch ? bytes : kTakePrefetch;
  for (int64_t i = 0; i < count; ++i) {
    if (static_cast<uint32_t>(indices[i]) >= static_cast<uint64_t>(samples)) return false;
    if (i + kTakeAhead < count) {
      // A wrong index is found when its turn comes; asking for an address never faults.
      const char* coming = rows + indices[i + kTakeAhead] * bytes;
      for (int64_t c = 0; c < asked; c += kCacheLine) __builtin_prefetch(coming + c);
    }
    std::memcpy(out + i * bytes, rows + indices[i] * bytes, bytes);
  }
  return true;
}

}  // namespace fedbilevel

#endif  // FEDBILEVEL_KERNELS_TAKE_H_
