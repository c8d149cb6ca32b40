// Operands with leading batch dimensions, some of size 1: which part of every buffer a batch element works on.

#ifndef FEDBILEVEL_KERNELS_BATCHES_H_
#define FEDBILEVEL_KERNELS_BATCHES_H_

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <type_traits>

#include "calls.h"

namespace fedbilevel {

// The size of the dimension `from_end` places from the end (the last is 1), or 0 if there is none.
inline int64_t SizeOf(const ffi::AnyBuffer& buffer, size_t from_end) {
  const auto dims = buffer.dimensions();
  return from_end <= dims.size() ? dims[dims.size() - from_end] : 0;
}

// Sizes or strides of a few dimensions, held in place: a call of a small minibatch would spend a tenth of its time on vectors.
class Sizes {
 public:
  static constexpr size_t kMost = 16;

  Sizes() = default;
  Sizes(std::initializer_list<int64_t> values) { assign(values.begin(), values.end()); }

  template <typename Iterator>
  void assign(Iterator first, Iterator last) {
    size_ = std::min<size_t>(last - first, kMost);
    std::copy_n(first, size_, values_);
  }
  size_t size() const { return size_; }
  int64_t operator[](size_t k) const { return values_[k]; }
  int64_t& operator[](size_t k) { return values_[k]; }

 private:
  size_t size_ = 0;
  int64_t values_[kMost] = {};
};

template <typename T>
class Operand {
 public:
  Operand(T* data, const Sizes& sizes, const Sizes& strides) : data_(data), sizes_(sizes), strides_(strides) {}

  // The part of batch element `element`, counted in row-major order.
  T* operator[](int64_t element) const {
    int64_t offset = 0;
    for (size_t k = sizes_.size(); k-- > 0;) {
      offset += element % sizes_[k] * strides_[k];
      element /= sizes_[k];
    }
    return data_ + offset;
  }

 private:
  T* data_;
  const Sizes& sizes_;
  Sizes strides_;
};

class Batches {
 public:
  // The batch dimensions are those of a result before its own `rank` dimensions.
  Batches(const ffi::AnyBuffer& result, size_t rank) {
    const auto dims = result.dimensions();
    if (dims.size() > Sizes::kMost) error_ = "fedbilevel kernel: an operand has more dimensions than the kernels know";
    if (dims.size() >= rank) sizes_.assign(dims.begin(), dims.end() - rank);
  }

  // A buffer with dimensions `own` after its batch dimensions, each of which is that of the result or 1. A buffer of
  // another shape or type is remembered in `error`, and must not be used.
  template <typename T>
  __attribute__((noinline)) Operand<T> Bind(const char* name, const ffi::AnyBuffer& buffer, const Sizes& own) {
    using Number = std::remove_const_t<T>;
    constexpr ffi::DataType kType = std::is_same_v<Number, int32_t>    ? ffi::DataType::S32
                                    : std::is_same_v<Number, uint32_t> ? ffi::DataType::U32
                                    : sizeof(Number) == 4              ? ffi::DataType::F32
                                                                       : ffi::DataType::F64;
    const auto dims = buffer.dimensions();
    bool matches = buffer.element_type() == kType && dims.size() == sizes_.size() + own.size();
    int64_t stride = 1;
    for (size_t k = 0; matches && k < own.size(); ++k) {
      matches = dims[sizes_.size() + k] == own[k];
      stride *= own[k];
    }
    Sizes strides = sizes_;
    for (size_t k = sizes_.size(); matches && k-- > 0;) {
      matches = dims[k] == sizes_[k] || dims[k] == 1;
      strides[k] = dims[k] == 1 ? 0 : stride;
      stride *= dims[k];
    }
    if (!matches && error_.empty()) {
      error_ = std::string("fedbilevel kernel: '") + name + "' has a shape or type that does not fit the others";
    }
    return Operand<T>(static_cast<T*>(buffer.untyped_data()), sizes_, strides);
  }

  const std::string& error() const { return error_; }

  int64_t count() const {
    int64_t count = 1;
    for (size_t k = 0; k < sizes_.size(); ++k) count *= sizes_[k];
    return count;
  }

 private:
  Sizes sizes_;
  std::string error_;
};

}  // namespace fedbilevel

#endif  // FEDBILEVEL_KERNELS_BATCHES_H_
