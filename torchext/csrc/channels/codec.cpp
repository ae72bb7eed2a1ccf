#if defined(__linux__)

#include "codec.hpp"

#include <algorithm>
#include <cstring>
#include <deque>
#include <stdexcept>
#include <utility>

namespace torchext::channels {
namespace {

constexpr int kDeepest = 64;
constexpr std::size_t kAlign = 64;

std::size_t aligned(std::size_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

struct DType {
    PyObject* torch;    // the torch.dtype
    std::size_t bytes;  // of one element
    PyObject* numpy;    // the dtype that it is read as
    PyObject* view_as;  // the torch.dtype to view that as, or nullptr
    bool is_complex;
};

// What Python tells once, at import. Never freed.
struct Python {
    PyTypeObject* tensor = nullptr;
    PyObject *from_numpy = nullptr, *prepare_tensor = nullptr, *decompose = nullptr, *dumps = nullptr, *loads = nullptr,
             *strided = nullptr, *as_tensor = nullptr;
    std::vector<DType> dtypes;
    PyObject *data_ptr, *is_cpu, *layout, *is_contiguous, *dtype, *shape, *is_neg, *is_conj, *view;
    std::deque<std::pair<std::string, PyObject*>> rebuilders;  // pickled -> function; the latest first
};
Python& python() {
    static auto* p = new Python;
    return *p;
}

py::object attribute(PyObject* object, PyObject* name) {
    PyObject* value = PyObject_GetAttr(object, name);
    if (value == nullptr) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(value);
}

bool truth(PyObject* object, PyObject* method) {
    PyObject* value = PyObject_CallMethodNoArgs(object, method);
    if (value == nullptr) throw py::error_already_set();
    const bool is = value == Py_True;
    Py_DECREF(value);
    return is;
}

py::object call(PyObject* function, PyObject* argument) {
    PyObject* value = PyObject_CallOneArg(function, argument);
    if (value == nullptr) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(value);
}

// Plain memory, of numbers that need no Python object to be read.
bool is_plain(const py::dtype& d) {
    switch (d.kind()) {
        case 'b':
        case 'i':
        case 'u':
        case 'f':
        case 'c':
            return d.byteorder() == '=' || d.byteorder() == '|';
        default:
            return false;
    }
}

}  // namespace

std::size_t Encoded::data_bytes(std::size_t rows) const {
    std::size_t total = 0;
    for (const auto& leaf : leaves) total += aligned(leaf.bytes * rows);
    return total;
}

void Encoded::encode(py::handle tree, bool as_row, bool room_only) {
    clear();
    as_row_ = as_row;
    room_only_ = room_only;
    value(tree.ptr(), 0);
}

void Encoded::number(char tag, std::uint64_t bits) {
    header.push_back(tag);
    if (as_row_) {
        keep_.push_back(py::bytes(reinterpret_cast<const char*>(&bits), sizeof(bits)));
        leaf(PyBytes_AS_STRING(keep_.back().ptr()), sizeof(bits));
    } else {
        put(bits);
    }
}

void Encoded::value(PyObject* object, int depth) {
    if (depth > kDeepest) {
        throw py::value_error("a message may be nested " + std::to_string(kDeepest) + " deep; does it contain itself?");
    }
    PyTypeObject* type = Py_TYPE(object);
    if (type == python().tensor) {
        tensor(object);
    } else if (type == &PyDict_Type) {
        header.push_back('{');
        put(static_cast<std::uint32_t>(PyDict_GET_SIZE(object)));
        PyObject *key, *item;
        Py_ssize_t position = 0;
        while (PyDict_Next(object, &position, &key, &item) != 0) {
            if (PyUnicode_CheckExact(key)) {
                Py_ssize_t n = 0;
                const char* text = PyUnicode_AsUTF8AndSize(key, &n);
                if (text == nullptr) throw py::error_already_set();
                header.push_back('s');
                put(static_cast<std::uint32_t>(n));
                header.append(text, static_cast<std::size_t>(n));
            } else {
                const bool as_row = std::exchange(as_row_, false);  // a key is part of the structure, not a value
                value(key, depth + 1);
                as_row_ = as_row;
            }
            value(item, depth + 1);
        }
    } else if (type == &PyTuple_Type || type == &PyList_Type) {
        header.push_back(type == &PyTuple_Type ? '(' : '[');
        const Py_ssize_t n = PySequence_Fast_GET_SIZE(object);
        put(static_cast<std::uint32_t>(n));
        for (Py_ssize_t i = 0; i < n && i < PySequence_Fast_GET_SIZE(object); ++i) {
            value(PySequence_Fast_GET_ITEM(object, i), depth + 1);
        }
    } else if (object == Py_None) {
        header.push_back('N');
    } else if (type == &PyBool_Type) {
        number('?', object == Py_True ? 1 : 0);
    } else if (type == &PyFloat_Type) {
        const double d = PyFloat_AS_DOUBLE(object);
        std::uint64_t bits = 0;
        std::memcpy(&bits, &d, sizeof(bits));
        number('d', bits);
    } else if (type == &PyLong_Type) {
        int overflow = 0;
        const long long n = PyLong_AsLongLongAndOverflow(object, &overflow);
        if (overflow != 0) {
            other(object, depth);
        } else {
            number('i', static_cast<std::uint64_t>(n));
        }
    } else if (type == &PyUnicode_Type) {
        Py_ssize_t n = 0;
        const char* text = PyUnicode_AsUTF8AndSize(object, &n);
        if (text == nullptr) {  // lone surrogates
            PyErr_Clear();
            other(object, depth);
            return;
        }
        stackable = false;
        header.push_back('s');
        put(static_cast<std::uint32_t>(n));
        header.append(text, static_cast<std::size_t>(n));
    } else if (type == &PyBytes_Type) {
        stackable = false;
        header.push_back('b');
        put(static_cast<std::uint64_t>(PyBytes_GET_SIZE(object)));
        leaf(PyBytes_AS_STRING(object), static_cast<std::size_t>(PyBytes_GET_SIZE(object)));
        keep_.push_back(py::reinterpret_borrow<py::object>(object));
    } else if (py::isinstance<py::array>(object)) {
        array(object);
    } else if (PyType_IsSubtype(type, python().tensor) != 0) {
        tensor(object);
    } else {
        other(object, depth);
    }
}

void Encoded::tensor(PyObject* object) {
    auto& py_ = python();
    auto held = py::reinterpret_borrow<py::object>(object);
    auto dtype = attribute(object, py_.dtype);
    std::size_t code = 0;
    while (code < py_.dtypes.size() && py_.dtypes[code].torch != dtype.ptr()) ++code;
    const auto on_cpu = attribute(object, py_.is_cpu);
    const bool ready = code < py_.dtypes.size() && (room_only_ || (on_cpu.ptr() == Py_True &&
                       attribute(object, py_.layout).ptr() == py_.strided && truth(object, py_.is_contiguous) &&
                       !(py_.dtypes[code].is_complex && truth(object, py_.is_conj)) && !truth(object, py_.is_neg)));
    if (!ready) {
        held = call(py_.prepare_tensor, object);
        if (held.is_none()) {  // sparse, quantized, ...: torch's own pickling
            other(object, kDeepest);
            return;
        }
        if (code == py_.dtypes.size()) {  // which torch pickles, but cannot unpickle
            throw py::type_error("a message cannot hold tensors of " + std::string(py::str(dtype)) +
                                 "; send a view of another dtype, as tensor.view(torch.uint8)");
        }
    }
    const auto shape = attribute(held.ptr(), py_.shape);
    const Py_ssize_t num_dims = PyTuple_GET_SIZE(shape.ptr());
    header.push_back('t');
    header.push_back(static_cast<char>(code));
    header.push_back(static_cast<char>(num_dims));
    std::size_t bytes = py_.dtypes[code].bytes;
    for (Py_ssize_t i = 0; i < num_dims; ++i) {
        const auto dim = PyLong_AsSsize_t(PyTuple_GET_ITEM(shape.ptr(), i));
        if (dim < 0) throw py::error_already_set();
        put(static_cast<std::uint64_t>(dim));
        bytes *= static_cast<std::size_t>(dim);
    }
    if (room_only_ || bytes == 0) {
        leaf(nullptr, bytes);
        return;
    }
    PyObject* address = PyObject_CallMethodNoArgs(held.ptr(), py_.data_ptr);
    if (address == nullptr) throw py::error_already_set();
    leaf(PyLong_AsVoidPtr(address), bytes);
    Py_DECREF(address);
    if (PyErr_Occurred() != nullptr) throw py::error_already_set();
    keep_.push_back(std::move(held));
}

void Encoded::array(PyObject* object) {
    auto array = py::reinterpret_borrow<py::array>(object);
    const auto dtype = array.dtype();
    if (!is_plain(dtype)) {
        other(object, kDeepest);
        return;
    }
    if (!room_only_ && (array.flags() & py::array::c_style) == 0) array = py::array::ensure(array, py::array::c_style);
    header.push_back('a');
    header.push_back(dtype.kind());
    header.push_back(static_cast<char>(dtype.itemsize()));
    header.push_back(static_cast<char>(array.ndim()));
    for (py::ssize_t i = 0; i < array.ndim(); ++i) put(static_cast<std::uint64_t>(array.shape(i)));
    leaf(room_only_ ? nullptr : array.data(), static_cast<std::size_t>(array.nbytes()));
    keep_.push_back(std::move(array));
}

// Anything else: taken apart, if Python knows how, else pickled.
void Encoded::other(PyObject* object, int depth) {
    auto& py_ = python();
    if (depth < kDeepest) {
        const auto parts = call(py_.decompose, object);
        if (!parts.is_none()) {
            const auto pair = py::reinterpret_borrow<py::tuple>(parts);
            const auto rebuild = py::reinterpret_borrow<py::bytes>(pair[0]);
            header.push_back('x');
            put(static_cast<std::uint32_t>(PyBytes_GET_SIZE(rebuild.ptr())));
            header.append(PyBytes_AS_STRING(rebuild.ptr()), static_cast<std::size_t>(PyBytes_GET_SIZE(rebuild.ptr())));
            keep_.push_back(parts);
            value(py::object(pair[1]).ptr(), depth + 1);
            return;
        }
    }
    stackable = false;
    auto pickled = call(py_.dumps, object);
    header.push_back('p');
    put(static_cast<std::uint64_t>(PyBytes_GET_SIZE(pickled.ptr())));
    leaf(PyBytes_AS_STRING(pickled.ptr()), static_cast<std::size_t>(PyBytes_GET_SIZE(pickled.ptr())));
    keep_.push_back(std::move(pickled));
}

namespace {

class Decoder {
public:
    Decoder(const char* header, std::size_t bytes, std::byte* data, const Rows& rows, py::handle owner)
        : at_(header), end_(header + bytes), data_(data), rows_(rows), owner_(owner) {}

    py::object value() {
        const char tag = get<char>();
        switch (tag) {
            case 't':
                return tensor();
            case 'a':
                return array();
            case '{': {
                const auto n = get<std::uint32_t>();
                py::dict dict;
                for (std::uint32_t i = 0; i < n; ++i) {
                    const auto rows = std::exchange(rows_, Rows{});
                    auto key = value();
                    rows_ = rows;
                    dict[key] = value();
                }
                return dict;
            }
            case '(': {
                const auto n = get<std::uint32_t>();
                py::tuple tuple(n);
                for (std::uint32_t i = 0; i < n; ++i) tuple[i] = value();
                return tuple;
            }
            case '[': {
                const auto n = get<std::uint32_t>();
                py::list list(n);
                for (std::uint32_t i = 0; i < n; ++i) list[i] = value();
                return list;
            }
            case 'N':
                return py::none();
            case '?':
            case 'i':
            case 'd':
                return number(tag);
            case 's': {
                const auto n = get<std::uint32_t>();
                return py::str(take(n), n);
            }
            case 'b': {
                const auto n = get<std::uint64_t>();
                return py::bytes(reinterpret_cast<const char*>(leaf(n)), n);
            }
            case 'p': {
                const auto n = get<std::uint64_t>();
                return call(python().loads, py::bytes(reinterpret_cast<const char*>(leaf(n)), n).ptr());
            }
            case 'x': {
                const auto n = get<std::uint32_t>();
                const std::string pickled(take(n), n);
                const auto child = value();
                return call(rebuilder(pickled), child.ptr());
            }
            default:
                throw std::runtime_error("a message of this channel cannot be read: it was written by another version");
        }
    }

private:
    template <class T>
    T get() {
        T v;
        std::memcpy(&v, take(sizeof(v)), sizeof(v));
        return v;
    }
    const char* take(std::size_t n) {
        if (static_cast<std::size_t>(end_ - at_) < n) throw std::runtime_error("a message of this channel is cut short");
        return std::exchange(at_, at_ + n);
    }
    std::byte* leaf(std::size_t bytes) {
        const std::size_t all = bytes * std::max<std::size_t>(rows_.capacity, 1);
        return std::exchange(data_, data_ + aligned(all)) + bytes * rows_.first;
    }

    std::size_t dims(std::size_t item_bytes) {
        const auto n = static_cast<unsigned char>(get<char>());
        shape_.clear();
        if (rows_.stacked) shape_.push_back(static_cast<py::ssize_t>(rows_.count));
        std::size_t bytes = item_bytes;
        for (unsigned i = 0; i < n; ++i) {
            const auto dim = get<std::uint64_t>();
            shape_.push_back(static_cast<py::ssize_t>(dim));
            bytes *= dim;
        }
        return bytes;
    }

    py::object tensor() {
        const auto& dtype = python().dtypes.at(static_cast<unsigned char>(get<char>()));
        const auto bytes = dims(dtype.bytes);
        const auto array = py::array(py::reinterpret_borrow<py::dtype>(dtype.numpy), shape_, leaf(bytes), owner_);
        auto tensor = call(python().from_numpy, array.ptr());
        if (dtype.view_as == nullptr) return tensor;
        PyObject* viewed = PyObject_CallMethodOneArg(tensor.ptr(), python().view, dtype.view_as);
        if (viewed == nullptr) throw py::error_already_set();
        return py::reinterpret_steal<py::object>(viewed);
    }

    py::object array() {
        const char kind = get<char>();
        const auto item_bytes = static_cast<std::size_t>(static_cast<unsigned char>(get<char>()));
        const auto bytes = dims(item_bytes);
        auto array = py::array(plain_dtype(kind, item_bytes), shape_, leaf(bytes), owner_);
        return rows_.stacked ? call(python().as_tensor, array.ptr()) : py::object(std::move(array));
    }

    static py::dtype plain_dtype(char kind, std::size_t item_bytes) {
        static auto* known = new std::vector<std::pair<int, py::dtype>>;
        const int key = kind * 256 + static_cast<int>(item_bytes);
        for (const auto& [k, dtype] : *known) {
            if (k == key) return dtype;
        }
        known->emplace_back(key, py::dtype(std::string(1, kind) + std::to_string(item_bytes)));
        return known->back().second;
    }

    py::object number(char tag) {
        if (rows_.capacity != 0) {
            auto* at = leaf(sizeof(std::uint64_t));
            if (rows_.stacked) {
                shape_.assign(1, static_cast<py::ssize_t>(rows_.count));
                const auto array = py::array(plain_dtype(tag == 'd' ? 'f' : 'i', 8), shape_, at, owner_);
                auto tensor = call(python().from_numpy, array.ptr());
                return tag == '?' ? tensor.attr("bool")() : tensor;
            }
            return number(tag, *reinterpret_cast<std::uint64_t*>(at));
        }
        return number(tag, get<std::uint64_t>());
    }
    static py::object number(char tag, std::uint64_t bits) {
        if (tag == '?') return py::bool_(bits != 0);
        if (tag == 'i') return py::int_(static_cast<std::int64_t>(bits));
        double d = 0;
        std::memcpy(&d, &bits, sizeof(d));
        return py::float_(d);
    }

    static PyObject* rebuilder(const std::string& pickled) {
        auto& known = python().rebuilders;
        for (const auto& [key, function] : known) {
            if (key == pickled) return function;
        }
        auto function = call(python().loads, py::bytes(pickled).ptr());
        constexpr std::size_t kRemembered = 64;
        if (known.size() == kRemembered) {
            Py_DECREF(known.back().second);
            known.pop_back();
        }
        known.emplace_front(pickled, function.release().ptr());
        return known.front().second;
    }

    const char* at_;
    const char* end_;
    std::byte* data_;
    Rows rows_;
    py::handle owner_;
    std::vector<py::ssize_t> shape_;
};

}  // namespace

namespace {

// Walks over the header of a single message, and writes that of a row: numbers go to the leaves.
class Restacker {
public:
    Restacker(const std::byte* message, std::size_t header_bytes, std::size_t bytes, Encoded& to)
        : at_(reinterpret_cast<const char*>(message)),
          end_(at_ + header_bytes),
          data_(message + std::min(aligned(header_bytes), bytes)),
          data_end_(message + bytes),
          to_(to) {}

    // False if it holds something that cannot be in a row.
    bool value(int depth = 0) {
        if (depth > 2 * kDeepest) throw damaged();
        const char* from = at_;
        switch (*take(1)) {
            case 't':
                return leaf(from, python().dtypes.at(static_cast<unsigned char>(*take(1))).bytes);
            case 'a':
                take(1);
                return leaf(from, static_cast<unsigned char>(*take(1)));
            case '{':
                for (auto n = number<std::uint32_t>(from); n > 0; --n) {
                    if (!key() || !value(depth + 1)) return false;
                }
                return true;
            case '(':
            case '[':
                for (auto n = number<std::uint32_t>(from); n > 0; --n) {
                    if (!value(depth + 1)) return false;
                }
                return true;
            case 'N':
                to_.header.append(from, 1);
                return true;
            case '?':
            case 'i':
            case 'd':
                to_.header.append(from, 1);
                to_.leaves.push_back({reinterpret_cast<const std::byte*>(take(sizeof(std::uint64_t))), sizeof(std::uint64_t)});
                return true;
            case 'x':
                take(count<std::uint32_t>());
                to_.header.append(from, static_cast<std::size_t>(at_ - from));
                return value(depth + 1);
            case 's':
            case 'b':
            case 'p':
                return false;
            default:
                throw damaged();
        }
    }

private:
    static std::runtime_error damaged() { return std::runtime_error("what came is no message of this channel"); }
    const char* take(std::size_t n) {
        if (static_cast<std::size_t>(end_ - at_) < n) throw damaged();
        return std::exchange(at_, at_ + n);
    }
    template <class T>
    T count() {
        T n;
        std::memcpy(&n, take(sizeof(n)), sizeof(n));
        return n;
    }
    template <class T>
    T number(const char* from) {
        const T n = count<T>();
        to_.header.append(from, static_cast<std::size_t>(at_ - from));
        return n;
    }
    // Keys are the same in both forms; those that are not strings are rare, and have no row here.
    bool key() {
        const char* from = at_;
        if (*take(1) != 's') return false;
        take(count<std::uint32_t>());
        to_.header.append(from, static_cast<std::size_t>(at_ - from));
        return true;
    }
    bool leaf(const char* from, std::size_t item_bytes) {
        std::size_t bytes = item_bytes;
        for (auto n = static_cast<unsigned char>(*take(1)); n > 0; --n) {
            if (__builtin_mul_overflow(bytes, count<std::uint64_t>(), &bytes)) throw damaged();
        }
        if (bytes > static_cast<std::size_t>(data_end_ - data_)) throw damaged();
        to_.header.append(from, static_cast<std::size_t>(at_ - from));
        to_.leaves.push_back({data_, bytes});
        data_ += std::min(aligned(bytes), static_cast<std::size_t>(data_end_ - data_));
        return true;
    }

    const char* at_;
    const char* end_;
    const std::byte* data_;
    const std::byte* data_end_;
    Encoded& to_;
};

}  // namespace

bool Encoded::as_row_of(const std::byte* message, std::size_t header_bytes, std::size_t bytes) {
    clear();
    as_row_ = true;
    return Restacker(message, header_bytes, bytes, *this).value();
}

py::object decode(const char* header, std::size_t header_bytes, std::byte* data, const Rows& rows, py::handle owner) {
    return Decoder(header, header_bytes, data, rows, owner).value();
}

void bind_codec(py::module_& m) {
    m.def(
        "set_up",
        [](const py::dict& given) {
            auto& p = python();
            const auto take = [&given](const char* name) { return py::object(given[name]).release().ptr(); };
            p.tensor = reinterpret_cast<PyTypeObject*>(take("tensor"));
            p.from_numpy = take("from_numpy");
            p.as_tensor = take("as_tensor");
            p.prepare_tensor = take("prepare_tensor");
            p.decompose = take("decompose");
            p.dumps = take("dumps");
            p.loads = take("loads");
            p.strided = take("strided");
            p.dtypes.clear();
            for (const auto& item : given["dtypes"]) {
                auto row = py::reinterpret_borrow<py::tuple>(item);
                PyObject* view_as = py::object(row[3]).release().ptr();
                p.dtypes.push_back({py::object(row[0]).release().ptr(), row[1].cast<std::size_t>(),
                                    py::dtype::from_args(py::object(row[2])).release().ptr(),
                                    view_as == Py_None ? nullptr : view_as, row[4].cast<bool>()});
            }
            const auto intern = [](const char* text) { return PyUnicode_InternFromString(text); };
            p.data_ptr = intern("data_ptr");
            p.is_cpu = intern("is_cpu");
            p.layout = intern("layout");
            p.is_contiguous = intern("is_contiguous");
            p.dtype = intern("dtype");
            p.shape = intern("shape");
            p.is_neg = intern("is_neg");
            p.is_conj = intern("is_conj");
            p.view = intern("view");
        },
        py::arg("python"));
}

}  // namespace torchext::channels

#endif
