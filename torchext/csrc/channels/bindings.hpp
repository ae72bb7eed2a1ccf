// What the channels add to the extension module.
#pragma once

#include <pybind11/pybind11.h>

namespace torchext::channels {

void bind(pybind11::module_& m);

}  // namespace torchext::channels
