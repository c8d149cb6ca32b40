// Calls of XLA's foreign function interface, by its C header: operands and results of any number, whole numbers as attributes.
//
// XLA's own C++ header knows far more, and takes longer to compile than most kernels. Names here are those that it has.

#ifndef FEDBILEVEL_KERNELS_CALLS_H_
#define FEDBILEVEL_KERNELS_CALLS_H_

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <tuple>
#include <utility>

#include "xla/ffi/api/c_api.h"

namespace fedbilevel {
namespace ffi {

enum class DataType {
  S32 = XLA_FFI_DataType_S32,
  U32 = XLA_FFI_DataType_U32,
  F32 = XLA_FFI_DataType_F32,
  F64 = XLA_FFI_DataType_F64,
};

// Bytes of an element; 0 for those of less than a byte and for what is no number.
inline size_t ByteWidth(XLA_FFI_DataType type) {
  switch (type) {
    case XLA_FFI_DataType_C128:
      return 16;
    case XLA_FFI_DataType_S64:
    case XLA_FFI_DataType_U64:
    case XLA_FFI_DataType_F64:
    case XLA_FFI_DataType_C64:
      return 8;
    case XLA_FFI_DataType_S32:
    case XLA_FFI_DataType_U32:
    case XLA_FFI_DataType_F32:
      return 4;
    case XLA_FFI_DataType_S16:
    case XLA_FFI_DataType_U16:
    case XLA_FFI_DataType_F16:
    case XLA_FFI_DataType_BF16:
      return 2;
    case XLA_FFI_DataType_PRED:
    case XLA_FFI_DataType_S8:
    case XLA_FFI_DataType_U8:
    case XLA_FFI_DataType_F8E5M2:
    case XLA_FFI_DataType_F8E3M4:
    case XLA_FFI_DataType_F8E4M3:
    case XLA_FFI_DataType_F8E4M3FN:
    case XLA_FFI_DataType_F8E4M3B11FNUZ:
    case XLA_FFI_DataType_F8E5M2FNUZ:
    case XLA_FFI_DataType_F8E4M3FNUZ:
    case XLA_FFI_DataType_F8E8M0FNU:
      return 1;
    default:
      return 0;
  }
}

class Dimensions {
 public:
  Dimensions(const int64_t* sizes, size_t count) : sizes_(sizes), count_(count) {}
  size_t size() const { return count_; }
  int64_t operator[](size_t k) const { return sizes_[k]; }
  const int64_t* begin() const { return sizes_; }
  const int64_t* end() const { return sizes_ + count_; }

 private:
  const int64_t* sizes_;
  size_t count_;
};

struct AnyBuffer : XLA_FFI_Buffer {
  Dimensions dimensions() const { return {dims, static_cast<size_t>(rank)}; }
  DataType element_type() const { return static_cast<DataType>(dtype); }
  void* untyped_data() const { return data; }
  size_t element_count() const {
    size_t count = 1;
    for (int64_t k = 0; k < rank; ++k) count *= static_cast<size_t>(dims[k]);
    return count;
  }
  size_t size_bytes() const { return ByteWidth(dtype) * element_count(); }
};

class RemainingArgs {
 public:
  explicit RemainingArgs(const XLA_FFI_Args& given) : given_(given) {}
  size_t size() const { return static_cast<size_t>(given_.size); }
  template <typename Buffer>
  const Buffer* get(size_t k) const {
    return static_cast<const Buffer*>(static_cast<const XLA_FFI_Buffer*>(given_.args[k]));
  }

 private:
  const XLA_FFI_Args& given_;
};

class RemainingRets {
 public:
  explicit RemainingRets(const XLA_FFI_Rets& given) : given_(given) {}
  size_t size() const { return static_cast<size_t>(given_.size); }
  template <typename Buffer>
  const Buffer* const* get(size_t k) const {
    return reinterpret_cast<const Buffer* const*>(given_.rets + k);
  }

 private:
  const XLA_FFI_Rets& given_;
};

enum class ErrorCode {
  kOk = XLA_FFI_Error_Code_OK,
  kInvalidArgument = XLA_FFI_Error_Code_INVALID_ARGUMENT,
  kResourceExhausted = XLA_FFI_Error_Code_RESOURCE_EXHAUSTED,
  kOutOfRange = XLA_FFI_Error_Code_OUT_OF_RANGE,
};

class Error {
 public:
  Error(ErrorCode code, std::string message) : code_(code), message_(std::move(message)) {}
  static Error Success() { return {ErrorCode::kOk, {}}; }
  static Error InvalidArgument(std::string message) { return {ErrorCode::kInvalidArgument, std::move(message)}; }

  // As XLA takes it: null where all went well.
  XLA_FFI_Error* told(const XLA_FFI_Api* api) const {
    if (code_ == ErrorCode::kOk) return nullptr;
    XLA_FFI_Error_Create_Args given = {XLA_FFI_Error_Create_Args_STRUCT_SIZE, nullptr, message_.c_str(),
                                       static_cast<XLA_FFI_Error_Code>(code_)};
    return api->XLA_FFI_Error_Create(&given);
  }

 private:
  ErrorCode code_;
  std::string message_;
};

// The attribute `name`, a 32-bit whole number; `error` says where there is none.
inline int32_t Attribute(const XLA_FFI_Attrs& given, const char* name, std::string& error) {
  for (int64_t k = 0; k < given.size; ++k) {
    if (given.names[k]->len != std::strlen(name) || std::memcmp(given.names[k]->ptr, name, given.names[k]->len)) continue;
    const auto* scalar = static_cast<const XLA_FFI_Scalar*>(given.attrs[k]);
    const bool whole = given.types[k] == XLA_FFI_AttrType_SCALAR && scalar->dtype == XLA_FFI_DataType_S32;
    if (whole) return *static_cast<const int32_t*>(scalar->value);
  }
  error = std::string("fedbilevel kernel: there is no 32-bit attribute '") + name + "'";
  return 0;
}

// Whether XLA only asks of which version of its interface this is, which it does before the first call; then it is told.
inline bool Described(const XLA_FFI_CallFrame* frame) {
  auto* asked = frame->extension_start;
  if (asked == nullptr || asked->type != XLA_FFI_Extension_Metadata) return false;
  XLA_FFI_Metadata* about = reinterpret_cast<XLA_FFI_Metadata_Extension*>(asked)->metadata;
  about->api_version = {XLA_FFI_Api_Version_STRUCT_SIZE, nullptr, XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR};
  about->traits = 0;
  about->state_type_id = XLA_FFI_UNKNOWN_TYPE_ID;
  return true;
}

// What XLA calls: `function` with the operands, the results and the attributes named in `names`.
template <typename... Numbers, typename... Names>
XLA_FFI_Error* Called(XLA_FFI_CallFrame* frame, Error (*function)(RemainingArgs, RemainingRets, Numbers...), Names... names) {
  static_assert(sizeof...(Numbers) == sizeof...(Names), "every attribute has a name");
  if (Described(frame)) return nullptr;
  std::string error;
  const RemainingArgs operands(frame->args);
  const RemainingRets results(frame->rets);
  const std::tuple<Numbers...> numbers{static_cast<Numbers>(Attribute(frame->attrs, names, error))...};
  if (!error.empty()) return Error::InvalidArgument(std::move(error)).told(frame->api);
  const auto call = [&](auto... given) { return function(operands, results, given...); };
  return std::apply(call, numbers).told(frame->api);
}

}  // namespace ffi
}  // namespace fedbilevel

// A handler of XLA's: its name, the function, and the names of the function's attributes.
#define FEDBILEVEL_HANDLER(name, ...) \
  extern "C" XLA_FFI_Error* name(XLA_FFI_CallFrame* frame) { return ::fedbilevel::ffi::Called(frame, __VA_ARGS__); }

#endif  // FEDBILEVEL_KERNELS_CALLS_H_
