// Whole local sets of a logistic model, read once from front to back: losses by group, soft true-positive rates by group,
// and the gradients of both.
//
// With z_i = x_i . y, s = sigmoid(T z), and the sums running over the rows of group a:
//     losses[a] = sum log(1 + exp(z_i)) - t_i z_i        rates[a] = sum t_i s_i        counts[a] = sum 1, positives[a] = sum t_i
//     loss_gradient = sum over all rows of (sigmoid(z_i) - t_i) x_i      rate_gradients[a] = sum t_i T s_i (1 - s_i) x_i

#ifndef FEDBILEVEL_KERNELS_WHOLE_H_
#define FEDBILEVEL_KERNELS_WHOLE_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "model.h"
#include "rows.h"

namespace fedbilevel {

constexpr int64_t kBanks = 4;     // running sums a group has: neighbouring rows, often of one group, need not wait for each other
constexpr int64_t kFlush = 1024;  // rows summed up before they join the total: long sums in small steps lose digits

// log(1 + e) for e in [0, 1]: twice the series of artanh at e / (2 + e), which is at most 1/3.
template <typename T>
inline Vector<T> LogOfOnePlus(Vector<T> e) {
  constexpr int kTerms = sizeof(T) == 4 ? 8 : 17;
  const Vector<T> s = e / (T(2) + e), square = s * s;
  Vector<T> series = Broadcast(T(1) / T(2 * kTerms + 1));
  for (int k = kTerms - 1; k >= 0; --k) series = series * square + T(1) / T(2 * k + 1);
  return T(2) * s * series;
}

template <typename T>
struct WholeSet {
  const T *features, *labels;  // of this client's first row
  const int32_t* groups;
  int64_t rows, length, group_count;
};

template <typename T>
struct WholeSums {
  T *losses, *counts;                                     // [group_count]
  T *rates, *positives, *loss_gradient, *rate_gradients;  // null where only losses are asked for
};

// False if a group is out of range.
template <typename T, bool kGradients>
bool SumOver(const WholeSet<T>& set, const Shape<T>& shape, const T* inner, T temperature, Workspace<T>& space,
             const WholeSums<T>& out) {
  const int64_t padded = shape.padded(), width = Simd<T>::kWidth;
  shape.Pack(inner, space.inner(0));
  const T* queries[1] = {space.inner(0)};
  T* partial[1] = {space.product(0)};
  T* total = space.total(0);
  std::fill_n(partial[0], padded, T(0));
  std::fill_n(total, padded, T(0));
  std::vector<T> by_group(kGradients ? set.group_count * padded : 0, T(0));
  std::vector<double> sums(kBanks * 4 * set.group_count, 0.0);  // of losses, counts, rates, positives
  const Rows<T> run = {set.features, nullptr, set.rows, set.length};
  Tile<T> tile = {};
  T losses[kTile], slopes[kTile], soft[kTile], steep[kTile];
  bool valid = true;
  for (int64_t first = 0; first < set.rows; first += kTile) {
    tile.first = first;
    tile.size = std::min<int64_t>(kTile, set.rows - first);
    std::copy_n(set.labels + first, tile.size, tile.targets);
    std::fill(tile.targets + tile.size, tile.targets + kTile, T(0));
    for (int64_t i = 0; i < tile.size; ++i) tile.rows[i] = run[first + i];
    for (int64_t i = tile.size; i < kTile; ++i) tile.rows[i] = space.zeros();
    Dots<T, 1, false>(shape, run, queries, tile);
    for (int64_t i = 0; i < kTile; i += width) {
      const Vector<T> z = Load(tile.dots[0] + i), target = Load(tile.targets + i);
      const Vector<T> decay = ExpOfNegative<T>(z < T(0) ? z : -z);
      Store(losses + i, (z < T(0) ? Vector<T>{} : z) + LogOfOnePlus<T>(decay) - target * z);
      if constexpr (kGradients) {
        Store(slopes + i, (z < T(0) ? decay : Broadcast(T(1))) / (T(1) + decay) - target);
        const Vector<T> sharp = temperature * z;
        Store(soft + i, Slope<T>(kLogistic, sharp, Vector<T>{}));
        Store(steep + i, target * temperature * Curvature<T>(sharp));
      }
    }
    for (int64_t i = 0; i < tile.size; ++i) {
      const bool inside = static_cast<uint32_t>(set.groups[first + i]) < static_cast<uint64_t>(set.group_count);
      valid &= inside;
      const int64_t group = inside ? set.groups[first + i] : 0;
      double* own = sums.data() + 4 * (group * kBanks + i % kBanks);
      own[0] += losses[i];
      own[1] += 1;
      if constexpr (kGradients) {
        if (tile.targets[i] == T(0)) continue;
        own[2] += tile.targets[i] * soft[i];
        own[3] += tile.targets[i];
        const Vector<T> factor = Broadcast(steep[i]);
        T* sum = by_group.data() + group * padded;
        const T* row = tile.rows[i];
        for (int64_t c = 0; c < shape.full * width; c += width) Store(sum + c, Load(sum + c) + factor * Load(row + c));
        if (shape.rest > 0) {
          T* end = sum + shape.full * width;
          Store(end, Load(end) + factor * shape.Rest(row));
        }
      }
    }
    if constexpr (kGradients) {
      std::copy_n(slopes, tile.size, tile.factors[0]);
      std::fill(tile.factors[0] + tile.size, tile.factors[0] + kTile, T(0));
      Combine<T, 1>(shape, tile, partial);
      if ((first + kTile) % kFlush == 0 || first + kTile >= set.rows) {
        for (int64_t k = 0; k < padded; ++k) total[k] += partial[0][k];
        std::fill_n(partial[0], padded, T(0));
      }
    }
  }
  for (int64_t a = 0; a < set.group_count; ++a) {
    double own[4] = {};
    for (int64_t k = 0; k < 4 * kBanks; ++k) own[k % 4] += sums[4 * kBanks * a + k];
    out.losses[a] = static_cast<T>(own[0]);
    out.counts[a] = static_cast<T>(own[1]);
    if constexpr (kGradients) {
      out.rates[a] = static_cast<T>(own[2]);
      out.positives[a] = static_cast<T>(own[3]);
      shape.Unpack(by_group.data() + a * padded, out.rate_gradients + a * set.length);
    }
  }
  if constexpr (kGradients) shape.Unpack(total, out.loss_gradient);
  return valid;
}

}  // namespace fedbilevel

#endif  // FEDBILEVEL_KERNELS_WHOLE_H_
