// The kernels of packed.h as calls of XLA's foreign function interface. `columns` says how many numbers a record begins with.

#ifndef FEDBILEVEL_KERNELS_PACKED_CALLS_H_
#define FEDBILEVEL_KERNELS_PACKED_CALLS_H_

#include <algorithm>
#include <cstdint>
#include <exception>
#include <string>
#include <tuple>
#include <vector>

#include "batches.h"
#include "packed.h"

namespace fedbilevel {

constexpr char kBadRecord[] = "fedbilevel kernel: the records do not fit 'columns', 'ones' and the coefficients";

// Whether the shapes of records and columns go with each other; columns themselves are looked at for every batch element.
inline bool Fits(int64_t words, int64_t numbers, int64_t ones, int64_t length) {
  return words > 0 && words % 16 == 0 && ones > 0 && ones % kOnes == 0 && length > 0 && length < (1 << 15) &&
         numbers * 4 + ones * 2 <= words * 4;
}

inline bool Known(const Packed& packed) {
  bool known = true;
  for (int64_t k = 0; k < packed.numbers; ++k) {
    known &= static_cast<uint32_t>(packed.columns[k]) < static_cast<uint64_t>(packed.length);
  }
  return known;
}

// records [N, W], columns [C], targets [N], cells [N], indices [batches, b], inner [P, d], vectors [P, d], weights [P, K],
// ridge [P], step [P] -> solutions [P, d], products [P, K]; or indices [b], neither vectors nor step -> gradients [P, d].
// `by_row`: weights are [P, N], of the rows themselves, and in the place of cells the indices stay unread.
inline ffi::Error RunPacked(ffi::RemainingArgs operands, ffi::RemainingRets results, int32_t link, int32_t ones,
                            int32_t by_row) {
  const bool neumann = operands.size() == 10 && results.size() == 2;
  if (!neumann && !(operands.size() == 8 && results.size() == 1)) {
    return ffi::Error::InvalidArgument("fedbilevel kernel: neither the operands of the series nor those of the gradient");
  }
  const auto operand = [&](size_t k) { return *operands.get<ffi::AnyBuffer>(k); };
  const auto result = [&](size_t k) { return **results.get<ffi::AnyBuffer>(k); };
  const int64_t samples = SizeOf(operand(0), 2), words = SizeOf(operand(0), 1), numbers = SizeOf(operand(1), 1);
  const int64_t points = SizeOf(operand(5), 2), length = SizeOf(operand(5), 1);
  const int64_t cell_count = SizeOf(operand(neumann ? 7 : 6), 1);
  const int64_t batch = SizeOf(operand(4), 1), batches = neumann ? SizeOf(operand(4), 2) : 1;
  if (std::min({samples, points, cell_count, batch, batches}) < 1 || !Fits(words, numbers, ones, length)) {
    return ffi::Error::InvalidArgument(kBadRecord);
  }
  const Sizes index_shape = neumann ? Sizes{batches, batch} : Sizes{batch};
  Batches all(result(0), 2);
  const auto records = all.Bind<const int32_t>("records", operand(0), {samples, words});
  const auto columns = all.Bind<const int32_t>("columns", operand(1), {numbers});
  const auto targets = all.Bind<const float>("targets", operand(2), {samples});
  const auto cells = all.Bind<const int32_t>("cells", operand(3), by_row ? index_shape : Sizes{samples});
  const auto indices = all.Bind<const int32_t>("indices", operand(4), index_shape);
  const auto inner = all.Bind<const float>("inner", operand(5), {points, length});
  const auto vectors = all.Bind<const float>("vectors", operand(neumann ? 6 : 5), {points, length});
  const auto weights = all.Bind<const float>("weights", operand(neumann ? 7 : 6), {points, cell_count});
  const auto ridge = all.Bind<const float>("ridge", operand(neumann ? 8 : 7), {points});
  const auto step = all.Bind<const float>("step", operand(neumann ? 9 : 7), {points});
  const auto first = all.Bind<float>("first result", result(0), {points, length});
  const auto second = all.Bind<float>("second result", result(neumann ? 1 : 0), {points, neumann ? cell_count : length});
  if (!all.error().empty()) return ffi::Error::InvalidArgument(all.error());

  for (int64_t e = 0; e < all.count(); ++e) {
    const Packed packed = {records[e], columns[e], words, numbers, ones, length};
    const Model<float> model = {nullptr, targets[e], by_row ? nullptr : cells[e], samples, length, cell_count, static_cast<Link>(link)};
    if (!Below(samples, indices[e], batches * batch)) {
      return ffi::Error(ffi::ErrorCode::kOutOfRange, "fedbilevel kernel: 'indices' names a row that there is not");
    }
    bool valid = Known(packed);
    for (int64_t p = 0; p < points && valid; p += kPoints) {
      const int64_t count = std::min<int64_t>(kPoints, points - p), at = p * length, cell = p * cell_count;
      valid = neumann ? PackedNeumann(packed, model, indices[e], batches, batch, count, inner[e] + at, vectors[e] + at,
                                      weights[e] + cell, ridge[e] + p, step[e] + p, first[e] + at, second[e] + cell)
                      : PackedGradient(packed, model, indices[e], batch, count, inner[e] + at, weights[e] + cell,
                                       ridge[e] + p, first[e] + at);
    }
    if (!valid) {
      return ffi::Error(ffi::ErrorCode::kOutOfRange,
                        "fedbilevel kernel: 'cells' names a cell that 'weights' does not have, or a record a column");
    }
  }
  return ffi::Error::Success();
}

// records [N, W], columns [C], indices [b], then as many vectors as there are results: of [d], whose results are of [b], or with
// `sums` the reverse.
inline ffi::Error RunPackedProducts(ffi::RemainingArgs operands, ffi::RemainingRets results, int32_t ones, int32_t sums) {
  const auto operand = [&](size_t k) { return *operands.get<ffi::AnyBuffer>(k); };
  const auto result = [&](size_t k) { return **results.get<ffi::AnyBuffer>(k); };
  const int64_t count = results.size();
  if (count < 1 || static_cast<int64_t>(operands.size()) != count + 3) return ffi::Error::InvalidArgument(kBadRecord);
  const int64_t samples = SizeOf(operand(0), 2), words = SizeOf(operand(0), 1), numbers = SizeOf(operand(1), 1);
  const int64_t batch = SizeOf(operand(2), 1), length = SizeOf(sums ? result(0) : operand(3), 1);
  if (std::min(samples, batch) < 1 || !Fits(words, numbers, ones, length)) {
    return ffi::Error::InvalidArgument(kBadRecord);
  }
  Batches all(result(0), 1);
  const auto records = all.Bind<const int32_t>("records", operand(0), {samples, words});
  const auto columns = all.Bind<const int32_t>("columns", operand(1), {numbers});
  const auto indices = all.Bind<const int32_t>("indices", operand(2), {batch});
  std::vector<Operand<const float>> given;
  std::vector<Operand<float>> made;
  for (int64_t k = 0; k < count; ++k) {
    given.push_back(all.Bind<const float>("vector", operand(3 + k), {sums ? batch : length}));
    made.push_back(all.Bind<float>("result", result(k), {sums ? length : batch}));
  }
  if (!all.error().empty()) return ffi::Error::InvalidArgument(all.error());
  const int64_t most = sums ? kPoints : kLanes;
  for (int64_t e = 0; e < all.count(); ++e) {
    const Packed packed = {records[e], columns[e], words, numbers, ones, length};
    bool valid = Known(packed) && Below(samples, indices[e], batch);
    for (int64_t k = 0; k < count && valid; k += most) {
      const int64_t taken = std::min(most, count - k);
      const float* vectors[kLanes];
      float* into[kLanes];
      for (int64_t q = 0; q < taken; ++q) {
        vectors[q] = given[k + q][e];
        into[q] = made[k + q][e];
      }
      valid = PackedProducts(packed, samples, indices[e], batch, taken, sums, vectors, into);
    }
    if (!valid) {
      return ffi::Error(ffi::ErrorCode::kOutOfRange,
                        "fedbilevel kernel: 'indices' names a row that there is not, or a record a column");
    }
  }
  return ffi::Error::Success();
}

// records [N, W], columns [C], labels [N], groups [N], start [], size [], inner [d] -> losses [K], counts [K]; with a
// temperature [] behind them also rates [K], positives [K], the gradient of the loss [d] and those of the rates [K, d].
inline ffi::Error RunPackedWhole(ffi::RemainingArgs operands, ffi::RemainingRets results, int32_t ones) {
  const bool gradients = operands.size() == 8 && results.size() == 6;
  if (!gradients && !(operands.size() == 7 && results.size() == 2)) return ffi::Error::InvalidArgument(kBadRecord);
  const auto operand = [&](size_t k) { return *operands.get<ffi::AnyBuffer>(k); };
  const auto result = [&](size_t k) { return **results.get<ffi::AnyBuffer>(gradients ? k : k % 2); };
  const int64_t samples = SizeOf(operand(0), 2), words = SizeOf(operand(0), 1), numbers = SizeOf(operand(1), 1);
  const int64_t length = SizeOf(operand(6), 1), count = SizeOf(result(0), 1);
  if (std::min(samples, count) < 1 || !Fits(words, numbers, ones, length)) {
    return ffi::Error::InvalidArgument(kBadRecord);
  }
  Batches all(result(0), 1);
  const auto records = all.Bind<const int32_t>("records", operand(0), {samples, words});
  const auto columns = all.Bind<const int32_t>("columns", operand(1), {numbers});
  const auto labels = all.Bind<const float>("labels", operand(2), {samples});
  const auto groups = all.Bind<const int32_t>("groups", operand(3), {samples});
  const auto start = all.Bind<const int32_t>("start", operand(4), {});
  const auto size = all.Bind<const int32_t>("size", operand(5), {});
  const auto inner = all.Bind<const float>("inner", operand(6), {length});
  const auto losses = all.Bind<float>("losses", result(0), {count});
  const auto counts = all.Bind<float>("counts", result(1), {count});
  // Where only losses are asked for, the other names stand for buffers that are there and stay unread.
  const auto temperature = all.Bind<const float>("temperature", operand(gradients ? 7 : 6), gradients ? Sizes{} : Sizes{length});
  const auto rates = all.Bind<float>("rates", result(2), {count});
  const auto positives = all.Bind<float>("positives", result(3), {count});
  const auto loss_gradient = all.Bind<float>("loss gradient", result(4), {gradients ? length : count});
  const auto rate_gradients =
      all.Bind<float>("rate gradients", result(5), gradients ? Sizes{count, length} : Sizes{count});
  if (!all.error().empty()) return ffi::Error::InvalidArgument(all.error());

  // Elements on the same rows, such as several seeds' runs on one client, go in one pass.
  std::vector<int64_t> order(all.count());
  for (int64_t e = 0; e < all.count(); ++e) {
    order[e] = e;
    if (*start[e] < 0 || *size[e] < 0 || int64_t{*start[e]} + *size[e] > samples) {
      return ffi::Error(ffi::ErrorCode::kOutOfRange, "fedbilevel kernel: 'start' and 'size' name rows that there are not");
    }
  }
  const auto rows_of = [&](int64_t e) {
    return std::make_tuple(records[e], columns[e], labels[e], groups[e], *start[e], *size[e]);
  };
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return rows_of(a) < rows_of(b); });
  const Shape<float> shape(length);
  bool valid = true;
  std::vector<WholePoint<float>> points;
  for (size_t k = 0; k < order.size() && valid; ++k) {
    const int64_t e = order[k];
    const Packed packed = {records[e], columns[e], words, numbers, ones, length};
    const WholeSet<float> set = {nullptr, labels[e] + *start[e], groups[e] + *start[e], *size[e], length, count};
    valid = Known(packed);
    if (gradients && valid) {
      Workspace<float> space(shape);
      Unpacked rows(packed, *start[e]);
      const WholeSums<float> out = {losses[e], counts[e], rates[e], positives[e], loss_gradient[e], rate_gradients[e]};
      valid = SumOver<float>(set, rows, shape, inner[e], *temperature[e], space, out) && rows.inside();
      continue;
    }
    points.push_back({inner[e], losses[e], counts[e]});
    const bool more = k + 1 < order.size() && rows_of(order[k + 1]) == rows_of(e);
    if (more && points.size() < static_cast<size_t>(Simd<float>::kWidth)) continue;
    valid = valid && PackedLosses(packed, set, *start[e], points.data(), points.size());
    points.clear();
  }
  if (valid) return ffi::Error::Success();
  return ffi::Error(ffi::ErrorCode::kOutOfRange, "fedbilevel kernel: 'groups' names a group that there is not, or a record a column");
}

// Nothing may be thrown through the caller's frames; the only thing that can be is a lack of memory.
template <typename Action>
ffi::Error Safely(Action action) {
  try {
    return action();
  } catch (const std::exception& error) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, std::string("fedbilevel kernel: ") + error.what());
  }
}

}  // namespace fedbilevel

#endif  // FEDBILEVEL_KERNELS_PACKED_CALLS_H_
