// The identity of a collective: what must be equal on two ranks for their calls to belong together, and how it is
// told to people. The order in which ranks issue different collectives is no part of it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

namespace torchext::collectives {

enum class OpKind : std::uint8_t {
    all_reduce,
    reduce,
    broadcast,
    all_gather,
    gather,
    scatter,
    reduce_scatter,
    all_to_all,
    send,  // point to point, on both sides; `root` is the sender and `peer` the receiver
    barrier,
};

inline const char* name(OpKind kind) {
    constexpr const char* names[] = {"all_reduce", "reduce",         "broadcast",  "all_gather", "gather",
                                     "scatter",    "reduce_scatter", "all_to_all", "send/recv",  "barrier"};
    return names[static_cast<int>(kind)];
}

// The numbers of torch's ReduceOp.RedOpType.
enum class ReduceOp : std::uint8_t { sum, avg, product, min, max, band, bor, bxor, none = 255 };

inline const char* name(ReduceOp op) {
    constexpr const char* names[] = {"sum", "avg", "product", "min", "max", "band", "bor", "bxor"};
    return op == ReduceOp::none ? "" : names[static_cast<int>(op)];
}

// Element types by their own numbers; those from `other` on only move, as bytes.
enum class DType : std::uint8_t { f64, f32, f16, bf16, i64, i32, i16, i8, u8, boolean, other };

inline constexpr int kDims = 6;  // that are told to people; the key covers them all

struct Signature {
    OpKind kind = OpKind::barrier;
    ReduceOp reduce_op = ReduceOp::none;
    std::uint8_t dtype = 0;  // a DType, or other + n: told apart, but not named here
    std::uint8_t num_dims = 0;
    std::int32_t root = -1;
    std::int32_t peer = -1;
    std::uint64_t group = 0;
    std::array<std::int64_t, kDims> dims{};
    std::string tag;

    // FNV-1a over the fields, finished by a mixer. `dims_hash` covers all dimensions, or none where ranks may differ.
    std::uint64_t key(std::uint64_t dims_hash) const {
        std::uint64_t h = 0xcbf29ce484222325ULL;
        auto mix = [&h](std::uint64_t value) {
            h ^= value;
            h *= 0x9e3779b97f4a7c15ULL;
            h ^= h >> 32;
        };
        mix(group);
        if (kind == OpKind::send) {
            // As MPI has it, messages between two ranks pair by tag and order; another size is a mistake, told at once.
            mix(static_cast<std::uint64_t>(kind));
        } else {
            mix(static_cast<std::uint64_t>(kind) | static_cast<std::uint64_t>(reduce_op) << 8 |
                static_cast<std::uint64_t>(dtype) << 16);
            mix(dims_hash);
        }
        mix(static_cast<std::uint64_t>(static_cast<std::uint32_t>(root)) << 32 | static_cast<std::uint32_t>(peer));
        mix(tag.size());
        for (const char c : tag) mix(static_cast<unsigned char>(c));
        return h;
    }

    // Everything but the dimensions, which may differ between ranks where splits are uneven.
    bool same_call(const Signature& other) const {
        return kind == other.kind && reduce_op == other.reduce_op && dtype == other.dtype && root == other.root &&
               peer == other.peer && group == other.group;
    }

    std::string describe() const {
        constexpr const char* dtypes[] = {"float64", "float32", "float16", "bfloat16", "int64",
                                          "int32",   "int16",   "int8",    "uint8",    "bool"};
        std::string text = name(kind);
        if (kind != OpKind::barrier) {
            text += "(";
            if (reduce_op != ReduceOp::none) text += std::string(name(reduce_op)) + ", ";
            text += dtype < std::size(dtypes) ? dtypes[dtype] : "other dtype";
            text += ", shape (";
            for (int i = 0; i < num_dims && i < kDims; ++i) {
                text += (i != 0 ? ", " : "") + std::to_string(dims[static_cast<std::size_t>(i)]);
            }
            text += num_dims > kDims ? ", ...)" : num_dims == 1 ? ",)" : ")";
            if (kind == OpKind::send) {
                text += root < 0 ? ", any rank" : ", group rank " + std::to_string(root);
                text += " to " + std::to_string(peer);
            } else if (root >= 0) {
                text += ", root at group rank " + std::to_string(root);
            }
            text += ")";
        }
        if (!tag.empty()) text += " tagged '" + tag + "'";
        return text;
    }
};

// Records that announce a call have fields for its signature by the same names; its tag follows the record. The group is
// told by the record where the link between the two ranks serves several.
template <class Join>
void put_signature(Join& record, const Signature& s) {
    record.kind = s.kind;
    record.reduce_op = s.reduce_op;
    record.dtype = s.dtype;
    record.num_dims = s.num_dims;
    record.root = s.root;
    record.peer = s.peer;
    std::memcpy(record.dims, s.dims.data(), sizeof(record.dims));
    if constexpr (requires { record.group; }) record.group = s.group;
}

template <class Join>
Signature signature_of(const Join& record) {
    Signature s;
    s.kind = record.kind;
    s.reduce_op = record.reduce_op;
    s.dtype = record.dtype;
    s.num_dims = record.num_dims;
    s.root = record.root;
    s.peer = record.peer;
    std::memcpy(s.dims.data(), record.dims, sizeof(record.dims));
    if constexpr (requires { record.group; }) s.group = record.group;
    s.tag.assign(reinterpret_cast<const char*>(&record + 1), record.tag_bytes);
    return s;
}

}  // namespace torchext::collectives
