// How errors leave the library: std::invalid_argument becomes Python's ValueError (the caller's
// fault), std::runtime_error becomes RuntimeError (the machine's or the build's). Never exit.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace msa {

template <typename... Args>
std::string concat(const Args&... args) {
  std::ostringstream text;
  ((text << args), ...);
  return text.str();
}

// "msa.<op>: <argument> must be <expected>, got <got>"
[[noreturn]] inline void throw_value_error(const char* op, const std::string& argument,
                                           const std::string& expected, const std::string& got) {
  throw std::invalid_argument(
      concat("msa.", op, ": ", argument, " must be ", expected, ", got ", got));
}

[[noreturn]] inline void throw_runtime_error(const char* op, const std::string& text) {
  throw std::runtime_error(concat("msa.", op, ": ", text));
}

}  // namespace msa
