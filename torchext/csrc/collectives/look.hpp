// How an engine asks Python what the threads of the program do.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "caller.hpp"

namespace torchext::collectives {

// `look(group, blocked_threads, issuers)` says where the calling thread is, and whether no other thread of the process
// can issue a collective before one of those goes on. It lives as long as the result.
inline Caller caller(const pybind11::object& look) {
    namespace py = pybind11;
    Caller caller;
    caller.interrupted = [] {
        py::gil_scoped_acquire gil;
        return PyErr_Occurred() != nullptr || PyErr_CheckSignals() != 0;
    };
    caller.look = [&look](std::uint64_t group, const std::vector<std::uint64_t>& blocked,
                          const std::vector<Issuer>& issuers) {
        py::gil_scoped_acquire gil;
        Caller::Sight sight;
        if (!look) return sight;
        std::vector<std::pair<std::uint64_t, int>> pairs;
        for (const auto& issuer : issuers) pairs.emplace_back(issuer.thread, issuer.tid);
        try {
            const auto found = look(group, blocked, pairs).cast<std::pair<std::string, bool>>();
            sight = {found.first, found.second};
        } catch (py::error_already_set& error) {
            if (error.matches(PyExc_Exception)) {
                error.discard_as_unraisable("torchext.collectives, looking for deadlocks");
            } else {
                error.restore();  // of a signal that came meanwhile; `interrupted` sees it next
            }
        }
        return sight;
    };
    return caller;
}

inline void raise_if_interrupted() {
    if (PyErr_Occurred() != nullptr) throw pybind11::error_already_set();
}

}  // namespace torchext::collectives
