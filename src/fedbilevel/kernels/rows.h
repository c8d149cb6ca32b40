// Rows of a feature matrix, read where they lie: dot products with several vectors and weighted sums.
//
// Vectors are the compiler's own (GCC 12 and later, Clang), so that the code follows the machine it is built on.

#ifndef FEDBILEVEL_KERNELS_ROWS_H_
#define FEDBILEVEL_KERNELS_ROWS_H_

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

namespace fedbilevel {

#if defined(FEDBILEVEL_VECTOR_BYTES)  // for tests of other widths than the machine's own
constexpr int kVectorBytes = FEDBILEVEL_VECTOR_BYTES;
#elif defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

constexpr int kSums = 8;     // running sums held in registers: as many as it takes to hide the latency of multiply-add
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kMostSums = 16;  // with 32 registers: a query that is loaded serves more rows
#else
constexpr int kMostSums = kSums;
#endif
constexpr int kTile = 16;    // rows between two evaluations of the link, at most; a multiple of kSums and of any width
constexpr int kPoints = 2;   // points treated together
constexpr int64_t kTileBytes = 16 << 10;     // rows of a tile: leaves room in the first cache for the rows that come
constexpr int64_t kSecondCache = 256 << 10;  // where even kSums rows do not fit here, tiles are as high as they can be
constexpr int64_t kBlock = 512;  // vectors of a row before the next row: bounds the working set of very long rows
constexpr int64_t kAhead = 8;    // rows between asking for a row and using it; 4 to 48 were tried, 8 and 16 are best
static_assert(kTile % kSums == 0 && kTile * sizeof(float) >= kVectorBytes);

template <typename T>
struct Simd {
  using Bits = std::conditional_t<sizeof(T) == 4, int32_t, int64_t>;
  static constexpr int kWidth = kVectorBytes / sizeof(T);
  typedef T Vector __attribute__((vector_size(kVectorBytes)));
  typedef Bits Mask __attribute__((vector_size(kVectorBytes)));
};

template <typename T>
using Vector = typename Simd<T>::Vector;
template <typename T>
using Mask = typename Simd<T>::Mask;

template <typename T>
inline Vector<T> Load(const T* from) {
  Vector<T> value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

template <typename T>
inline void Store(T* to, Vector<T> value) {
  std::memcpy(to, &value, sizeof(value));
}

template <typename T>
inline Vector<T> Broadcast(T value) {
  return value - Vector<T>{};
}

// Whether all indices lie in [0, samples).
inline bool Below(int64_t samples, const int32_t* indices, int64_t count) {
  constexpr int64_t kWidth = Simd<uint32_t>::kWidth;
  const uint32_t* words = reinterpret_cast<const uint32_t*>(indices);  // negative numbers are large ones
  Vector<uint32_t> largest = {};
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) {
    const Vector<uint32_t> own = Load(words + i);
    largest = own > largest ? own : largest;
  }
  uint32_t most = 0;
  for (; i < count; ++i) most = std::max(most, words[i]);
  for (int64_t lane = 0; lane < kWidth; ++lane) most = std::max<uint32_t>(most, largest[lane]);
  return count == 0 || most < samples;
}

// Holds a loaded vector in a register: GCC prefers to load it again for every use, and loads are what is scarce.
template <typename V>
inline void Hold(V& value) {
#if defined(FEDBILEVEL_VECTOR_BYTES)
  static_cast<void>(value);  // may be wider than a register
#elif defined(__AVX512F__)
  asm("" : "+v"(value));
#elif defined(__x86_64__)
  asm("" : "+x"(value));
#elif defined(__aarch64__)
  asm("" : "+w"(value));
#endif
}

// ---- sums of eight vectors ------------------------------------------------------------------------------------------

// One level of the tree that turns vectors into their sums, by shuffles that are one instruction each. Neighbouring
// lanes are added within blocks of 16 bytes, and the sums of `a` and of `b` share each block; once a block holds one
// sum of each vector, whole blocks are added in the same way.
template <typename T, int kSize, int... kLane>
inline Vector<T> Fold(Vector<T> a, Vector<T> b, std::integer_sequence<int, kLane...>) {
  constexpr int kWidth = Simd<T>::kWidth;
  constexpr int kLanes = 16 / sizeof(T);
  constexpr int kRun = kSize < kLanes ? 1 : kSize;            // lanes that stay together
  constexpr int kRange = kSize < kLanes ? kLanes : 2 * kSize;  // lanes that change places
  constexpr auto lane = [](int k, int odd) {
    const int place = k % kRange, half = kRange / 2;
    return k / kRange * kRange + place / half * kWidth + place % half / kRun * 2 * kRun + place % kRun + odd * kRun;
  };
  return __builtin_shufflevector(a, b, lane(kLane, 0)...) + __builtin_shufflevector(a, b, lane(kLane, 1)...);
}

// sums[k] = the sum of the lanes of partial[k], for kCount of them already folded to kSize different vectors each.
template <typename T, int kSize, int kCount>
inline void Sums(const Vector<T>* partial, T* sums) {
  constexpr int kWidth = Simd<T>::kWidth;
  if constexpr (kSize == kWidth) {
    for (int k = 0; k < kCount; ++k) Store(sums + k * kWidth, partial[k]);
  } else if constexpr (kCount == 1) {
    T lanes[kWidth];
    Store(lanes, partial[0]);
    for (int k = 0; k < kSize; ++k) {
      sums[k] = lanes[k];
      for (int half = kSize; half < kWidth; half += kSize) sums[k] += lanes[half + k];
    }
  } else {
    Vector<T> folded[kCount / 2];
    for (int k = 0; k < kCount / 2; ++k) {
      folded[k] = Fold<T, kSize>(partial[2 * k], partial[2 * k + 1], std::make_integer_sequence<int, kWidth>());
    }
    Sums<T, 2 * kSize, kCount / 2>(folded, sums);
  }
}

// ---- rows -----------------------------------------------------------------------------------------------------------

// How a row of `length` numbers is cut into vectors: `full` whole ones, then the rest at the upper end of one more. The
// rest is read together with the numbers before it, which are then masked, so nothing outside the row is touched.
template <typename T>
struct Shape {
  explicit Shape(int64_t length) : length(length), full(length / kWidth), rest(length % kWidth) {
    for (int lane = 0; lane < kWidth; ++lane) mask[lane] = lane >= kWidth - rest ? -1 : 0;
  }

  int64_t padded() const { return (full + (rest > 0)) * kWidth; }

  Vector<T> Rest(const T* row) const {
    if (full > 0) {
      return reinterpret_cast<Vector<T>>(reinterpret_cast<Mask<T>>(Load(row + length - kWidth)) & mask);
    }
    T lanes[kWidth] = {};
    std::copy(row, row + length, lanes + kWidth - length);
    return Load(lanes);
  }

  void Pack(const T* from, T* to) const {
    std::copy(from, from + full * kWidth, to);
    if (rest > 0) Store(to + full * kWidth, Rest(from));
  }

  void Unpack(const T* from, T* to) const {
    std::copy(from, from + full * kWidth, to);
    std::copy(from + padded() - rest, from + padded(), to + full * kWidth);
  }

  static constexpr int64_t kWidth = Simd<T>::kWidth;
  int64_t length, full, rest;
  Mask<T> mask;
};

// A run of minibatches: the rows that `indices` names, in order; without indices all rows from first to last.
template <typename T>
struct Rows {
  const T* operator[](int64_t position) const {
    const int64_t place = std::min(position, count - 1);
    return features + (indices == nullptr ? place : indices[place]) * length;
  }

  const T* features;
  const int32_t* indices;
  int64_t count, length;
};

template <typename T>
struct alignas(64) Tile {
  const T* rows[kTile];  // padded to a multiple of kSums with rows of zeros
  int64_t first, size;   // position in the run, rows without padding
  T dots[2 * kPoints][kTile];
  int32_t cells[kTile];
  T targets[kTile];
  T factors[kPoints][kTile];
};

// dots[q][i] = rows[i] . queries[q], for `kQueries` packed vectors. `kScattered`: rows lie anywhere and are asked for ahead;
// otherwise one after the other, which the hardware sees by itself.
template <typename T, int kQueries, bool kScattered = true>
__attribute__((noinline)) void Dots(const Shape<T>& shape, const Rows<T>& run, const T* const* queries, Tile<T>& tile) {
  constexpr int kHeld = kQueries == 4 ? kMostSums : kSums;
  constexpr int kGroup = kHeld / kQueries;
  constexpr int64_t kWidth = Simd<T>::kWidth;
  int64_t begin = 0;
  do {
    const int64_t end = std::min(shape.full, begin + kBlock);
    for (int64_t first = 0; first < tile.size; first += kGroup) {
      const T *rows[kGroup], *coming[kGroup];
      const T* query[kQueries];
      for (int r = 0; r < kGroup; ++r) {
        rows[r] = tile.rows[first + r];
        // The hardware sees a long row coming; asking for a later row would drive it out of the cache again.
        coming[r] = shape.full > kBlock ? rows[r] : run[tile.first + first + r + kAhead];
      }
      for (int q = 0; q < kQueries; ++q) query[q] = queries[q];
      Vector<T> sums[kHeld] = {};
      for (int64_t c = begin * kWidth; c < end * kWidth; c += kWidth) {
        Vector<T> values[kQueries];
        for (int q = 0; q < kQueries; ++q) {
          values[q] = Load(query[q] + c);
          Hold(values[q]);
        }
        for (int r = 0; r < kGroup; ++r) {
          if constexpr (kScattered) __builtin_prefetch(coming[r] + c);
          Vector<T> row = Load(rows[r] + c);
          Hold(row);
          for (int q = 0; q < kQueries; ++q) sums[q * kGroup + r] += row * values[q];
        }
      }
      if (end == shape.full && shape.rest > 0) {
        for (int r = 0; r < kGroup; ++r) {
          if constexpr (kScattered) __builtin_prefetch(coming[r] + shape.length - 1);
          const Vector<T> row = shape.Rest(rows[r]);
          for (int q = 0; q < kQueries; ++q) sums[q * kGroup + r] += row * Load(query[q] + shape.full * kWidth);
        }
      }
      T totals[kHeld];
      Sums<T, 1, kHeld>(sums, totals);
      if (begin > 0) {
        for (int k = 0; k < kHeld; ++k) totals[k] += tile.dots[k / kGroup][first + k % kGroup];
      }
      for (int q = 0; q < kQueries; ++q) std::memcpy(tile.dots[q] + first, totals + q * kGroup, kGroup * sizeof(T));
    }
    begin = end;
  } while (begin < shape.full);
}

// results[p] += sum_i factors[p][i] rows[i], for `kCount` packed vectors.
template <typename T, int kCount>
__attribute__((noinline)) void Combine(const Shape<T>& shape, const Tile<T>& tile, T* const* results) {
  constexpr int kGroup = kSums / kCount;
  constexpr int64_t kWidth = Simd<T>::kWidth;
  int64_t begin = 0;
  do {
    const int64_t end = std::min(shape.full, begin + kBlock);
    for (int64_t first = 0; first < tile.size; first += kGroup) {
      const T* rows[kGroup];
      T* sums[kCount];
      Vector<T> factors[kCount][kGroup];
      for (int r = 0; r < kGroup; ++r) rows[r] = tile.rows[first + r];
      for (int p = 0; p < kCount; ++p) {
        for (int r = 0; r < kGroup; ++r) factors[p][r] = Broadcast(tile.factors[p][first + r]);
      }
      for (int p = 0; p < kCount; ++p) sums[p] = results[p];
      const auto add = [&](int64_t c, auto load) __attribute__((always_inline)) {
        Vector<T> values[kCount];
        for (int p = 0; p < kCount; ++p) values[p] = Load(sums[p] + c);
        for (int r = 0; r < kGroup; ++r) {
          Vector<T> row = load(rows[r]);
          Hold(row);
          for (int p = 0; p < kCount; ++p) values[p] += row * factors[p][r];
        }
        for (int p = 0; p < kCount; ++p) Store(sums[p] + c, values[p]);
      };
      for (int64_t c = begin * kWidth; c < end * kWidth; c += kWidth) {
        add(c, [c](const T* row) { return Load(row + c); });
      }
      if (end == shape.full && shape.rest > 0) {
        add(shape.full * kWidth, [&shape](const T* row) { return shape.Rest(row); });
      }
    }
    begin = end;
  } while (begin < shape.full);
}

}  // namespace fedbilevel

#endif  // FEDBILEVEL_KERNELS_ROWS_H_
