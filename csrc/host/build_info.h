// What this library contains, as JSON.
#pragma once

#include <string>

namespace msa {

std::string build_info();

}  // namespace msa
