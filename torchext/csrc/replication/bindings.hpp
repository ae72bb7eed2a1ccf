// What replication adds to the extension module.
#pragma once

#include <pybind11/pybind11.h>

namespace torchext::replication {

void bind(pybind11::module_& m);

}  // namespace torchext::replication
