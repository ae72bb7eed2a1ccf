// The Python border of replication. Work on frames releases the GIL; counters are guarded by it.
#include "bindings.hpp"

#include <pybind11/stl.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "counters.hpp"
#include "crc32c.hpp"
#include "frames.hpp"

namespace torchext::replication {
namespace {

namespace py = pybind11;

// A buffer of bytes that Python lends for the time of one call.
class Bytes {
public:
    explicit Bytes(const py::buffer& buffer, bool writable = false) : info_(buffer.request(writable)) {
        if (info_.itemsize != 1 || info_.ndim != 1 || (info_.size > 1 && info_.strides[0] != 1)) {
            throw std::invalid_argument("expected contiguous bytes");
        }
    }
    unsigned char* data() const { return static_cast<unsigned char*>(info_.ptr); }
    std::size_t size() const { return static_cast<std::size_t>(info_.size); }
    void check(std::size_t begin, std::size_t end) const {
        if (begin > end || end > size()) throw std::out_of_range("beyond the end of the buffer");
    }

private:
    py::buffer_info info_;
};

py::tuple scan_frames(const py::buffer& buffer, std::size_t begin, std::size_t end, std::uint64_t seq,
                      std::uint64_t offset, std::uint32_t checksum, std::uint64_t max_message) {
    const Bytes bytes(buffer);
    bytes.check(begin, end);
    Place place{seq, offset, checksum};
    Verdict verdict;
    {
        py::gil_scoped_release release;
        verdict = scan(bytes.data(), begin, end, place, max_message);
    }
    return py::make_tuple(static_cast<int>(verdict), begin, place.seq, place.offset, place.checksum);
}

py::object find_frame(const py::buffer& buffer, std::size_t begin, std::size_t end, std::uint64_t seq,
                      std::uint64_t offset, std::uint32_t before) {
    const Bytes bytes(buffer);
    bytes.check(begin, end);
    bool found;
    {
        py::gil_scoped_release release;
        found = find(bytes.data(), begin, end, seq, offset, before);
    }
    if (!found) return py::none();
    return py::make_tuple(begin, before);
}

std::uint32_t put_frame(const py::buffer& to, std::size_t at, const py::buffer& from, std::size_t begin,
                        std::size_t length, std::uint64_t seq, std::uint64_t offset, std::uint16_t flags,
                        std::uint16_t kind, std::uint32_t before) {
    const Bytes target(to, true), source(from);
    if (length > kMaxPayload) throw std::invalid_argument("a frame of more than max_payload bytes");
    source.check(begin, begin + length);
    target.check(at, at + sizeof(FrameHeader) + length);
    py::gil_scoped_release release;
    return write_frame(target.data() + at, source.data() + begin, static_cast<std::uint32_t>(length), seq, offset,
                       flags, kind, before);
}

}  // namespace

void bind(py::module_& m) {
    m.attr("header_bytes") = sizeof(FrameHeader);
    m.attr("max_payload") = kMaxPayload;
    m.def(
        "crc32c",
        [](const py::buffer& buffer, std::uint32_t crc) {
            const Bytes bytes(buffer);
            py::gil_scoped_release release;
            return crc32c(crc, bytes.data(), bytes.size());
        },
        py::arg("data"), py::arg("crc") = 0);
    m.def(
        "crc32c_each_way",
        [](const py::buffer& buffer, std::uint32_t crc) {
            const Bytes bytes(buffer);
            return crc32c_each_way(crc, bytes.data(), bytes.size());
        },
        py::arg("data"), py::arg("crc") = 0);
    m.def("scan_frames", &scan_frames, py::arg("buffer"), py::arg("begin"), py::arg("end"), py::arg("seq"),
          py::arg("offset"), py::arg("checksum"), py::arg("max_message"));
    m.def("find_frame", &find_frame, py::arg("buffer"), py::arg("begin"), py::arg("end"), py::arg("seq"),
          py::arg("offset"), py::arg("before"));
    m.def("put_frame", &put_frame, py::arg("to"), py::arg("at"), py::arg("source"), py::arg("begin"),
          py::arg("length"), py::arg("seq"), py::arg("offset"), py::arg("flags"), py::arg("kind"), py::arg("before"));

    py::class_<Counters>(m, "Counters")
        .def(py::init<>())
        .def("add_counter", &Counters::add_counter)
        .def("counter", &Counters::counter, py::arg("index"))
        .def("add", &Counters::add, py::arg("code"))
        .def("remove", &Counters::remove, py::arg("predicate"))
        .def("value", &Counters::value, py::arg("predicate"))
        .def("evaluate", &Counters::evaluate, py::arg("predicate"))
        .def("lower", &Counters::lower, py::arg("index"), py::arg("to"))
        .def(
            "raise_to",
            [](Counters& counters, std::size_t index, std::uint64_t to) -> py::object {
                std::vector<std::size_t> moved;  // allocates only if there are some
                counters.raise(index, to, [&moved](std::size_t id) { moved.push_back(id); });
                if (moved.empty()) return py::none();
                return py::cast(moved);
            },
            py::arg("index"), py::arg("to"));
}

}  // namespace torchext::replication
