// Generalised linear models: the Neumann series of Hessian-vector products and the gradient of
//
//     g(x, y; batch) = 1/b sum_i w[c_i] phi(z_i . y, t_i) + ridge/2 ||y||^2,
//
// at one or two points (y, w) that share their minibatches. Nothing is gathered into a copy: every row is loaded once
// for the dot products of both points and once more, from the first cache, for their updates.

#ifndef FEDBILEVEL_KERNELS_MODEL_H_
#define FEDBILEVEL_KERNELS_MODEL_H_

#include <algorithm>
#include <cstdint>
#include <memory>
#include <new>

#include "rows.h"

namespace fedbilevel {

// ---- links ----------------------------------------------------------------------------------------------------------

enum Link : int32_t { kLogistic = 0, kSquared = 1 };

// exp(x) for x <= 0, zero where the result would not be a normal number, NaN for NaN: x = n ln 2 + r with
// |r| <= ln(2)/2, the Taylor polynomial of exp(r) to rounding error, and n put into the exponent.
template <typename T>
inline Vector<T> ExpOfNegative(Vector<T> x) {
  using Bits = typename Simd<T>::Bits;
  constexpr bool kSingle = sizeof(T) == 4;
  constexpr int kMantissa = kSingle ? 23 : 52;
  constexpr int kTerms = kSingle ? 7 : 13;
  constexpr T kLeast = kSingle ? T(-87) : T(-708);
  constexpr T kRounding = T(1.5) * T(int64_t{1} << kMantissa);  // adding it leaves the nearest integer in the low bits
  constexpr T kLog2High = kSingle ? T(0.693359375) : T(6.93147180369123816490e-01);  // few bits: n times it is exact
  constexpr T kLog2Low = kSingle ? T(-2.12194440054690583e-4) : T(1.90821492927058770002e-10);
  const Vector<T> clamped = x < kLeast ? Broadcast(kLeast) : x;
  const Vector<T> shifted = clamped * T(1.44269504088896340736) + kRounding;
  const Vector<T> n = shifted - kRounding;
  const Vector<T> r = (clamped - n * kLog2High) - n * kLog2Low;
  Vector<T> series = Broadcast(T(1));
  for (int k = kTerms; k > 0; --k) series = series * r * T(1.0L / k) + T(1);
  constexpr Bits kExponentOfOne = (Bits{1} << (kSingle ? 7 : 10)) - 1;
  const Mask<T> zero = reinterpret_cast<Mask<T>>(Broadcast(kRounding));
  const Mask<T> power = (reinterpret_cast<Mask<T>>(shifted) - zero + kExponentOfOne) << kMantissa;
  const Vector<T> value = series * reinterpret_cast<Vector<T>>(power);
  return x < kLeast ? Vector<T>{} : value;
}

// phi'(u, t).
template <typename T>
inline Vector<T> Slope(Link link, Vector<T> u, Vector<T> target) {
  if (link == kSquared) return u - target;
  const Vector<T> decay = ExpOfNegative<T>(u < T(0) ? u : -u);
  return (u < T(0) ? decay : Broadcast(T(1))) / (T(1) + decay) - target;
}

// phi''(u, t), which depends on t for neither link.
template <typename T>
inline Vector<T> Curvature(Vector<T> u) {
  const Vector<T> decay = ExpOfNegative<T>(u < T(0) ? u : -u);
  return decay / ((T(1) + decay) * (T(1) + decay));
}

// ---- the two kernels ------------------------------------------------------------------------------------------------

template <typename T>
struct Model {
  const T *features, *targets;
  const int32_t* cells;
  int64_t samples, length, cell_count;
  Link link;
};

// Memory that a thread keeps from call to call, unless it is very much: fresh pages cost more than the arithmetic on them.
class Kept {
 public:
  static constexpr size_t kMost = 64 << 20;

  static Kept& Own() {
    static thread_local Kept kept;
    return kept;
  }

  void* Of(size_t bytes) {
    if (bytes > bytes_) {
      memory_.reset();
      memory_.reset(::operator new(bytes, kAlignment));
      bytes_ = bytes;
    }
    return memory_.get();
  }

  void Trim() {
    if (bytes_ <= kMost) return;
    memory_.reset();
    bytes_ = 0;
  }

 private:
  static constexpr std::align_val_t kAlignment{64};
  struct Free {
    void operator()(void* memory) const { ::operator delete(memory, kAlignment); }
  };
  size_t bytes_ = 0;
  std::unique_ptr<void, Free> memory_;
};

// Memory of one call, reused for every point and batch element. Every vector begins a cache line. Nothing but `zeros` is
// filled: whoever uses a vector writes it first.
template <typename T>
class Workspace {
 public:
  static constexpr int kVectors = 4 * kPoints + 1;

  // `vectors`: fewer where only the first of them are used, one behind the other.
  explicit Workspace(const Shape<T>& shape, int64_t further = 0, int64_t vectors = kVectors)
      : stride_((std::max(shape.padded(), shape.length) + kLine - 1) / kLine * kLine) {
    memory_ = static_cast<T*>(Kept::Own().Of((vectors + further) * stride_ * sizeof(T)));
    if (vectors == kVectors) std::fill_n(vector(4 * kPoints), stride_, T(0));
  }
  Workspace(const Workspace&) = delete;
  ~Workspace() { Kept::Own().Trim(); }

  T* inner(int p) { return vector(p); }
  T* direction(int p) { return vector(kPoints + p); }
  T* total(int p) { return vector(2 * kPoints + p); }
  T* product(int p) { return vector(3 * kPoints + p); }
  const T* zeros() { return vector(4 * kPoints); }
  T* further(int64_t p) { return vector(kVectors + p); }

 private:
  static constexpr int64_t kLine = 64 / sizeof(T);
  T* vector(int64_t k) { return memory_ + k * stride_; }
  int64_t stride_;
  T* memory_;
};

// Calls `use` for every tile of the rows [begin, end) of the run, with the dot products of the queries. False if a cell
// is out of range (it is then replaced, so that nothing outside the table is read).
template <typename T, int kQueries, bool kTargets, typename Use>
bool Visit(const Model<T>& model, const Shape<T>& shape, const Rows<T>& run, int64_t begin, int64_t end,
           const T* const* queries, const T* zeros, Tile<T>& tile, Use use) {
  const int64_t bytes = model.length * sizeof(T);
  const int64_t fitting = std::clamp<int64_t>(kTileBytes / bytes / kSums * kSums, kSums, kTile);
  const int64_t most = kSums * bytes > kSecondCache ? kTile : fitting;
  bool valid = true;
  for (int64_t first = begin; first < end; first += most) {
    tile.first = first;
    tile.size = std::min(most, end - first);
    for (int64_t i = 0; i < tile.size; ++i) {
      const int64_t sample = run.indices[first + i];
      const int32_t cell = model.cells[sample];
      const bool inside = static_cast<uint32_t>(cell) < static_cast<uint64_t>(model.cell_count);
      valid &= inside;
      const int64_t coming = run.indices[std::min(first + i + kTile, run.count - 1)];
      __builtin_prefetch(model.cells + coming);
      if (kTargets) __builtin_prefetch(model.targets + coming);
      tile.cells[i] = inside ? cell : 0;
      if (kTargets) tile.targets[i] = model.targets[sample];
      tile.rows[i] = model.features + sample * model.length;
    }
    for (int64_t i = tile.size; i % kSums != 0; ++i) tile.rows[i] = zeros;
    Dots<T, kQueries>(shape, run, queries, tile);
    use();
  }
  return valid;
}

// factors[p][i] = value(i), a vector of lanes at a time; the rows of zeros that fill a group up get the factor zero.
template <typename T, typename Value>
inline void SetFactors(Tile<T>& tile, int p, Value value) {
  for (int64_t i = 0; i < tile.size; i += Simd<T>::kWidth) Store(tile.factors[p] + i, value(i));
  for (int64_t i = tile.size; i % kSums != 0; ++i) tile.factors[p][i] = 0;
}

template <typename T>
inline void GatherWeights(const Tile<T>& tile, const T* weights, T* gathered) {
  for (int64_t i = 0; i < tile.size; ++i) gathered[i] = weights[tile.cells[i]];
}

template <typename T, int kCount>
bool Gradient(const Model<T>& model, const Shape<T>& shape, const Rows<T>& run, const T* inner, const T* weights,
              const T* ridge, Workspace<T>& space, T* gradients) {
  const T* queries[kCount];
  T* sums[kCount];
  for (int p = 0; p < kCount; ++p) {
    shape.Pack(inner + p * model.length, space.inner(p));
    queries[p] = space.inner(p);
    sums[p] = space.product(p);
    std::fill_n(sums[p], shape.padded(), T(0));
  }
  Tile<T> tile = {};
  const bool valid =
      Visit<T, kCount, true>(model, shape, run, 0, run.count, queries, space.zeros(), tile, [&] {
        for (int p = 0; p < kCount; ++p) {
          T gathered[kTile] = {};
          GatherWeights(tile, weights + p * model.cell_count, gathered);
          SetFactors(tile, p, [&](int64_t i) {
            return Load(gathered + i) * Slope<T>(model.link, Load(tile.dots[p] + i), Load(tile.targets + i));
          });
        }
        Combine<T, kCount>(shape, tile, sums);
      });
  const T share = T(1) / static_cast<T>(run.count);
  for (int p = 0; p < kCount; ++p) {
    for (int64_t k = 0; k < shape.padded(); ++k) sums[p][k] = sums[p][k] * share + ridge[p] * queries[p][k];
    shape.Unpack(sums[p], gradients + p * model.length);
  }
  return valid;
}

template <typename T, int kCount, bool kCurved>
bool Neumann(const Model<T>& model, const Shape<T>& shape, const Rows<T>& run, int64_t batch, const T* inner,
             const T* vectors, const T* weights, const T* ridge, const T* step, Workspace<T>& space, T* solutions,
             T* cell_products) {
  constexpr int kQueries = kCurved ? 2 * kCount : kCount;  // the squared link's curvature does not depend on y
  const T* queries[2 * kCount];                            // directions first
  T* products[kCount];
  for (int p = 0; p < kCount; ++p) {
    shape.Pack(inner + p * model.length, space.inner(p));
    shape.Pack(vectors + p * model.length, space.direction(p));
    std::copy_n(space.direction(p), shape.padded(), space.total(p));
    queries[p] = space.direction(p);
    queries[kCount + p] = space.inner(p);
    products[p] = space.product(p);
    std::fill_n(products[p], shape.padded(), T(0));
  }
  const T share = T(1) / static_cast<T>(batch);
  const int64_t terms = run.count / batch - 1;
  Tile<T> tile = {};
  bool valid = true;
  for (int64_t j = 0; j < terms; ++j) {
    valid &= Visit<T, kQueries, false>(
        model, shape, run, j * batch, (j + 1) * batch, queries, space.zeros(), tile, [&] {
          for (int p = 0; p < kCount; ++p) {
            T gathered[kTile] = {};
            GatherWeights(tile, weights + p * model.cell_count, gathered);
            SetFactors(tile, p, [&](int64_t i) {
              const Vector<T> weighted = Load(gathered + i) * Load(tile.dots[p] + i);
              if constexpr (kCurved) return weighted * Curvature<T>(Load(tile.dots[kCount + p] + i));
              return weighted;
            });
          }
          Combine<T, kCount>(shape, tile, products);
        });
    for (int p = 0; p < kCount; ++p) {
      T *direction = space.direction(p), *total = space.total(p), *product = products[p];
      for (int64_t k = 0; k < shape.padded(); ++k) {
        direction[k] -= step[p] * (product[k] * share + ridge[p] * direction[k]);
        total[k] += direction[k];
        product[k] = 0;
      }
    }
  }
  for (int p = 0; p < kCount; ++p) {
    T* total = space.total(p);
    for (int64_t k = 0; k < shape.padded(); ++k) total[k] *= step[p];
    shape.Unpack(total, solutions + p * model.length);
    queries[p] = total;
    std::fill_n(cell_products + p * model.cell_count, model.cell_count, T(0));
  }
  valid &= Visit<T, 2 * kCount, true>(
      model, shape, run, terms * batch, run.count, queries, space.zeros(), tile, [&] {
        for (int p = 0; p < kCount; ++p) {
          T* sums = cell_products + p * model.cell_count;
          SetFactors(tile, p, [&](int64_t i) {
            const Vector<T> u = Load(tile.dots[kCount + p] + i);
            return share * Slope<T>(model.link, u, Load(tile.targets + i)) * Load(tile.dots[p] + i);
          });
          for (int64_t i = 0; i < tile.size; ++i) sums[tile.cells[i]] += tile.factors[p][i];
        }
      });
  return valid;
}

}  // namespace fedbilevel

#endif  // FEDBILEVEL_KERNELS_MODEL_H_
