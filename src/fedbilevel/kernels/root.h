// Cube roots by the C library. XLA has two ways to emit one, which differ in the last bit.

#ifndef FEDBILEVEL_KERNELS_ROOT_H_
#define FEDBILEVEL_KERNELS_ROOT_H_

#include <cmath>
#include <cstddef>

#include "batches.h"

namespace fedbilevel {

// values [...] -> their cube roots [...].
inline ffi::Error CubeRoots(ffi::RemainingArgs operands, ffi::RemainingRets results) {
  const bool one = operands.size() == 1 && results.size() == 1;
  if (!one) return ffi::Error::InvalidArgument("fedbilevel kernel: 'root' has one operand and one result");
  const ffi::AnyBuffer given = *operands.get<ffi::AnyBuffer>(0), result = **results.get<ffi::AnyBuffer>(0);
  const bool floats = given.element_type() == ffi::DataType::F32 && result.element_type() == ffi::DataType::F32;
  if (!floats || given.element_count() != result.element_count()) {
    return ffi::Error::InvalidArgument("fedbilevel kernel: the operand and the result of 'root' do not fit each other");
  }
  const float* values = static_cast<const float*>(given.untyped_data());
  float* roots = static_cast<float*>(result.untyped_data());
  for (size_t k = 0; k < given.element_count(); ++k) roots[k] = std::cbrt(values[k]);
  return ffi::Error::Success();
}

}  // namespace fedbilevel

#endif  // FEDBILEVEL_KERNELS_ROOT_H_
