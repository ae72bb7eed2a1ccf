// What the collectives add to the extension module.
#pragma once

#include <pybind11/pybind11.h>

namespace torchext::collectives {

void bind(pybind11::module_& m);
void bind_order(pybind11::module_& m);

}  // namespace torchext::collectives
