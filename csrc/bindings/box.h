// TORCH_BOX with a gate on argument types. The stable ABI moves arguments through 64-bit slots: an
// `int` or `float` parameter compiles and reads garbage, so only the types it really carries pass.
#pragma once

#include <type_traits>

#include "host/torch_stable.h"

namespace msa {

template <typename T>
struct IsBoxable
    : std::bool_constant<std::is_same_v<T, Tensor> || std::is_same_v<T, int64_t> ||
                         std::is_same_v<T, double> || std::is_same_v<T, bool> ||
                         std::is_same_v<T, std::string> || std::is_same_v<T, ScalarType>> {};
template <typename T>
struct IsBoxable<std::optional<T>> : IsBoxable<T> {};
template <typename T>
struct IsBoxable<std::vector<T>> : IsBoxable<T> {};
template <typename... T>
struct IsBoxable<std::tuple<T...>> : std::bool_constant<(IsBoxable<T>::value && ...)> {};

template <typename Function>
struct IsBoxableFunction;
template <typename Result, typename... Args>
struct IsBoxableFunction<Result(Args...)>
    : std::bool_constant<(std::is_void_v<Result> || IsBoxable<std::decay_t<Result>>::value) &&
                         (IsBoxable<std::decay_t<Args>>::value && ...)> {};

template <typename Function, Function* function>
constexpr auto box() {
  static_assert(IsBoxableFunction<Function>::value,
                "an operator takes and returns Tensor, int64_t, double, bool, std::string, "
                "ScalarType, and optionals, vectors and tuples of them; nothing else survives the "
                "stable ABI");
  return TORCH_BOX(function);
}

}  // namespace msa

#define MSA_BOX(function) (::msa::box<decltype(function), &function>())
