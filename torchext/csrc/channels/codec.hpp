// Pytrees to bytes and back, with the GIL held.
//
// A tree becomes a header, which says what it is made of, and leaves, whose bytes lie one after the other, each at a
// multiple of 64. Tensors and arrays come back as views of those bytes. In a batch a leaf has one region for all rows, and
// numbers are leaves too, so that equal headers mean that trees can be stacked.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace torchext::channels {

namespace py = pybind11;

struct Leaf {
    const std::byte* data;  // nullptr: only room is wanted
    std::size_t bytes;
};

// One tree, encoded. Cleared and used again, so that its memory is.
class Encoded {
public:
    // `as_row`: for a batch. `room_only`: arrays and tensors are taken as examples of what will be written in place.
    void encode(py::handle tree, bool as_row, bool room_only);
    // What encoding the message again as a row would give, without decoding it; the leaves point into `message`. False if
    // it cannot be a row. Throws if it is not a message.
    bool as_row_of(const std::byte* message, std::size_t header_bytes, std::size_t bytes);
    void clear() {
        header.clear();
        leaves.clear();
        keep_.clear();
        stackable = true;
    }

    bool as_row() const { return as_row_; }

    // Of all leaves where each has room for so many rows.
    std::size_t data_bytes(std::size_t rows) const;

    std::string header;
    std::vector<Leaf> leaves;
    bool stackable = true;  // as a row: everything in it has a fixed size

private:
    void value(PyObject* object, int depth);
    void tensor(PyObject* object);
    void array(PyObject* object);
    void number(char tag, std::uint64_t bits);
    void other(PyObject* object, int depth);
    void leaf(const void* data, std::size_t bytes) { leaves.push_back({static_cast<const std::byte*>(data), bytes}); }
    template <class T>
    void put(T value) {
        header.append(reinterpret_cast<const char*>(&value), sizeof(value));
    }

    bool as_row_ = false, room_only_ = false;
    std::vector<py::object> keep_;  // what leaves point into
};

// What a batch is decoded to.
struct Rows {
    std::size_t capacity = 0;  // 0: a single message
    std::size_t first = 0;
    std::size_t count = 0;
    bool stacked = false;  // with a first dimension for the rows; else row `first` by itself
};

// Views keep `owner` alive. Bytes and strings are copies.
py::object decode(const char* header, std::size_t header_bytes, std::byte* data, const Rows& rows, py::handle owner);

void bind_codec(py::module_& m);

}  // namespace torchext::channels
