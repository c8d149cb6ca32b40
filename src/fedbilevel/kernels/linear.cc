// The kernels of model.h, products.h, take.h and whole.h as calls of XLA's foreign function interface.
//
// A call runs on one thread and keeps no state. Leading dimensions of the operands are batch dimensions; an operand
// whose batch dimension has size 1 is shared along it. Built with FEDBILEVEL_DOUBLE the library serves float64, else float32:
// then in two parts, which a compiler can be at side by side, FEDBILEVEL_PART 1 (`FedbilevelLinear`) and 2 (all others).

#include <algorithm>
#include <cstdint>
#include <exception>
#include <string>
#include <tuple>
#include <vector>

#include "batches.h"
#include "draw.h"
#include "long.h"
#include "model.h"
#if !defined(FEDBILEVEL_DOUBLE)
#include "packed_calls.h"
#endif
#include "products.h"
#include "root.h"
#include "take.h"
#include "whole.h"

namespace fedbilevel {
namespace {

constexpr char kBadCount[] = "fedbilevel kernel: neither the operands of the Neumann series nor those of the gradient";
#if defined(FEDBILEVEL_DOUBLE)
using Number = double;
constexpr ffi::DataType kNumber = ffi::DataType::F64;
#else
using Number = float;
constexpr ffi::DataType kNumber = ffi::DataType::F32;
#endif
constexpr char kBadType[] = "fedbilevel kernel: 'features' does not have the type of this library";
constexpr char kBadLink[] = "fedbilevel kernel: 'link' is neither logistic (0) nor squared (1)";
constexpr char kBadIndex[] = "fedbilevel kernel: 'indices' names a row that there is not";
constexpr char kBadCell[] = "fedbilevel kernel: 'cells' names a cell that 'weights' does not have";
constexpr char kBadTake[] = "fedbilevel kernel: the operands of 'take' do not fit each other";
constexpr char kBadGroup[] = "fedbilevel kernel: 'groups' names a group that there is not";
constexpr char kBadRange[] = "fedbilevel kernel: 'start' and 'size' name rows that there are not";
constexpr char kEmpty[] = "fedbilevel kernel: an operand has a dimension of size 0";

using Buffer = ffi::AnyBuffer;

// Both calls, told apart by their number of operands: `indices` is [terms + 1, b] for the Neumann series and [b] for
// the gradient, which has neither `vectors` nor `step` and one result.
struct Call {
  const Buffer features, targets, cells, indices, inner, weights, ridge, vectors, step, first_result, second_result;
  const bool neumann;
  const int32_t link;
};

// One or two points on rows of which a minibatch leaves the caches.
template <typename T>
bool RunLong(const Model<T>& model, const Rows<T>& run, int64_t batch, bool pair, bool neumann, const T* inner,
             const T* vectors, const T* weights, const T* ridge, const T* step, T* space, T* first, T* second) {
  if (!neumann) {
    const auto kernel = pair ? LongGradient<T, 2> : LongGradient<T, 1>;
    return kernel(model, run, inner, weights, ridge, first);
  }
  const auto kernel = pair ? LongNeumann<T, 2> : LongNeumann<T, 1>;
  return kernel(model, run, batch, inner, vectors, weights, ridge, step, space, first, second);
}

template <typename T>
ffi::Error Run(const Call& call) {
  const bool neumann = call.neumann;
  const int64_t samples = SizeOf(call.features, 2), length = SizeOf(call.features, 1);
  const int64_t points = SizeOf(call.inner, 2), cell_count = SizeOf(call.weights, 1);
  const int64_t batch = SizeOf(call.indices, 1), minibatches = neumann ? SizeOf(call.indices, 2) : 1;
  if (std::min({samples, length, cell_count, points, batch, minibatches}) < 1) {
    return ffi::Error::InvalidArgument(kEmpty);
  }
  const Sizes index_shape = neumann ? Sizes{minibatches, batch} : Sizes{batch};

  Batches all(call.first_result, 2);
  const auto features = all.Bind<const T>("features", call.features, {samples, length});
  const auto targets = all.Bind<const T>("targets", call.targets, {samples});
  const auto cells = all.Bind<const int32_t>("cells", call.cells, {samples});
  const auto indices = all.Bind<const int32_t>("indices", call.indices, index_shape);
  const auto inner = all.Bind<const T>("inner", call.inner, {points, length});
  const auto weights = all.Bind<const T>("weights", call.weights, {points, cell_count});
  const auto ridge = all.Bind<const T>("ridge", call.ridge, {points});
  const auto vectors = all.Bind<const T>("vectors", call.vectors, {points, length});
  const auto step = all.Bind<const T>("step", call.step, {points});
  const auto first = all.Bind<T>("first result", call.first_result, {points, length});
  const auto second = all.Bind<T>("second result", call.second_result, {points, neumann ? cell_count : length});
  if (!all.error().empty()) return ffi::Error::InvalidArgument(all.error());

  const int64_t count = minibatches * batch;
  const bool is_long = IsLong<T>(batch, length);
  const Shape<T> shape(length);
  Workspace<T> space(shape, 0, is_long ? kPoints : Workspace<T>::kVectors);
  for (int64_t e = 0; e < all.count(); ++e) {
    const auto link = static_cast<Link>(call.link);
    const Model<T> model = {features[e], targets[e], cells[e], samples, length, cell_count, link};
    const Rows<T> run = {model.features, indices[e], count, length};
    if (!Below(samples, run.indices, count)) return ffi::Error(ffi::ErrorCode::kOutOfRange, kBadIndex);
    bool valid = true;
    for (int64_t p = 0; p < points; p += kPoints) {
      const bool pair = p + 1 < points;
      const int64_t at = p * length, cell = p * cell_count;
      if (is_long) {
        valid &= RunLong(model, run, batch, pair, neumann, inner[e] + at, vectors[e] + at, weights[e] + cell,
                         ridge[e] + p, step[e] + p, space.inner(0), first[e] + at, second[e] + (neumann ? cell : at));
        continue;
      }
      if (!neumann) {
        const auto kernel = pair ? Gradient<T, 2> : Gradient<T, 1>;
        valid &= kernel(model, shape, run, inner[e] + at, weights[e] + cell, ridge[e] + p, space, first[e] + at);
        continue;
      }
      const auto kernel = link == kLogistic ? (pair ? Neumann<T, 2, true> : Neumann<T, 1, true>)
                                            : (pair ? Neumann<T, 2, false> : Neumann<T, 1, false>);
      valid &= kernel(model, shape, run, batch, inner[e] + at, vectors[e] + at, weights[e] + cell, ridge[e] + p,
                      step[e] + p, space, first[e] + at, second[e] + cell);
    }
    if (!valid) return ffi::Error(ffi::ErrorCode::kOutOfRange, kBadCell);
  }
  return ffi::Error::Success();
}

ffi::Error RunForType(ffi::RemainingArgs operands, ffi::RemainingRets results, int32_t link) {
  const bool neumann = operands.size() == 9 && results.size() == 2;
  if (!neumann && !(operands.size() == 7 && results.size() == 1)) return ffi::Error::InvalidArgument(kBadCount);
  if (link != kLogistic && link != kSquared) return ffi::Error::InvalidArgument(kBadLink);
  const auto operand = [&](size_t k) { return *operands.get<Buffer>(k); };
  const auto result = [&](size_t k) { return **results.get<Buffer>(k); };
  const Call call = {operand(0), operand(1), operand(2), operand(3), operand(4), operand(neumann ? 6 : 5),
                     operand(neumann ? 7 : 6), operand(neumann ? 5 : 4), operand(neumann ? 8 : 6), result(0),
                     result(neumann ? 1 : 0), neumann, link};
  // Nothing may be thrown through the caller's frames; the only thing that can be is a lack of memory.
  try {
    if (call.features.element_type() == kNumber) return Run<Number>(call);
    return ffi::Error::InvalidArgument(kBadType);
  } catch (const std::exception& error) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, std::string("fedbilevel kernel: ") + error.what());
  }
}

// rows [..., N, row...], indices [..., b] -> [..., b, row...], for elements of any type.
ffi::Error TakeRows(ffi::RemainingArgs operands, ffi::RemainingRets results, int32_t row_rank) {
  if (operands.size() != 2 || results.size() != 1) return ffi::Error::InvalidArgument(kBadCount);
  const Buffer rows = *operands.get<Buffer>(0), indices = *operands.get<Buffer>(1), out = **results.get<Buffer>(0);
  const size_t rank = static_cast<size_t>(row_rank);
  const int64_t samples = SizeOf(rows, rank + 1), count = SizeOf(indices, 1);
  const auto dims = rows.dimensions(), index_dims = indices.dimensions(), out_dims = out.dimensions();
  if (dims.size() < rank + 1 || out_dims.size() != dims.size() || index_dims.size() + rank != dims.size() ||
      indices.element_type() != ffi::DataType::S32 || out.element_type() != rows.element_type()) {
    return ffi::Error::InvalidArgument(kBadTake);
  }
  int64_t row = 1, own = 1, total = 1;
  for (size_t k = dims.size() - rank; k < dims.size(); ++k) row *= dims[k];
  const size_t batch_rank = dims.size() - rank - 1;
  std::vector<int64_t> sizes(batch_rank), row_strides(batch_rank), index_strides(batch_rank);
  int64_t row_stride = 1, index_stride = 1;
  for (size_t k = batch_rank; k-- > 0;) {
    sizes[k] = out_dims[k];
    if ((dims[k] != 1 && dims[k] != sizes[k]) || (index_dims[k] != 1 && index_dims[k] != sizes[k])) {
      return ffi::Error::InvalidArgument(kBadTake);
    }
    row_strides[k] = dims[k] == 1 ? 0 : row_stride;
    index_strides[k] = index_dims[k] == 1 ? 0 : index_stride;
    row_stride *= dims[k];
    index_stride *= index_dims[k];
    total *= sizes[k];
    own *= dims[k];
  }
  if (own * samples * row == 0 || total * count == 0) return ffi::Error::InvalidArgument(kEmpty);
  const int64_t bytes = static_cast<int64_t>(rows.size_bytes()) / (own * samples);
  const char* source = static_cast<const char*>(rows.untyped_data());
  const int32_t* chosen = static_cast<const int32_t*>(indices.untyped_data());
  char* target = static_cast<char*>(out.untyped_data());
  for (int64_t e = 0; e < total; ++e) {
    int64_t rest = e, from = 0, at = 0;
    for (size_t k = batch_rank; k-- > 0;) {
      from += rest % sizes[k] * row_strides[k];
      at += rest % sizes[k] * index_strides[k];
      rest /= sizes[k];
    }
    const char* base = source + from * samples * bytes;
    if (!Take(base, samples, bytes, chosen + at * count, count, target + e * count * bytes)) {
      return ffi::Error(ffi::ErrorCode::kOutOfRange, kBadIndex);
    }
  }
  return ffi::Error::Success();
}

// features [N, d], labels [N], groups [N], start [], size [], inner [d] -> losses [K], counts [K]; with a temperature []
// behind them also rates [K], positives [K], the gradient of the loss [d] and those of the rates [K, d].
template <typename T>
ffi::Error RunWhole(ffi::RemainingArgs operands, ffi::RemainingRets results) {
  const bool gradients = operands.size() == 7;
  const auto operand = [&](size_t k) { return *operands.get<Buffer>(k); };
  const auto result = [&](size_t k) { return **results.get<Buffer>(gradients ? k : k % 2); };
  const int64_t samples = SizeOf(operand(0), 2), length = SizeOf(operand(0), 1), count = SizeOf(result(0), 1);
  if (std::min({samples, length, count}) < 1) return ffi::Error::InvalidArgument(kEmpty);
  Batches all(result(0), 1);
  const auto features = all.Bind<const T>("features", operand(0), {samples, length});
  const auto labels = all.Bind<const T>("labels", operand(1), {samples});
  const auto groups = all.Bind<const int32_t>("groups", operand(2), {samples});
  const auto start = all.Bind<const int32_t>("start", operand(3), {});
  const auto size = all.Bind<const int32_t>("size", operand(4), {});
  const auto inner = all.Bind<const T>("inner", operand(5), {length});
  const auto losses = all.Bind<T>("losses", result(0), {count});
  const auto counts = all.Bind<T>("counts", result(1), {count});
  // Where only losses are asked for, the other names stand for buffers that are there and stay unread.
  const auto rates = all.Bind<T>("rates", result(2), {count});
  const auto positives = all.Bind<T>("positives", result(3), {count});
  const auto loss_gradient = all.Bind<T>("loss gradient", result(4), {gradients ? length : count});
  const auto rate_gradients = all.Bind<T>("rate gradients", result(5), gradients ? Sizes{count, length} : Sizes{count});
  const Buffer sharpness = operand(gradients ? 6 : 5);
  const auto temperature =
      all.Bind<const T>("temperature", sharpness, gradients ? Sizes{} : Sizes{length});
  if (!all.error().empty()) return ffi::Error::InvalidArgument(all.error());

  // Elements on the same rows, such as several seeds' runs on one client, go one after the other.
  std::vector<WholeSet<T>> sets(all.count());
  std::vector<int64_t> order(all.count());
  for (int64_t e = 0; e < all.count(); ++e) {
    const int64_t from = *start[e], rows = *size[e];
    if (from < 0 || rows < 0 || from + rows > samples) return ffi::Error(ffi::ErrorCode::kOutOfRange, kBadRange);
    sets[e] = {features[e] + from * length, labels[e] + from, groups[e] + from, rows, length, count};
    order[e] = e;
  }
  const auto rows_of = [&](int64_t e) { return std::tie(sets[e].features, sets[e].labels, sets[e].groups, sets[e].rows); };
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return rows_of(a) < rows_of(b); });

  const Shape<T> shape(length);
  Workspace<T> space(shape, gradients ? 0 : kPointsAtOnce);
  bool valid = true;
  std::vector<WholePoint<T>> points;
  for (size_t k = 0; k < order.size(); ++k) {
    const int64_t e = order[k];
    if (gradients) {
      const WholeSums<T> out = {losses[e], counts[e], rates[e], positives[e], loss_gradient[e], rate_gradients[e]};
      const Rows<T> run = {sets[e].features, nullptr, sets[e].rows, length};
      valid &= SumOver<T>(sets[e], run, shape, inner[e], *temperature[e], space, out);
      continue;
    }
    points.push_back({inner[e], losses[e], counts[e]});
    const bool more = k + 1 < order.size() && rows_of(order[k + 1]) == rows_of(e);
    if (more && points.size() < kPointsAtOnce) continue;
    valid &= LossesOver<T>(sets[e], shape, points, space);
    points.clear();
  }
  return valid ? ffi::Error::Success() : ffi::Error(ffi::ErrorCode::kOutOfRange, kBadGroup);
}

ffi::Error WholeForType(ffi::RemainingArgs operands, ffi::RemainingRets results) {
  const bool known = (operands.size() == 6 && results.size() == 2) || (operands.size() == 7 && results.size() == 6);
  if (!known) return ffi::Error::InvalidArgument(kBadCount);
  try {
    const auto type = operands.get<Buffer>(0)->element_type();
    if (type == kNumber) return RunWhole<Number>(operands, results);
    return ffi::Error::InvalidArgument(kBadType);
  } catch (const std::exception& error) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, std::string("fedbilevel kernel: ") + error.what());
  }
}

ffi::Error ProductsForType(ffi::RemainingArgs operands, ffi::RemainingRets results, int32_t sums) {
  if (results.size() < 1 || operands.size() != results.size() + 2) return ffi::Error::InvalidArgument(kBadCount);
  try {
    const auto type = operands.get<Buffer>(0)->element_type();
    if (type == kNumber) return RunProducts<Number>(operands, results, sums);
    return ffi::Error::InvalidArgument(kBadType);
  } catch (const std::exception& error) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, std::string("fedbilevel kernel: ") + error.what());
  }
}

#if FEDBILEVEL_PART == 2
ffi::Error PackedSafely(ffi::RemainingArgs operands, ffi::RemainingRets results, int32_t link, int32_t ones, int32_t by_row) {
  return Safely([&] { return RunPacked(operands, results, link, ones, by_row); });
}

ffi::Error PackedWholeSafely(ffi::RemainingArgs operands, ffi::RemainingRets results, int32_t ones) {
  return Safely([&] { return RunPackedWhole(operands, results, ones); });
}

ffi::Error PackedProductsSafely(ffi::RemainingArgs operands, ffi::RemainingRets results, int32_t ones, int32_t sums) {
  return Safely([&] { return RunPackedProducts(operands, results, ones, sums); });
}
#endif

}  // namespace

#if FEDBILEVEL_PART != 1
FEDBILEVEL_HANDLER(FedbilevelProducts, ProductsForType, "sums")
FEDBILEVEL_HANDLER(FedbilevelWhole, WholeForType)
#endif

#if FEDBILEVEL_PART == 2
FEDBILEVEL_HANDLER(FedbilevelPacked, PackedSafely, "link", "ones", "by_row")
FEDBILEVEL_HANDLER(FedbilevelPackedWhole, PackedWholeSafely, "ones")
FEDBILEVEL_HANDLER(FedbilevelPackedProducts, PackedProductsSafely, "ones", "sums")
FEDBILEVEL_HANDLER(FedbilevelTake, TakeRows, "row_rank")
FEDBILEVEL_HANDLER(FedbilevelRoot, CubeRoots)
FEDBILEVEL_HANDLER(FedbilevelFold, FoldIn)
FEDBILEVEL_HANDLER(FedbilevelDraw, DrawRows, "steps", "train_pieces")
#endif

#if FEDBILEVEL_PART != 2
FEDBILEVEL_HANDLER(FedbilevelLinear, RunForType, "link")
#endif

}  // namespace fedbilevel
