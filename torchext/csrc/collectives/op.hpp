// One collective as this rank sees it: whose call it is, its buffers, what has arrived, and where it was preempted.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "futex.hpp"
#include "reduce.hpp"
#include "signature.hpp"
#include "staging.hpp"

namespace torchext::collectives {

struct Span {
    std::byte* data = nullptr;
    std::size_t bytes = 0;
};

// Who takes part: world ranks in the order of their group ranks.
struct Members {
    Members(std::vector<int> world_ranks, int world_size, int rank)
        : ranks(std::move(world_ranks)), index_of(static_cast<std::size_t>(world_size), -1) {
        for (std::size_t i = 0; i < ranks.size(); ++i) index_of.at(static_cast<std::size_t>(ranks[i])) = static_cast<int>(i);
        me = index_of.at(static_cast<std::size_t>(rank));
    }
    int size() const { return static_cast<int>(ranks.size()); }
    int index(int world_rank) const { return index_of[static_cast<std::size_t>(world_rank)]; }
    int rank(int index) const { return ranks[static_cast<std::size_t>(index)]; }

    std::vector<int> ranks;
    std::vector<int> index_of;
    int me = -1;
};

enum class Code : std::uint32_t { none, timeout, peer_died, peer_left, mismatch, aborted, peer_failed, deadlock };

// What a caller asks for. `in` and `out` have one span for each member, or one span that is cut into equal parts where
// the collective needs one for each member.
struct Request {
    Signature signature;
    std::uint64_t dims_hash = 0;
    std::uint64_t group_uid = 0;  // signature.group, but for point-to-point calls
    std::shared_ptr<const Members> members;
    std::shared_ptr<const Members> group_members;  // for point-to-point calls: of the whole group
    std::vector<Span> in;
    std::vector<Span> out;
    std::size_t item_bytes = 1;
    bool uneven = false;  // sizes may differ between members, so only their joins tell who needs staging
    Nanoseconds timeout = 0;
    void* keepalive = nullptr;  // handed back once the buffers are no longer used
};

// The saved context of a preempted collective: for each lane the next chunk. It is all that is needed to go on.
struct Context {
    std::vector<std::uint64_t> sent;        // to each member, pair lanes
    std::vector<std::uint64_t> received;    // from each member, pair lanes
    std::vector<std::uint64_t> spread_got;  // from each member, spread lanes
    std::uint64_t spread_sent = 0;
    std::uint64_t reduced = 0;
    std::size_t copied = 0;  // bytes of this member's own part
};

struct Op {
    struct Peer {
        bool joined = false;
        bool sent = false;  // what it needs from this rank through the ring is in the ring
        bool have = false;  // what this rank needs from it through the ring is here
        std::uint64_t id = 0;
        std::uint64_t eager_bytes = 0;  // sent before it had joined
    };

    std::uint64_t id = 0;
    Signature signature;
    std::uint64_t key = 0;
    std::uint64_t group_uid = 0;
    std::shared_ptr<const Members> members;
    int me = 0;
    int n = 0;
    Flow flow = Flow::exchange;
    Nanoseconds issued = 0;
    Nanoseconds deadline = 0;

    // By member: what crosses between this rank and it. In the reduce flow the spans of `recv` lie wherever the member's
    // input is: in `inputs`, or in the ring for as long as it takes to reduce it.
    std::vector<Span> send;
    std::vector<Span> recv;
    std::vector<Peer> peers;
    Span local_from, local_to;  // this member's own part, where it has to be copied

    // The reduce flow: this rank's input and where results go, by segment.
    ReduceKernel kernel = nullptr;
    std::size_t item_bytes = 1;
    std::vector<Span> segments;  // of the input
    std::vector<Span> results;   // null where this rank does not get that segment
    Span whole;                  // small form: own input
    Span result;                 // small form: where the result goes; null if this rank gets none
    int spread_root = -1;        // who gets the segments: -1 all, -2 nobody but their owners, else one member
    std::vector<std::vector<std::byte>> inputs;  // small form: of members that came before the last

    std::vector<Request> choices;  // of a receive from any rank, until one has sent; the op has no buffers till then
    int num_joined = 0;            // others
    int num_pending_sends = 0;
    int num_pending_recvs = 0;
    bool needs_all_joined = false;
    bool staged = false;  // some member says so
    bool staged_here = false;
    bool granted = false;
    bool stage_done = false;
    bool in_send_queue = false;

    StageLayout layout;
    std::byte* block = nullptr;
    Context context;
    std::uint32_t patience = 0;  // polls before it is preempted; see stickiness in engine.hpp

    bool done = false;  // successful or not; from then on the buffers are not touched
    bool notify = false;
    int num_waiting = 0;  // threads
    void* keepalive = nullptr;
    Code code = Code::none;
    std::string error;
    std::vector<int> culprits;  // world ranks
    Nanoseconds finished_at = 0;

    int world_rank(int index) const { return members->rank(index); }
    bool all_joined() const { return num_joined == n - 1; }
    // Whether the call cannot end before the member has joined.
    bool needs(int member) const {
        const Peer& peer = peers[static_cast<std::size_t>(member)];
        return !peer.joined && (needs_all_joined || staged || !peer.have || !peer.sent);
    }
    bool leads() const { return me == 0; }
};

using OpPtr = std::shared_ptr<Op>;

// Fills an op's buffers from a request; throws std::invalid_argument on sizes that do not fit together.
void prepare(Op& op, const Request& request, std::size_t eager_bytes);

namespace op_detail {

inline std::vector<Span> per_member(const std::vector<Span>& spans, int n, const char* what) {
    if (static_cast<int>(spans.size()) == n) return spans;
    if (spans.size() != 1 || spans[0].bytes % static_cast<std::size_t>(n) != 0) {
        throw std::invalid_argument(std::string(what) + " must be one tensor for each of the " + std::to_string(n) +
                                    " members, or one tensor that divides into equal parts");
    }
    std::vector<Span> parts(static_cast<std::size_t>(n));
    const std::size_t bytes = spans[0].bytes / static_cast<std::size_t>(n);
    for (std::size_t i = 0; i < parts.size(); ++i) {
        parts[i] = {bytes == 0 ? nullptr : spans[0].data + i * bytes, bytes};
    }
    return parts;
}

inline const Span& only(const std::vector<Span>& spans, const char* what) {
    if (spans.size() != 1) throw std::invalid_argument(std::string(what) + " must be one tensor");
    return spans[0];
}

// Segments of whole elements, a multiple of a cache line but for the last.
inline std::vector<Span> cut(const Span& whole, int n) {
    const std::size_t part = round_up((whole.bytes + static_cast<std::size_t>(n) - 1) / static_cast<std::size_t>(n), 64);
    std::vector<Span> parts(static_cast<std::size_t>(n));
    for (std::size_t i = 0; i < parts.size(); ++i) {
        const std::size_t begin = std::min(i * part, whole.bytes);
        parts[i] = {whole.data == nullptr ? nullptr : whole.data + begin, std::min(part, whole.bytes - begin)};
    }
    return parts;
}

}  // namespace op_detail

inline void prepare(Op& op, const Request& r, std::size_t eager_bytes) {
    using namespace op_detail;
    const auto n = static_cast<std::size_t>(op.n);
    const auto me = static_cast<std::size_t>(op.me);
    const auto& s = r.signature;
    const bool is_root = s.root == op.me;
    op.send.resize(n);
    op.recv.resize(n);
    op.peers.resize(n);
    op.item_bytes = r.item_bytes;
    op.needs_all_joined = r.uneven;
    std::size_t reduce_bytes = 0;  // that each member needs from each other: the small form of the reduce flow
    switch (s.kind) {
        case OpKind::barrier:
            op.needs_all_joined = true;
            break;
        case OpKind::all_reduce:
            op.flow = Flow::reduce;
            op.whole = only(r.in, "the tensor");
            op.result = only(r.out, "the tensor");
            for (std::size_t c = 0; c < n; ++c) op.send[c] = op.whole;
            reduce_bytes = op.whole.bytes;
            break;
        case OpKind::reduce:
            op.flow = Flow::reduce;
            op.whole = only(r.in, "the tensor");
            if (is_root) op.result = only(r.out, "the tensor");
            op.send[static_cast<std::size_t>(s.root)] = op.whole;
            op.spread_root = s.root;
            if (is_root || op.whole.bytes > eager_bytes) reduce_bytes = op.whole.bytes;
            break;
        case OpKind::reduce_scatter: {
            op.flow = Flow::reduce;
            const auto in = per_member(r.in, op.n, "the input");
            op.result = only(r.out, "the output");
            op.whole = in[me];
            op.send = in;
            op.spread_root = -2;
            reduce_bytes = op.whole.bytes;
            for (const auto& span : in) {
                if (span.bytes != op.result.bytes) {
                    throw std::invalid_argument("each part of the input must be as large as the output");
                }
            }
            break;
        }
        case OpKind::broadcast:
            op.flow = Flow::spread;
            if (is_root) {
                for (std::size_t c = 0; c < n; ++c) op.send[c] = only(r.in, "the tensor");
            } else {
                op.recv[static_cast<std::size_t>(s.root)] = only(r.out, "the tensor");
            }
            break;
        case OpKind::all_gather: {
            op.flow = Flow::spread;
            const Span in = only(r.in, "the input");
            op.recv = per_member(r.out, op.n, "the output");
            for (std::size_t c = 0; c < n; ++c) op.send[c] = in;
            op.local_from = in;
            op.local_to = op.recv[me];
            break;
        }
        case OpKind::gather: {
            const Span in = only(r.in, "the input");
            if (is_root) {
                op.recv = per_member(r.out, op.n, "the output");
                op.local_from = in;
                op.local_to = op.recv[me];
            } else {
                op.send[static_cast<std::size_t>(s.root)] = in;
            }
            break;
        }
        case OpKind::scatter: {
            const Span out = only(r.out, "the output");
            if (is_root) {
                op.send = per_member(r.in, op.n, "the input");
                op.local_from = op.send[me];
                op.local_to = out;
            } else {
                op.recv[static_cast<std::size_t>(s.root)] = out;
            }
            break;
        }
        case OpKind::all_to_all:
            op.send = per_member(r.in, op.n, "the input");
            op.recv = per_member(r.out, op.n, "the output");
            op.local_from = op.send[me];
            op.local_to = op.recv[me];
            op.needs_all_joined = true;
            break;
        case OpKind::send:
            if (op.me == 0) {  // between these two alone, of whom the sender is the first
                op.send[1] = only(r.in, "the tensor");
            } else {
                op.recv[0] = only(r.out, "the tensor");
            }
            break;
    }
    op.send[me] = op.recv[me] = {};
    if (op.local_from.bytes != op.local_to.bytes) {
        throw std::invalid_argument("this rank's own part has " + std::to_string(op.local_from.bytes) +
                                    " bytes in the input and " + std::to_string(op.local_to.bytes) + " in the output");
    }
    if (op.local_from.data == op.local_to.data) op.local_from = op.local_to = {};

    if (op.flow == Flow::reduce) {
        op.kernel = reduce_kernel(s.dtype, s.reduce_op);
        if (op.kernel == nullptr) {
            throw std::invalid_argument(std::string("'") + name(s.reduce_op) + "' is not defined for this dtype");
        }
        op.staged_here = reduce_bytes > eager_bytes;
        if (op.staged_here) {
            op.segments = s.kind == OpKind::reduce_scatter ? op.send : cut(op.whole, op.n);
            op.results.resize(n);
            if (s.kind == OpKind::reduce_scatter) {
                op.segments[me] = op.whole;
                op.results[me] = op.result;
            } else if (op.result.data != nullptr) {
                op.results = cut(op.result, op.n);
            }
            op.send.assign(n, {});
        } else if (reduce_bytes != 0) {
            for (std::size_t m = 0; m < n; ++m) {
                if (m != me) op.recv[m] = {nullptr, reduce_bytes};
            }
        }
    } else {
        for (std::size_t m = 0; m < n; ++m) {
            op.staged_here |= op.send[m].bytes > eager_bytes || op.recv[m].bytes > eager_bytes;
        }
    }
    op.staged = op.staged_here;
    for (std::size_t m = 0; m < n; ++m) {
        if (m == me) continue;
        const bool sends = op.send[m].bytes != 0 && op.send[m].bytes <= eager_bytes;
        const bool receives = op.recv[m].bytes != 0 && op.recv[m].bytes <= eager_bytes;
        op.peers[m].sent = !sends;
        op.peers[m].have = !receives;
        op.num_pending_sends += sends;
        op.num_pending_recvs += receives;
    }
}

}  // namespace torchext::collectives
