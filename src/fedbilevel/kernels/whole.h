// Whole local sets of a logistic model, read once from front to back: losses by group, soft true-positive rates by group,
// and the gradients of both.
//
// With z_i = x_i . y, s = sigmoid(T z), and the sums running over the rows of group a:
//     losses[a] = sum log(1 + exp(z_i)) - t_i z_i        rates[a] = sum t_i s_i        counts[a] = sum 1, positives[a] = sum t_i
//     loss_gradient = sum over all rows of (sigmoid(z_i) - t_i) x_i      rate_gradients[a] = sum t_i T s_i (1 - s_i) x_i

#ifndef FEDBILEVEL_KERNELS_WHOLE_H_
#define FEDBILEVEL_KERNELS_WHOLE_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "model.h"
#include "rows.h"

namespace fedbilevel {

constexpr int64_t kBanks = 4;     // running sums a group has: neighbouring rows, often of one group, need not wait for each other
constexpr size_t kPointsAtOnce = 16;  // points of one pass at most: beyond, they would not leave the first cache to the rows
constexpr int64_t kFlush = 1024;  // rows summed up before they join the total: long sums in small steps lose digits
constexpr int64_t kFactors = 64;  // factors of at most 2 in one product: it stays far below the largest float

// log(1 + e) for e in [0, 1]: twice the series of artanh at e / (2 + e), which is at most 1/3.
template <typename T>
inline Vector<T> LogOfOnePlus(Vector<T> e) {
  constexpr int kTerms = sizeof(T) == 4 ? 8 : 17;
  const Vector<T> s = e / (T(2) + e), square = s * s;
  Vector<T> series = Broadcast(T(1) / T(2 * kTerms + 1));
  for (int k = kTerms - 1; k >= 0; --k) series = series * square + T(1) / T(2 * k + 1);
  return T(2) * s * series;
}

// log(1 + exp(z)) - t z, from exp(-|z|).
template <typename T>
inline Vector<T> LogLoss(Vector<T> z, Vector<T> target, Vector<T> decay) {
  return (z < T(0) ? Vector<T>{} : z) + LogOfOnePlus<T>(decay) - target * z;
}

template <typename T>
struct WholeSet {
  const T *features, *labels;  // of this client's first row
  const int32_t* groups;
  int64_t rows, length, group_count;
};

// The next rows of a set; where each is summed up, by group and bank; and how many rows are there already.
template <typename T>
struct WholeTile {
  Tile<T> tile = {};
  int64_t places[kTile];
  std::vector<double> counts;
  bool valid = true;  // false once a group is out of range

  // `rows`: where each row of the set lies.
  template <typename Places>
  void Fill(const WholeSet<T>& set, Places&& rows, int64_t first, const T* zeros) {
    tile.first = first;
    tile.size = std::min<int64_t>(kTile, set.rows - first);
    std::copy_n(set.labels + first, tile.size, tile.targets);
    std::fill(tile.targets + tile.size, tile.targets + kTile, T(0));
    for (int64_t i = tile.size; i < kTile; ++i) tile.rows[i] = zeros;
    for (int64_t i = 0; i < tile.size; ++i) {
      tile.rows[i] = rows[first + i];
      const bool inside = static_cast<uint32_t>(set.groups[first + i]) < static_cast<uint64_t>(set.group_count);
      valid &= inside;
      places[i] = (inside ? set.groups[first + i] : 0) * kBanks + i % kBanks;
      counts[places[i]] += 1;
    }
  }
};

// The sum of the banks of every group.
template <typename T>
inline void Settle(const double* sums, int64_t group_count, T* out) {
  for (int64_t a = 0; a < group_count; ++a) {
    double total = 0;
    for (int64_t k = 0; k < kBanks; ++k) total += sums[a * kBanks + k];
    out[a] = static_cast<T>(total);
  }
}

// The groups that have rows in a tile; all bits are set in the lanes of their rows.
template <typename T>
struct Present {
  alignas(64) typename Simd<T>::Bits lanes[kTile][kTile];
  int64_t groups[kTile], count;

  explicit Present(const WholeTile<T>& next) : count(0) {
    int32_t left[kTile];  // -1: behind the last row, or its group was seen
    for (int64_t i = 0; i < kTile; ++i) left[i] = i < next.tile.size ? next.places[i] / kBanks : -1;
    for (int64_t i = 0; i < next.tile.size; ++i) {
      if (left[i] < 0) continue;
      const int32_t group = left[i];
      for (int64_t k = 0; k < kTile; ++k) {
        const bool same = left[k] == group;
        lanes[count][k] = same ? -1 : 0;
        left[k] = same ? -1 : left[k];
      }
      groups[count++] = group;
    }
  }
};

// Log losses log(1 + exp(z)) - t z of points, by group.  With e = exp(-|z|) they are max(z, 0) - t z + log(1 + e), and a sum of
// logarithms is the logarithm of a product: one for many rows.  `SumOver` adds up logarithms: with one point that is as fast, and
// FCFL, which follows the sign of small differences, keeps every bit of its runs.
template <typename T>
class LossSums {
 public:
  LossSums(int64_t points, int64_t group_count)
      : group_count_(group_count), plain_(points * group_count * kWidth, T(0)), product_(plain_.size(), T(1)),
        totals_(points * group_count, 0.0) {}

  // Rows i .. i + kWidth - 1 of a tile.
  void Add(int64_t point, const Present<T>& present, int64_t i, Vector<T> z, Vector<T> target) {
    const Vector<T> plain = (z < T(0) ? Vector<T>{} : z) - target * z;
    const Vector<T> factor = T(1) + ExpOfNegative<T>(z < T(0) ? z : -z);
    for (int64_t k = 0; k < present.count; ++k) {
      Mask<T> lanes;
      std::memcpy(&lanes, present.lanes[k] + i, sizeof(lanes));
      const int64_t at = (point * group_count_ + present.groups[k]) * kWidth;
      Store(plain_.data() + at, Load(plain_.data() + at) + (lanes ? plain : Vector<T>{}));
      Store(product_.data() + at, Load(product_.data() + at) * (lanes ? factor : Broadcast(T(1))));
    }
  }

  // After the tile that begins at row `first`: before a product has more than kFactors factors, and at the end.
  void Settle(int64_t first, int64_t rows) {
    if ((first + kTile) % (kFactors * kWidth) != 0 && first + kTile < rows) return;
    constexpr int64_t kLanes = 8;  // whose product stays below the largest double
    for (size_t at = 0; at < plain_.size(); at += kWidth) {
      for (int64_t lane = 0; lane < kWidth; lane += kLanes) {
        double plain = 0, product = 1;
        for (int64_t k = lane; k < std::min<int64_t>(lane + kLanes, kWidth); ++k) {
          plain += plain_[at + k];
          product *= product_[at + k];
        }
        totals_[at / kWidth] += plain + std::log(product);
      }
    }
    std::fill(plain_.begin(), plain_.end(), T(0));
    std::fill(product_.begin(), product_.end(), T(1));
  }

  void Read(int64_t point, T* losses) const {
    const double* own = totals_.data() + point * group_count_;
    for (int64_t a = 0; a < group_count_; ++a) losses[a] = static_cast<T>(own[a]);
  }

 private:
  static constexpr int64_t kWidth = Simd<T>::kWidth;
  int64_t group_count_;
  std::vector<T> plain_, product_;
  std::vector<double> totals_;
};

template <typename T>
struct WholePoint {
  const T* inner;
  T *losses, *counts;  // [group_count]
};

// Losses of up to kPointsAtOnce points, such as the runs of several seeds, in one pass over the rows: a row that is in the first
// cache is used for all of them, and a point's sums are taken in the same order as alone.  False if a group is out of range.
template <typename T>
bool LossesOver(const WholeSet<T>& set, const Shape<T>& shape, const std::vector<WholePoint<T>>& points,
                Workspace<T>& space) {
  const int64_t count = points.size(), banks = kBanks * set.group_count;
  for (int64_t p = 0; p < count; ++p) shape.Pack(points[p].inner, space.further(p));
  LossSums<T> sums(count, set.group_count);
  const Rows<T> run = {set.features, nullptr, set.rows, set.length};
  WholeTile<T> next;
  next.counts.assign(banks, 0.0);
  Tile<T>& tile = next.tile;
  for (int64_t first = 0; first < set.rows; first += kTile) {
    next.Fill(set, run, first, space.zeros());
    const Present<T> present(next);
    for (int64_t p = 0, together; p < count; p += together) {
      together = count - p >= 4 ? 4 : count - p >= 2 ? 2 : 1;
      const T* queries[4];
      for (int64_t q = 0; q < together; ++q) queries[q] = space.further(p + q);
      const auto dots = together == 4 ? Dots<T, 4, false> : together == 2 ? Dots<T, 2, false> : Dots<T, 1, false>;
      dots(shape, run, queries, tile);
      for (int64_t q = 0; q < together; ++q) {
        for (int64_t i = 0; i < kTile; i += Simd<T>::kWidth) {
          sums.Add(p + q, present, i, Load(tile.dots[q] + i), Load(tile.targets + i));
        }
      }
    }
    sums.Settle(first, set.rows);
  }
  for (int64_t p = 0; p < count; ++p) {
    sums.Read(p, points[p].losses);
    Settle(next.counts.data(), set.group_count, points[p].counts);
  }
  return next.valid;
}

template <typename T>
struct WholeSums {
  T *losses, *counts, *rates, *positives, *loss_gradient, *rate_gradients;
};

// `rows`: where each row of the set lies.  False if a group is out of range.
template <typename T, typename Places>
bool SumOver(const WholeSet<T>& set, Places&& rows, const Shape<T>& shape, const T* inner, T temperature,
             Workspace<T>& space, const WholeSums<T>& out) {
  const int64_t padded = shape.padded(), width = Simd<T>::kWidth, banks = kBanks * set.group_count;
  shape.Pack(inner, space.inner(0));
  const T* queries[1] = {space.inner(0)};
  T* partial[1] = {space.product(0)};
  T* total = space.total(0);
  std::fill_n(partial[0], padded, T(0));
  std::fill_n(total, padded, T(0));
  std::vector<T> by_group(set.group_count * padded, T(0));
  std::vector<double> loss_sums(banks, 0.0), rate_sums(banks, 0.0), positive_sums(banks, 0.0);
  const Rows<T> run = {nullptr, nullptr, 1, 0};  // nothing is asked for ahead
  WholeTile<T> next;
  next.counts.assign(banks, 0.0);
  Tile<T>& tile = next.tile;
  T losses[kTile], slopes[kTile], soft[kTile], steep[kTile];
  for (int64_t first = 0; first < set.rows; first += kTile) {
    next.Fill(set, rows, first, space.zeros());
    Dots<T, 1, false>(shape, run, queries, tile);
    for (int64_t i = 0; i < kTile; i += width) {
      const Vector<T> z = Load(tile.dots[0] + i), target = Load(tile.targets + i), sharp = temperature * z;
      const Vector<T> decay = ExpOfNegative<T>(z < T(0) ? z : -z);
      Store(losses + i, LogLoss<T>(z, target, decay));
      Store(slopes + i, (z < T(0) ? decay : Broadcast(T(1))) / (T(1) + decay) - target);
      Store(soft + i, Slope<T>(kLogistic, sharp, Vector<T>{}));
      Store(steep + i, target * temperature * Curvature<T>(sharp));
    }
    for (int64_t i = 0; i < tile.size; ++i) {
      const int64_t place = next.places[i];
      loss_sums[place] += losses[i];
      if (tile.targets[i] == T(0)) continue;
      rate_sums[place] += tile.targets[i] * soft[i];
      positive_sums[place] += tile.targets[i];
      const Vector<T> factor = Broadcast(steep[i]);
      T* sum = by_group.data() + place / kBanks * padded;
      const T* row = tile.rows[i];
      for (int64_t c = 0; c < shape.full * width; c += width) Store(sum + c, Load(sum + c) + factor * Load(row + c));
      if (shape.rest > 0) {
        T* end = sum + shape.full * width;
        Store(end, Load(end) + factor * shape.Rest(row));
      }
    }
    std::copy_n(slopes, tile.size, tile.factors[0]);
    std::fill(tile.factors[0] + tile.size, tile.factors[0] + kTile, T(0));
    Combine<T, 1>(shape, tile, partial);
    if ((first + kTile) % kFlush == 0 || first + kTile >= set.rows) {
      for (int64_t k = 0; k < padded; ++k) total[k] += partial[0][k];
      std::fill_n(partial[0], padded, T(0));
    }
  }
  Settle(loss_sums.data(), set.group_count, out.losses);
  Settle(next.counts.data(), set.group_count, out.counts);
  Settle(rate_sums.data(), set.group_count, out.rates);
  Settle(positive_sums.data(), set.group_count, out.positives);
  for (int64_t a = 0; a < set.group_count; ++a) {
    shape.Unpack(by_group.data() + a * padded, out.rate_gradients + a * set.length);
  }
  shape.Unpack(total, out.loss_gradient);
  return next.valid;
}

}  // namespace fedbilevel

#endif  // FEDBILEVEL_KERNELS_WHOLE_H_
