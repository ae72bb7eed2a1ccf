// What the standby adds to the extension module.
#pragma once

#include <pybind11/pybind11.h>

namespace torchext::standby {

void bind(pybind11::module_& m);

}  // namespace torchext::standby
