// The kernels of model.h for rows so long that a minibatch leaves the caches: what counts is how often memory is read.
//
// Columns are treated in blocks.  The pass that takes a block of the directions past one factor of the series also takes the
// products of that block with the rows of the next one, while it is in the cache: a factor reads its rows twice, and each y and
// each direction once.  Nothing is packed or copied; the sums are built where the solutions belong.

#ifndef FEDBILEVEL_KERNELS_LONG_H_
#define FEDBILEVEL_KERNELS_LONG_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "model.h"
#include "rows.h"

namespace fedbilevel {

constexpr int64_t kLongBytes = 4 << 20;   // rows of a minibatch and vectors beside them that no longer stay in the caches
constexpr int64_t kLongBlock = 32 << 10;  // bytes of a row before the next row
constexpr int kLongRows = 4;              // rows treated together
constexpr int64_t kLongAhead = 1024;      // bytes between asking for a number and using it: the hardware stops at every page

template <typename T>
inline Vector<T> LoadAhead(const T* from) {
  __builtin_prefetch(reinterpret_cast<const char*>(from) + kLongAhead);
  return Load(from);
}

template <typename T>
inline bool IsLong(int64_t batch, int64_t length) {
  return (batch + 3 * kPoints) * length * static_cast<int64_t>(sizeof(T)) > kLongBytes;
}

// One minibatch: its rows, and what the points make of them.  Its last row fills a group up, with the factor zero.
template <typename T>
struct LongBatch {
  int64_t size;
  std::vector<const T*> rows;
  std::vector<int32_t> cells;
  std::vector<double> dots[2 * kPoints];  // directions or sums first, then y
  std::vector<T> factors[kPoints];

  explicit LongBatch(int64_t size) : size(size), rows((size + kLongRows - 1) / kLongRows * kLongRows), cells(size) {
    for (auto& each : dots) each.resize(rows.size());
    for (auto& each : factors) each.resize(rows.size());
  }

  void Clear() {
    for (auto& each : dots) std::fill(each.begin(), each.end(), 0.0);
  }

  // False if an index is out of range.
  bool Point(const T* features, int64_t samples, int64_t length, const int32_t* indices) {
    for (int64_t i = 0; i < size; ++i) {
      if (static_cast<uint32_t>(indices[i]) >= static_cast<uint64_t>(samples)) return false;
      rows[i] = features + indices[i] * length;
    }
    std::fill(rows.begin() + size, rows.end(), rows[size - 1]);
    return true;
  }

  // False if a cell is out of range (it is then replaced).
  bool Fill(const Model<T>& model, const int32_t* indices) {
    bool valid = Point(model.features, model.samples, model.length, indices);
    for (int64_t i = 0; i < size; ++i) {
      const int32_t cell = model.cells[indices[i]];
      const bool inside = static_cast<uint32_t>(cell) < static_cast<uint64_t>(model.cell_count);
      valid &= inside;
      cells[i] = inside ? cell : 0;
    }
    Clear();
    return valid;
  }
};

// dots[q][i] += rows[i] . queries[q] over the columns [begin, end).  The first `kNear` queries are in the cache already.
template <typename T, int kQueries, int kNear = kQueries / 2>
__attribute__((noinline)) void LongDots(LongBatch<T>& batch, const T* const* queries, int64_t begin, int64_t end) {
  constexpr int64_t kWidth = Simd<T>::kWidth;
  constexpr int kRows = kMostSums / 4 < kLongRows ? kMostSums / 4 : kLongRows;
  for (size_t first = 0; first < batch.rows.size(); first += kRows) {
    const T* const* rows = batch.rows.data() + first;
    Vector<T> sums[kQueries][kRows] = {};
    int64_t c = begin;
    for (; c + kWidth <= end; c += kWidth) {
      Vector<T> values[kQueries];
      for (int q = 0; q < kQueries; ++q) {
        values[q] = q < kNear ? Load(queries[q] + c) : LoadAhead(queries[q] + c);
        Hold(values[q]);
      }
      for (int r = 0; r < kRows; ++r) {
        Vector<T> row = LoadAhead(rows[r] + c);
        Hold(row);
        for (int q = 0; q < kQueries; ++q) sums[q][r] += row * values[q];
      }
    }
    for (int q = 0; q < kQueries; ++q) {
      for (int r = 0; r < kRows; ++r) {
        T lanes[kWidth];
        Store(lanes, sums[q][r]);
        double total = 0;
        for (int lane = 0; lane < kWidth; ++lane) total += lanes[lane];
        for (int64_t k = c; k < end; ++k) total += static_cast<double>(rows[r][k]) * queries[q][k];
        batch.dots[q][first + r] += total;
      }
    }
  }
}

// results[p] = scales[p] * sources[p] + sum_i factors[p][i] rows[i] over the columns [begin, end).  Without `kSources` the sum
// alone.
template <typename T, int kCount, bool kSources = true>
__attribute__((noinline)) void LongSums(const LongBatch<T>& batch, const T* scales, const T* const* sources,
                                        T* const* results, int64_t begin, int64_t end) {
  constexpr int64_t kWidth = Simd<T>::kWidth;
  for (size_t first = 0; first < batch.rows.size(); first += kLongRows) {
    const T* const* rows = batch.rows.data() + first;
    const bool anew = !kSources && first == 0;
    const T* before[kCount];
    Vector<T> factors[kCount][kLongRows], scale[kCount];
    for (int p = 0; p < kCount; ++p) {
      before[p] = kSources && first == 0 ? sources[p] : results[p];
      scale[p] = Broadcast(kSources && first == 0 ? scales[p] : T(1));
      for (int r = 0; r < kLongRows; ++r) factors[p][r] = Broadcast(batch.factors[p][first + r]);
    }
    int64_t c = begin;
    for (; c + kWidth <= end; c += kWidth) {
      Vector<T> values[kCount];
      for (int p = 0; p < kCount; ++p) values[p] = anew ? Vector<T>{} : scale[p] * LoadAhead(before[p] + c);
      for (int r = 0; r < kLongRows; ++r) {
        Vector<T> row = LoadAhead(rows[r] + c);
        Hold(row);
        for (int p = 0; p < kCount; ++p) values[p] += row * factors[p][r];
      }
      for (int p = 0; p < kCount; ++p) Store(results[p] + c, values[p]);
    }
    for (; c < end; ++c) {
      for (int p = 0; p < kCount; ++p) {
        T value = anew ? T(0) : scale[p][0] * before[p][c];
        for (int r = 0; r < kLongRows; ++r) value += rows[r][c] * factors[p][r][0];
        results[p][c] = value;
      }
    }
  }
}

template <typename Use>
inline void InBlocks(int64_t length, int64_t block, Use use) {
  for (int64_t begin = 0; begin < length; begin += block) use(begin, std::min(length, begin + block));
}

template <typename T, int kCount>
bool LongGradient(const Model<T>& model, const Rows<T>& run, const T* inner, const T* weights, const T* ridge,
                  T* gradients) {
  constexpr int64_t kBlock = kLongBlock / sizeof(T);
  LongBatch<T> batch(run.count);
  const bool valid = batch.Fill(model, run.indices);
  const T* queries[kCount];
  T* results[kCount];
  for (int p = 0; p < kCount; ++p) {
    queries[p] = inner + p * model.length;
    results[p] = gradients + p * model.length;
  }
  InBlocks(model.length, kBlock, [&](int64_t begin, int64_t end) {
    LongDots<T, kCount>(batch, queries, begin, end);
  });
  for (int p = 0; p < kCount; ++p) {
    for (int64_t i = 0; i < run.count; ++i) {
      const Vector<T> u = Broadcast(static_cast<T>(batch.dots[p][i])), t = Broadcast(model.targets[run.indices[i]]);
      const T weight = weights[p * model.cell_count + batch.cells[i]];
      batch.factors[p][i] = weight * Slope<T>(model.link, u, t)[0] / static_cast<T>(run.count);
    }
  }
  InBlocks(model.length, kBlock, [&](int64_t begin, int64_t end) {
    LongSums<T, kCount>(batch, ridge, queries, results, begin, end);
  });
  return valid;
}

// `directions`: kCount vectors to work in.
template <typename T, int kCount>
bool LongNeumann(const Model<T>& model, const Rows<T>& run, int64_t size, const T* inner, const T* vectors,
                 const T* weights, const T* ridge, const T* step, T* directions, T* solutions, T* cell_products) {
  constexpr int64_t kBlock = kLongBlock / sizeof(T);
  const bool curved = model.link == kLogistic;  // the squared link's curvature does not depend on y
  const int64_t terms = run.count / size - 1;
  const T share = T(1) / static_cast<T>(size);
  const T* first[kCount];
  const T* queries[2 * kCount];
  T *direction[kCount], *total[kCount], kept[kCount];
  for (int p = 0; p < kCount; ++p) {
    first[p] = vectors + p * model.length;
    direction[p] = directions + p * model.length;
    total[p] = solutions + p * model.length;
    queries[kCount + p] = inner + p * model.length;
    kept[p] = T(1) - step[p] * ridge[p];
  }
  LongBatch<T> batch(size), next(size);
  bool valid = true;
  for (int64_t j = 0; j <= terms; ++j) {
    valid &= next.Fill(model, run.indices + j * size);
    const bool last = j == terms, even = j % 2 == 0;
    // The directions before this pass: the given vectors until the first factor was applied.
    const T* const* before = j <= 1 ? first : direction;
    for (int p = 0; p < kCount; ++p) queries[p] = last ? total[p] : j == 0 ? first[p] : direction[p];
    InBlocks(model.length, kBlock, [&](int64_t begin, int64_t end) {
      for (int p = 0; p < kCount; ++p) {
        // The sum of all directions takes in two of them at a time.
        if (j == 0 && last) {
          for (int64_t k = begin; k < end; ++k) total[p][k] = step[p] * first[p][k];
        } else if (j == 1) {
          std::copy(first[p] + begin, first[p] + end, total[p] + begin);
        } else if (j > 1 && even) {
          for (int64_t k = begin; k < end; ++k) total[p][k] += direction[p][k];
        }
      }
      if (j > 0) LongSums<T, kCount>(batch, kept, before, direction, begin, end);
      for (int p = 0; p < kCount; ++p) {
        if (j > 0 && last) {
          for (int64_t k = begin; k < end; ++k) total[p][k] = step[p] * (total[p][k] + direction[p][k]);
        } else if (j > 0 && even) {
          for (int64_t k = begin; k < end; ++k) total[p][k] += direction[p][k];
        }
      }
      if (curved || last) {
        LongDots<T, 2 * kCount>(next, queries, begin, end);
      } else {
        LongDots<T, kCount>(next, queries, begin, end);
      }
    });
    std::swap(batch, next);
    for (int p = 0; p < kCount; ++p) {
      T* sums = cell_products + p * model.cell_count;
      if (last) std::fill_n(sums, model.cell_count, T(0));
      for (int64_t i = 0; i < size; ++i) {
        const T dot = static_cast<T>(batch.dots[p][i]);
        const Vector<T> u = Broadcast(static_cast<T>(batch.dots[kCount + p][i]));
        if (last) {
          const Vector<T> t = Broadcast(model.targets[run.indices[j * size + i]]);
          sums[batch.cells[i]] += share * Slope<T>(model.link, u, t)[0] * dot;
          continue;
        }
        const T curvature = curved ? Curvature<T>(u)[0] : T(1);
        batch.factors[p][i] = -step[p] * share * weights[p * model.cell_count + batch.cells[i]] * curvature * dot;
      }
    }
  }
  return valid;
}

}  // namespace fedbilevel

#endif  // FEDBILEVEL_KERNELS_LONG_H_
