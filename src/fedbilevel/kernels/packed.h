// Rows of few numbers and many zeros and ones, such as one-hot tables, in a form that is one cache line instead of several.
//
// A record holds the values of the number columns, then the columns of its ones, and is a whole number of cache lines:
//
//     float numbers[N]; uint16_t ones[U];     twice the columns, so that processors find an entry of a table without a shift; U a
//                                             multiple of eight, at least eight; a row with fewer ones is filled up with twice
//                                             `length`, a column that is zero
//
// Vectors of coefficients become tables by column: the lanes of an entry belong to the queries of one or two points, or to one
// point each. A one of a row is then one addition for all of them.

#ifndef FEDBILEVEL_KERNELS_PACKED_H_
#define FEDBILEVEL_KERNELS_PACKED_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "model.h"
#include "rows.h"
#include "take.h"
#include "whole.h"

namespace fedbilevel {

static_assert(kVectorBytes <= kCacheLine);  // so that records can be read by vectors
constexpr int64_t kRecords = 64;  // of a tile: several links are evaluated at a time, and need not wait for each other
constexpr int kLanes = 4;              // of an entry: directions of two points, then their inner variables
constexpr int kOnes = 8;               // places of ones that are looked at together
typedef float Entry __attribute__((vector_size(kLanes * sizeof(float))));
typedef uint16_t Places __attribute__((vector_size(kOnes * sizeof(uint16_t))));
typedef int16_t Outside __attribute__((vector_size(sizeof(Places))));
typedef uint64_t Halves __attribute__((vector_size(sizeof(Places))));

struct Packed {
  const int32_t* records;
  const int32_t* columns;  // of the numbers
  int64_t words, numbers, ones, length;

  const int32_t* Record(int64_t row) const { return records + row * words; }
  const uint16_t* Ones(const int32_t* record) const { return reinterpret_cast<const uint16_t*>(record + numbers); }

  // Of records: the largest number in each place, and all bits.
  struct Seen {
    Places largest = {}, bits = {};
  };

  void See(const int32_t* record, Seen& seen) const {
    int64_t k = 0;
    do {
      Places own;
      std::memcpy(&own, Ones(record) + k, sizeof(own));
      seen.largest = own > seen.largest ? own : seen.largest;
      seen.bits |= own;
      k += kOnes;
    } while (k < ones);
  }

  // Whether all are columns of the table: asked once for many records.
  bool Inside(const Seen& seen) const {
    const Places odd = seen.bits & 1;
    const Halves outside = reinterpret_cast<Halves>((seen.largest > static_cast<uint16_t>(2 * length)) | reinterpret_cast<Outside>(odd));
    return (outside[0] | outside[1]) == 0;
  }
};

// The entry of a column, by what records say.
template <typename Lanes>
inline Lanes& At(Lanes* table, uint16_t one) {
  using Byte = std::conditional_t<std::is_const_v<Lanes>, const char, char>;
  return *reinterpret_cast<Lanes*>(reinterpret_cast<Byte*>(table) + one * (sizeof(Lanes) / 2));
}

// The dot product of a record with every lane of a table; `leading` holds the table's entries of the number columns.
template <typename Lanes>
inline Lanes Dot(const Packed& packed, const int32_t* record, const Lanes* table, const Lanes* leading) {
  Lanes first = {}, second = {}, third = {}, fourth = {};
  for (int64_t k = 0; k < packed.ones; k += kOnes) {
    const uint16_t* own = packed.Ones(record) + k;
    first += At(table, own[0]) + At(table, own[1]);
    second += At(table, own[2]) + At(table, own[3]);
    third += At(table, own[4]) + At(table, own[5]);
    fourth += At(table, own[6]) + At(table, own[7]);
  }
  const float* values = reinterpret_cast<const float*>(record);
  int64_t k = 0;
  for (; k + 1 < packed.numbers; k += 2) {
    first += leading[k] * values[k];
    second += leading[k + 1] * values[k + 1];
  }
  if (k < packed.numbers) third += leading[k] * values[k];
  return (first + second) + (third + fourth);
}

// Tables of one call: of the queries, of the running sums in two banks (neighbouring rows often share a column, and need not
// wait for each other), of the total of the series, of the number columns' queries, and the sums of these columns, by point.
class PackedSpace {
 public:
  explicit PackedSpace(const Packed& packed)
      : size(packed.length + 1), padded(std::max((packed.numbers + kWidth - 1) / kWidth, int64_t{1}) * kWidth) {
    // Every table begins a cache line.
    const int64_t table = (size * sizeof(Entry) + kCacheLine - 1) / kCacheLine * kCacheLine;
    const int64_t parts[] = {table, table, table, table, packed.numbers * int64_t{sizeof(Entry)},
                             kPoints * padded * int64_t{sizeof(float)}, padded * int64_t{sizeof(float)}};
    int64_t bytes = 0;
    for (int k = 0; k < 7; ++k) {
      places_[k] = bytes;
      bytes += (parts[k] + kCacheLine - 1) / kCacheLine * kCacheLine;
    }
    memory_ = static_cast<char*>(Kept::Own().Of(bytes));
    std::memset(memory_, 0, bytes);
    int32_t* masks = reinterpret_cast<int32_t*>(memory_ + places_[6]);
    std::fill_n(masks, packed.numbers, -1);
  }
  PackedSpace(const PackedSpace&) = delete;
  ~PackedSpace() { Kept::Own().Trim(); }

  Entry* queries() { return entries(0); }
  Entry* bank(int number) { return entries(1 + number); }
  Entry* total() { return entries(3); }
  Entry* leading() { return entries(4); }
  float* sums() { return reinterpret_cast<float*>(memory_ + places_[5]); }

  // Lanes `first` .. of the queries from `count` vectors; the last entry stays zero.
  void Put(int first, int64_t count, const float* vectors) {
    for (int64_t p = 0; p < count; ++p) {
      for (int64_t c = 0; c + 1 < size; ++c) queries()[c][first + p] = vectors[p * (size - 1) + c];
    }
  }

  // All bits of a lane are set where number `first` + lane of a record is one.
  Mask<float> numbers(int64_t first) const {
    Mask<float> mask;
    std::memcpy(&mask, memory_ + places_[6] + first * sizeof(float), sizeof(mask));
    return mask;
  }

  const int64_t size, padded;

 private:
  static constexpr int64_t kWidth = Simd<float>::kWidth;
  Entry* entries(int part) { return reinterpret_cast<Entry*>(memory_ + places_[part]); }
  int64_t places_[7];
  char* memory_;
};

constexpr int64_t kFill = Simd<float>::kWidth > kLanes ? Simd<float>::kWidth : kLanes;
static_assert(kRecords % kFill == 0);

// The next rows, filled up to a multiple of kFill with the first of them, whose factors are then zero.
struct PackedTile {
  const int32_t* records[kRecords];
  int64_t size;
  alignas(64) float dots[kLanes][kRecords];
  alignas(64) float targets[kRecords];
  alignas(64) float factors[kPoints][kRecords];
  alignas(64) int32_t cells[kRecords];
};

// The dot products of four records with every lane of a table, by lane. Each is taken as `Dot` takes it; side by side, the four
// share the entries of the number columns, and loops.
inline __attribute__((noinline)) void FourDots(const Packed& packed, const int32_t* const* records, const Entry* table, const Entry* leading,
                     PackedTile& tile, int64_t place) {
  Entry first[kLanes], second[kLanes], third[kLanes], fourth[kLanes];
#pragma GCC unroll 4
  for (int r = 0; r < kLanes; ++r) {
    const uint16_t* own = packed.Ones(records[r]);
    first[r] = At(table, own[0]) + At(table, own[1]);
    second[r] = At(table, own[2]) + At(table, own[3]);
    third[r] = At(table, own[4]) + At(table, own[5]);
    fourth[r] = At(table, own[6]) + At(table, own[7]);
  }
  for (int64_t k = kOnes; k < packed.ones; k += kOnes) {
#pragma GCC unroll 4
    for (int r = 0; r < kLanes; ++r) {
      const uint16_t* own = packed.Ones(records[r]) + k;
      first[r] += At(table, own[0]) + At(table, own[1]);
      second[r] += At(table, own[2]) + At(table, own[3]);
      third[r] += At(table, own[4]) + At(table, own[5]);
      fourth[r] += At(table, own[6]) + At(table, own[7]);
    }
  }
  const auto value = [&](int r, int64_t k) { return reinterpret_cast<const float*>(records[r])[k]; };
  int64_t k = 0;
  for (; k + 1 < packed.numbers; k += 2) {
#pragma GCC unroll 4
    for (int r = 0; r < kLanes; ++r) {
      first[r] += leading[k] * value(r, k);
      second[r] += leading[k + 1] * value(r, k + 1);
    }
  }
  if (k < packed.numbers) {
#pragma GCC unroll 4
    for (int r = 0; r < kLanes; ++r) third[r] += leading[k] * value(r, k);
  }
  Entry rows[kLanes];
#pragma GCC unroll 4
  for (int r = 0; r < kLanes; ++r) rows[r] = (first[r] + second[r]) + (third[r] + fourth[r]);
  const Entry low = __builtin_shufflevector(rows[0], rows[1], 0, 4, 1, 5);
  const Entry high = __builtin_shufflevector(rows[0], rows[1], 2, 6, 3, 7);
  const Entry next_low = __builtin_shufflevector(rows[2], rows[3], 0, 4, 1, 5);
  const Entry next_high = __builtin_shufflevector(rows[2], rows[3], 2, 6, 3, 7);
  const Entry lanes[kLanes] = {__builtin_shufflevector(low, next_low, 0, 1, 4, 5),
                               __builtin_shufflevector(low, next_low, 2, 3, 6, 7),
                               __builtin_shufflevector(high, next_high, 0, 1, 4, 5),
                               __builtin_shufflevector(high, next_high, 2, 3, 6, 7)};
  for (int lane = 0; lane < kLanes; ++lane) std::memcpy(tile.dots[lane] + place, &lanes[lane], sizeof(Entry));
}

// Calls `use` for every tile of the records that `indices` names, with the dot products of all lanes, unless nobody wants them.
// Without cells every row has a weight of its own; without targets these are zero. False if a cell or a column is out of range.
template <typename Use>
bool VisitRecords(const Packed& packed, const Model<float>& model, const int32_t* indices, int64_t begin, int64_t end,
                  int64_t last, PackedSpace& space, PackedTile& tile, Use use, bool dots = true) {
  constexpr int64_t kLine = kCacheLine / sizeof(int32_t);
  const Entry* table = space.queries();
  Entry* leading = space.leading();
  for (int64_t k = 0; k < packed.numbers; ++k) leading[k] = table[packed.columns[k]];
  const int32_t* cells = model.cells;
  const float* targets = model.targets;
  const int64_t cell_count = model.cell_count;
  for (int64_t first = begin; first < end; first += kRecords) {
    tile.size = std::min(kRecords, end - first);
    const int64_t filled = (tile.size + kFill - 1) / kFill * kFill;
    Packed::Seen seen;
    for (int64_t i = 0; i < tile.size; ++i) {
      const int64_t sample = indices[first + i];
      tile.cells[i] = cells == nullptr ? sample : cells[sample];
      tile.targets[i] = targets == nullptr ? 0 : targets[sample];
      tile.records[i] = packed.Record(sample);
      packed.See(tile.records[i], seen);
    }
    for (int64_t i = tile.size; i < filled; ++i) {
      tile.cells[i] = tile.cells[0];
      tile.targets[i] = 0;
      tile.records[i] = tile.records[0];
    }
    if (!Below(cell_count, tile.cells, filled) || !packed.Inside(seen)) return false;
    const int64_t coming = std::min(last + 1 - first - kRecords, kRecords);
    for (int64_t i = 0; i < tile.size; i += kLanes) {
      // Of the next tile, a few at a time: all at once would wait for each other.
      for (int64_t j = i; j < std::min(i + kLanes, coming); ++j) {
        const int64_t sample = indices[first + kRecords + j];
        const int32_t* record = packed.Record(sample);
        __builtin_prefetch(record);
        for (int64_t w = kLine; w < packed.words; w += kLine) __builtin_prefetch(record + w);
        if (targets != nullptr) __builtin_prefetch(targets + sample);
        if (cells != nullptr) __builtin_prefetch(cells + sample);
      }
      if (dots) FourDots(packed, tile.records + i, table, leading, tile, i);
    }
    use();
  }
  return true;
}

// Entries of a table of one vector: a single instruction, where the compiler has a name for it.
#if defined(__clang__)
constexpr int64_t kLookedUp = 0;
inline Vector<float> LookUp(Vector<float> table, Mask<float>) { return table; }
#else
constexpr int64_t kLookedUp = Simd<float>::kWidth;
inline Vector<float> LookUp(Vector<float> table, Mask<float> places) { return __builtin_shuffle(table, places); }
#endif

// factors[p][i] = weights[p][cell of i] times value(p, i); zero behind the last row.
template <typename Value>
inline void SetFactors(PackedTile& tile, int64_t count, const float* weights, int64_t cell_count, Value value) {
  for (int64_t p = 0; p < count; ++p) {
    alignas(64) float gathered[kRecords];
    const float* own = weights + p * cell_count;
    if (cell_count <= kLookedUp) {
      float few[Simd<float>::kWidth] = {};
      std::copy_n(own, cell_count, few);
      const Vector<float> table = Load(few);
      for (int64_t i = 0; i < tile.size; i += Simd<float>::kWidth) {
        Store(gathered + i, LookUp(table, Load(tile.cells + i)));
      }
    } else {
      for (int64_t i = 0; i < tile.size; ++i) gathered[i] = own[tile.cells[i]];
    }
    for (int64_t i = tile.size; i % kFill != 0; ++i) gathered[i] = 0;
    for (int64_t i = 0; i < tile.size; i += Simd<float>::kWidth) {
      Store(tile.factors[p] + i, value(p, i, Load(gathered + i)));
    }
  }
}

// The numbers of a record, as many as a vector has, and zeros behind the last one.
inline Vector<float> Numbers(const int32_t* record, Mask<float> mask) {
  Mask<float> bits;
  std::memcpy(&bits, record, sizeof(bits));  // a record is a whole number of vectors
  return reinterpret_cast<Vector<float>>(bits & mask);
}

// The banks and the sums of the number columns += factors[p][i] times record i.
inline __attribute__((noinline)) void CombineRecords(const Packed& packed, const PackedTile& tile, int64_t count, PackedSpace& space) {
  constexpr int64_t kWidth = Simd<float>::kWidth;
  const int64_t ones = packed.ones;
  Entry* banks[2] = {space.bank(0), space.bank(1)};
  // The first numbers go along with the ones, which do not wait for them; few tables have more.
  float *sums[kPoints] = {space.sums(), space.sums() + space.padded};
  const Mask<float> mask = space.numbers(0);
  Vector<float> totals[kPoints] = {Load(sums[0]), Load(sums[1])};
  for (int64_t i = 0; i < tile.size; ++i) {
    const Entry factor = {tile.factors[0][i], tile.factors[1][i]};
    const Vector<float> numbers = Numbers(tile.records[i], mask);
    for (int p = 0; p < kPoints; ++p) totals[p] += numbers * tile.factors[p][i];
    Entry* bank = banks[i % 2];
    const uint16_t *own = packed.Ones(tile.records[i]), *end = own + ones;
    do {
      for (int place = 0; place < kOnes; ++place) At(bank, own[place]) += factor;
      own += kOnes;
    } while (own < end);
  }
  for (int p = 0; p < kPoints; ++p) Store(sums[p], totals[p]);
  for (int64_t c = kWidth; c < packed.numbers; c += kWidth) {
    const Mask<float> mask = space.numbers(c);
    for (int p = 0; p < kPoints; ++p) {
      Vector<float> total = Load(sums[p] + c);
      for (int64_t i = 0; i < tile.size; ++i) total += Numbers(tile.records[i] + c, mask) * tile.factors[p][i];
      Store(sums[p] + c, total);
    }
  }
}

// Brings the sums of the number columns into the first bank, and sets them to zero.
inline void JoinNumbers(const Packed& packed, int64_t count, PackedSpace& space) {
  for (int64_t p = 0; p < count; ++p) {
    for (int64_t k = 0; k < packed.numbers; ++k) {
      space.bank(0)[packed.columns[k]][p] += space.sums()[p * space.padded + k];
    }
  }
  std::fill_n(space.sums(), kPoints * space.padded, 0.0f);
}

// One or two points: as `Gradient`.
inline bool PackedGradient(const Packed& packed, const Model<float>& model, const int32_t* indices, int64_t batch,
                           int64_t count, const float* inner, const float* weights, const float* ridge,
                           float* gradients) {
  PackedSpace space(packed);
  space.Put(0, count, inner);
  PackedTile tile = {};
  const bool valid = VisitRecords(packed, model, indices, 0, batch, batch - 1, space, tile, [&] {
    SetFactors(tile, count, weights, model.cell_count, [&](int64_t p, int64_t i, Vector<float> weight) {
      return weight * Slope<float>(model.link, Load(tile.dots[p] + i), Load(tile.targets + i));
    });
    CombineRecords(packed, tile, count, space);
  });
  JoinNumbers(packed, count, space);
  const float share = 1.0f / static_cast<float>(batch);
  for (int64_t p = 0; p < count; ++p) {
    for (int64_t c = 0; c < packed.length; ++c) {
      const float sum = space.bank(0)[c][p] + space.bank(1)[c][p];
      gradients[p * packed.length + c] = sum * share + ridge[p] * space.queries()[c][p];
    }
  }
  return valid;
}

// results[q][i] = record indices[i] . vectors[q] for up to kLanes of them; or, where they are to be summed up, results[q] = sum_i
// vectors[q][i] record indices[i] for up to kPoints. False if a column is out of range.
inline bool PackedProducts(const Packed& packed, int64_t samples, const int32_t* indices, int64_t batch, int64_t count,
                           bool sums, const float* const* vectors, float* const* results) {
  const Model<float> model = {nullptr, nullptr, nullptr, samples, packed.length, samples, kSquared};
  PackedSpace space(packed);
  PackedTile tile = {};
  int64_t done = 0;
  for (int64_t q = 0; q < count && !sums; ++q) space.Put(q, 1, vectors[q]);
  const auto use = [&] {
    for (int64_t q = 0; q < count; ++q) {
      if (sums) std::copy_n(vectors[q] + done, tile.size, tile.factors[q]);
      else std::copy_n(tile.dots[q], tile.size, results[q] + done);
    }
    if (sums) CombineRecords(packed, tile, count, space);
    done += tile.size;
  };
  const bool valid = VisitRecords(packed, model, indices, 0, batch, batch - 1, space, tile, use, !sums);
  if (!sums) return valid;
  JoinNumbers(packed, count, space);
  for (int64_t q = 0; q < count; ++q) {
    for (int64_t c = 0; c < packed.length; ++c) results[q][c] = space.bank(0)[c][q] + space.bank(1)[c][q];
  }
  return valid;
}

// One or two points: as `Neumann`.
inline bool PackedNeumann(const Packed& packed, const Model<float>& model, const int32_t* indices, int64_t batches,
                          int64_t batch, int64_t count, const float* inner, const float* vectors, const float* weights,
                          const float* ridge, const float* step, float* solutions, float* cell_products) {
  PackedSpace space(packed);
  space.Put(0, count, vectors);
  space.Put(kPoints, count, inner);
  Entry *table = space.queries(), *total = space.total();
  std::copy_n(table, space.size, total);
  Entry steps = {}, ridges = {};  // the lanes of the inner variables stay zero: these do not move
  for (int64_t p = 0; p < count; ++p) {
    steps[p] = step[p];
    ridges[p] = ridge[p];
  }
  constexpr int64_t kWidth = Simd<float>::kWidth;
  Vector<float> wide_steps, wide_ridges;
  for (int lane = 0; lane < kWidth; ++lane) {
    wide_steps[lane] = steps[lane % kLanes];
    wide_ridges[lane] = ridges[lane % kLanes];
  }
  const float share = 1.0f / static_cast<float>(batch);
  const int64_t last = batches * batch - 1;
  PackedTile tile = {};
  Model<float> untold = model;  // a curvature does not depend on the target
  untold.targets = nullptr;
  bool valid = true;
  for (int64_t j = 0; j + 1 < batches && valid; ++j) {
    valid &= VisitRecords(packed, untold, indices, j * batch, (j + 1) * batch, last, space, tile, [&] {
      SetFactors(tile, count, weights, model.cell_count, [&](int64_t p, int64_t i, Vector<float> weight) {
        const Vector<float> weighted = weight * Load(tile.dots[p] + i);
        return model.link == kLogistic ? weighted * Curvature<float>(Load(tile.dots[kPoints + p] + i)) : weighted;
      });
      CombineRecords(packed, tile, count, space);
    });
    JoinNumbers(packed, count, space);
    float *first = reinterpret_cast<float*>(space.bank(0)), *second = reinterpret_cast<float*>(space.bank(1));
    float *moved = reinterpret_cast<float*>(table), *summed = reinterpret_cast<float*>(total);
    int64_t c = 0;  // several entries at a time, then one: behind the last column is the one that stays zero
    for (; c + kWidth <= packed.length * kLanes; c += kWidth) {
      Vector<float> query = Load(moved + c);
      query -= wide_steps * ((Load(first + c) + Load(second + c)) * share + wide_ridges * query);
      Store(first + c, Vector<float>{});
      Store(second + c, Vector<float>{});
      Store(moved + c, query);
      Store(summed + c, Load(summed + c) + query);
    }
    const int64_t done = c;
    for (c /= kLanes; c < packed.length; ++c) {
      table[c] -= steps * ((space.bank(0)[c] + space.bank(1)[c]) * share + ridges * table[c]);
      total[c] += table[c];
    }
    std::fill(first + done, first + space.size * kLanes, 0.0f);
    std::fill(second + done, second + space.size * kLanes, 0.0f);
  }
  for (int64_t p = 0; p < count; ++p) {
    for (int64_t c = 0; c < packed.length; ++c) {
      table[c][p] = solutions[p * packed.length + c] = total[c][p] * step[p];
    }
  }
  std::fill_n(cell_products, count * model.cell_count, 0.0f);
  valid &= VisitRecords(packed, model, indices, (batches - 1) * batch, batches * batch, last, space, tile, [&] {
    for (int64_t p = 0; p < count; ++p) {
      for (int64_t i = 0; i < tile.size; i += Simd<float>::kWidth) {
        const auto slope = Slope<float>(model.link, Load(tile.dots[kPoints + p] + i), Load(tile.targets + i));
        Store(tile.factors[p] + i, share * slope * Load(tile.dots[p] + i));
      }
      float* sums = cell_products + p * model.cell_count;
      for (int64_t i = 0; i < tile.size; ++i) sums[tile.cells[i]] += tile.factors[p][i];
    }
  });
  return valid;
}

// Records written out as the rows that they were, as many at a time as a tile has: these stay in the first cache, and whoever
// computes with them gets the bits that full rows give.
class Unpacked {
 public:
  Unpacked(const Packed& packed, int64_t start)
      : packed_(packed), start_(start), stride_(packed.length / kWidth + 1), rows_(kTile * stride_), ones_(kTile, nullptr) {}

  // Row `position`; it is overwritten by the one a tile later.
  const float* operator[](int64_t position) {
    const int64_t place = position % kTile;
    const int32_t* record = packed_.Record(start_ + position);
    float* row = reinterpret_cast<float*>(rows_.data() + place * stride_);
    Packed::Seen seen;
    packed_.See(record, seen);
    inside_ &= packed_.Inside(seen);
    if (!inside_) return row;
    const uint16_t *own = packed_.Ones(record), *before = ones_[place];
    const float* values = reinterpret_cast<const float*>(record);
    const int32_t* columns = packed_.columns;
    for (int64_t k = 0, count = before == nullptr ? 0 : packed_.ones; k < count; k += kOnes) {
      for (int one = 0; one < kOnes; ++one) At(row, before[k + one]) = 0;
    }
    for (int64_t k = 0, count = packed_.ones; k < count; k += kOnes) {
      for (int one = 0; one < kOnes; ++one) At(row, own[k + one]) = 1;
    }
    for (int64_t k = 0, count = packed_.numbers; k < count; ++k) row[columns[k]] = values[k];
    ones_[place] = own;
    return row;
  }

  // Whether every column that a record named was in the table.
  bool inside() const { return inside_; }

 private:
  static constexpr int64_t kWidth = Simd<float>::kWidth;
  const Packed packed_;
  int64_t start_, stride_;
  std::vector<Vector<float>> rows_;  // each with a place behind its last column, for ones that fill up a record
  std::vector<const uint16_t*> ones_;
  bool inside_ = true;
};

// Log losses by group of up to as many points as a vector has lanes, as `LossesOver`. The rows are `start` .. of the records.
inline bool PackedLosses(const Packed& packed, const WholeSet<float>& set, int64_t start,
                         const WholePoint<float>* points, int64_t count) {
  using Lanes = Vector<float>;
  constexpr int64_t kWidth = Simd<float>::kWidth;
  constexpr int64_t kProducts = 15;  // of kFactors factors each: their product stays below the largest double
  const int64_t groups = set.group_count;
  std::vector<Lanes> table(packed.length + 1), leading(packed.numbers), plain(groups), product(groups);
  for (int64_t p = 0; p < count; ++p) {
    for (int64_t c = 0; c < packed.length; ++c) table[c][p] = points[p].inner[c];
  }
  for (int64_t k = 0; k < packed.numbers; ++k) leading[k] = table[packed.columns[k]];
  std::vector<double> totals(groups * kWidth, 0.0), products(groups * kWidth, 1.0);
  std::vector<int64_t> rows(groups, 0);
  const auto clear = [&] {
    std::fill(plain.begin(), plain.end(), Lanes{});
    std::fill(product.begin(), product.end(), Broadcast(1.0f));
  };
  clear();
  bool valid = true;
  for (int64_t first = 0; first < set.rows; first += kFactors) {
    const int64_t end = std::min(set.rows, first + kFactors);
    for (int64_t i = first; i < end; ++i) {
      const int32_t* record = packed.Record(start + i);
      const int32_t group = set.groups[i];
      Packed::Seen seen;
      packed.See(record, seen);
      const bool inside = static_cast<uint32_t>(group) < static_cast<uint64_t>(groups) && packed.Inside(seen);
      valid &= inside;
      if (!inside) continue;
      const Lanes z = Dot(packed, record, table.data(), leading.data());
      plain[group] += (z < 0.0f ? Lanes{} : z) - set.labels[i] * z;
      product[group] *= 1.0f + ExpOfNegative<float>(z < 0.0f ? z : -z);
      rows[group] += 1;
    }
    const bool settle = first / kFactors % kProducts == kProducts - 1 || end == set.rows;
    for (int64_t g = 0; g < groups; ++g) {
      for (int64_t p = 0; p < kWidth; ++p) {
        double& total = totals[g * kWidth + p];
        double& factor = products[g * kWidth + p];
        total += plain[g][p];
        factor *= product[g][p];
        if (!settle) continue;
        total += p < count ? std::log(factor) : 0;
        factor = 1;
      }
    }
    clear();
  }
  for (int64_t p = 0; p < count; ++p) {
    for (int64_t g = 0; g < groups; ++g) {
      points[p].losses[g] = static_cast<float>(totals[g * kWidth + p]);
      points[p].counts[g] = static_cast<float>(rows[g]);
    }
  }
  return valid;
}

}  // namespace fedbilevel

#endif  // FEDBILEVEL_KERNELS_PACKED_H_
