// The Python border of the core: bindings only. No torch headers: pointers, sizes and dtype codes cross it.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "build_info.hpp"
#include "channels/bindings.hpp"
#include "collectives/bindings.hpp"
#include "replication/bindings.hpp"
#include "standby/bindings.hpp"

#define TORCHEXT_STR_(x) #x
#define TORCHEXT_STR(x) TORCHEXT_STR_(x)
#define TORCHEXT_PYBIND11_VERSION                                              \
    TORCHEXT_STR(PYBIND11_VERSION_MAJOR)                                       \
    "." TORCHEXT_STR(PYBIND11_VERSION_MINOR) "." TORCHEXT_STR(PYBIND11_VERSION_PATCH)

PYBIND11_MODULE(_native, m) {
    m.doc() = "The C++ core of torchext.";
    m.def(
        "build_info",
        [] {
            auto info = torchext::build_info();
            info["pybind11"] = TORCHEXT_PYBIND11_VERSION;
            info["python"] = PY_VERSION;
            return info;
        },
        "Says how this core was built.");

    auto collectives = m.def_submodule("collectives", "The engine of torchext.collectives; Linux only.");
    torchext::collectives::bind(collectives);
    torchext::collectives::bind_order(collectives);
    auto channels = m.def_submodule("channels", "The queues of torchext.channels; Linux only.");
    torchext::channels::bind(channels);

    auto replication = m.def_submodule("replication", "Frames and predicates of torchext.replication.");
    torchext::replication::bind(replication);

    auto standby = m.def_submodule("standby", "Copies, checksums and page tracking of torchext.standby.");
    torchext::standby::bind(standby);
}
