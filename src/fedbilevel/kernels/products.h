// Products with the rows that a minibatch names, read where they lie: with several vectors in one pass.
//
// For losses of any form whose rows are so long that a minibatch leaves the caches: what counts is how often memory is read.

#ifndef FEDBILEVEL_KERNELS_PRODUCTS_H_
#define FEDBILEVEL_KERNELS_PRODUCTS_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "batches.h"
#include "long.h"

namespace fedbilevel {

// results[q][i] = rows[i] . vectors[q] for kCount of them.
template <typename T, int kCount>
void DotsWith(LongBatch<T>& rows, int64_t length, const T* const* vectors, T* const* results) {
  rows.Clear();
  InBlocks(length, kLongBlock / sizeof(T), [&](int64_t begin, int64_t end) {
    LongDots<T, kCount, 0>(rows, vectors, begin, end);
  });
  for (int q = 0; q < kCount; ++q) std::copy_n(rows.dots[q].begin(), rows.size, results[q]);
}

// results[q] = sum_i vectors[q][i] rows[i] for kCount of them.
template <typename T, int kCount>
void SumsWith(LongBatch<T>& rows, int64_t length, const T* const* vectors, T* const* results) {
  for (int q = 0; q < kCount; ++q) std::copy_n(vectors[q], rows.size, rows.factors[q].begin());
  InBlocks(length, kLongBlock / sizeof(T), [&](int64_t begin, int64_t end) {
    LongSums<T, kCount, false>(rows, nullptr, nullptr, results, begin, end);
  });
}

// table [N, d], indices [b], then as many vectors as there are results: of [d], whose results are of [b], or the reverse.
template <typename T>
ffi::Error RunProducts(ffi::RemainingArgs operands, ffi::RemainingRets results, bool sums) {
  const auto operand = [&](size_t k) { return *operands.get<ffi::AnyBuffer>(k); };
  const auto result = [&](size_t k) { return **results.get<ffi::AnyBuffer>(k); };
  const size_t count = results.size();
  const int64_t samples = SizeOf(operand(0), 2), length = SizeOf(operand(0), 1), batch = SizeOf(operand(1), 1);
  if (std::min({samples, length, batch}) < 1) {
    return ffi::Error::InvalidArgument("fedbilevel kernel: an operand has a dimension of size 0");
  }
  Batches all(result(0), 1);
  const auto table = all.Bind<const T>("table", operand(0), {samples, length});
  const auto indices = all.Bind<const int32_t>("indices", operand(1), {batch});
  std::vector<Operand<const T>> given;
  std::vector<Operand<T>> made;
  for (size_t k = 0; k < count; ++k) {
    given.push_back(all.Bind<const T>("vector", operand(2 + k), {sums ? batch : length}));
    made.push_back(all.Bind<T>("result", result(k), {sums ? length : batch}));
  }
  if (!all.error().empty()) return ffi::Error::InvalidArgument(all.error());

  LongBatch<T> rows(batch);
  std::vector<const T*> vectors(count);
  std::vector<T*> into(count);
  for (int64_t e = 0; e < all.count(); ++e) {
    if (!rows.Point(table[e], samples, length, indices[e])) {
      return ffi::Error(ffi::ErrorCode::kOutOfRange, "fedbilevel kernel: 'indices' names a row that there is not");
    }
    for (size_t k = 0; k < count; ++k) {
      vectors[k] = given[k][e];
      into[k] = made[k][e];
    }
    for (size_t k = 0; k < count;) {
      const size_t left = count - k;
      const size_t taken = !sums && left >= 4 ? 4 : left >= 2 ? 2 : 1;
      const auto run = sums ? (taken == 2 ? SumsWith<T, 2> : SumsWith<T, 1>)
                            : (taken == 4 ? DotsWith<T, 4> : taken == 2 ? DotsWith<T, 2> : DotsWith<T, 1>);
      run(rows, length, vectors.data() + k, into.data() + k);
      k += taken;
    }
  }
  return ffi::Error::Success();
}

}  // namespace fedbilevel

#endif  // FEDBILEVEL_KERNELS_PRODUCTS_H_
