#include "bindings.hpp"

#include <pybind11/stl.h>

#include <stdexcept>
#include <string>
#include <system_error>

#include "checksum.hpp"
#include "heartbeat.hpp"
#include "pages.hpp"

namespace py = pybind11;

namespace torchext::standby {
namespace {

std::byte* pointer(std::uintptr_t address) { return reinterpret_cast<std::byte*>(address); }

std::uint64_t copy_ranges_of(std::uintptr_t to, std::uintptr_t from, std::size_t size, std::uintptr_t offsets,
                             std::uintptr_t sizes, std::size_t count, bool packed) {
    const auto* at = reinterpret_cast<const std::int64_t*>(offsets);
    const auto* lengths = reinterpret_cast<const std::int64_t*>(sizes);
    for (std::size_t i = 0; i < count; ++i) {  // they may come from another machine
        if (at[i] < 0 || lengths[i] < 0 || static_cast<std::uint64_t>(at[i]) > size ||
            static_cast<std::uint64_t>(lengths[i]) > size - static_cast<std::uint64_t>(at[i])) {
            throw std::out_of_range("range " + std::to_string(at[i]) + " + " + std::to_string(lengths[i]) +
                                    " is not within the entry's " + std::to_string(size) + " bytes");
        }
    }
    return copy_ranges(pointer(to), pointer(from), size, at, lengths, count, packed);
}

}  // namespace

void bind(py::module_& m) {
    const auto no_gil = py::call_guard<py::gil_scoped_release>();
    m.def(
        "checksum", [](std::uintptr_t at, std::size_t size) { return checksum(pointer(at), size); }, py::arg("at"),
        py::arg("size"), no_gil);
    m.def(
        "copy",
        [](std::uintptr_t to, std::uintptr_t from, std::size_t size) { return copy_and_sum(pointer(to), pointer(from), size); },
        py::arg("to"), py::arg("source"), py::arg("size"), no_gil);
    m.def("copy_ranges", &copy_ranges_of, py::arg("to"), py::arg("source"), py::arg("size"), py::arg("offsets"),
          py::arg("sizes"), py::arg("count"), py::arg("packed"), no_gil);
    m.def(
        "update",
        [](std::uintptr_t to, std::uintptr_t from, std::size_t size) {
            return standby::update(pointer(to), pointer(from), size);
        },
        py::arg("to"), py::arg("source"), py::arg("size"), no_gil);
#if defined(__linux__)
    py::register_local_exception_translator([](std::exception_ptr thrown) {
        try {
            if (thrown) std::rethrow_exception(thrown);
        } catch (const std::system_error& error) {
            PyErr_SetObject(PyExc_OSError, py::make_tuple(error.code().value(), error.what()).ptr());
        }
    });
    py::class_<PageTracker>(m, "PageTracker", "Which pages of a mapping were written.")
        .def(py::init<std::uintptr_t, std::size_t>(), py::arg("address"), py::arg("size"))
        .def("scan", &PageTracker::scan, py::arg("rearm"), no_gil)
        .def("close", &PageTracker::close, "Lifts the protection. Idempotent.");
    py::class_<Heartbeat>(m, "Heartbeat", "Sends a byte over a socket again and again, whoever holds the GIL.")
        .def(py::init<int, int>(), py::arg("descriptor"), py::arg("interval_ms"), no_gil)
        .def("stop", &Heartbeat::stop, "Ends the thread. Idempotent.", no_gil);
#endif
}

}  // namespace torchext::standby
