// What the orderer tells its peers, and what it knows of calls and groups; see order.hpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "arena.hpp"
#include "futex.hpp"
#include "link.hpp"
#include "op.hpp"
#include "peers.hpp"
#include "record_tail.hpp"
#include "report.hpp"
#include "signature.hpp"

namespace torchext::collectives {

enum class OrderRecord : std::uint8_t { pad = 0, join, propose, fail, leave, report, verdict };

struct OrderJoin {  // then follows the tag
    RecordHeader header;
    OpKind kind;
    ReduceOp reduce_op;
    std::uint8_t dtype;
    std::uint8_t num_dims;
    std::int32_t root;
    std::int32_t peer;
    std::uint32_t tag_bytes;
    std::uint64_t key;
    std::uint64_t id;         // how to address the sender's call from now on
    std::int64_t send_bytes;  // that the sender has for the receiver; -1 where the key covers it
    std::int64_t recv_bytes;  // that the sender wants of the receiver
    std::int64_t dims[kDims];
};

struct OrderPropose {
    RecordHeader header;
    std::uint64_t id;  // the receiver's call
    std::uint64_t clock;
    std::uint64_t unused;
};

struct OrderFail {  // then follow text and the ranks that are the cause
    RecordHeader header;
    std::uint64_t id;  // the sender's call
    std::uint32_t code;
    std::uint32_t text_bytes;
    std::uint32_t num_culprits;
    std::uint32_t unused;
};

struct OrderLeave {
    RecordHeader header;
    std::uint32_t aborted;  // what it has launched is not going to end
    std::uint32_t unused;
};

struct OrderReport {  // then follows an OrderView, encoded
    RecordHeader header;
    std::uint64_t version;
    std::int32_t rank;  // whose view it is
    std::uint32_t bytes;
};

struct OrderVerdict {  // then follow text and, for each rank in the deadlock, the rank and the version of its view
    RecordHeader header;
    std::uint32_t code;
    std::uint32_t text_bytes;
    std::uint64_t num_members;
};

// What one rank tells all others once it has waited for some time.
struct OrderView {
    // How much has gone to and come from one member of one group: two views that agree on it show one instant.
    struct Channel {
        std::uint64_t group;
        std::int32_t rank;
        std::uint32_t sent;
        std::uint32_t received;
        std::uint32_t unused;
        bool operator<(const Channel& other) const { return std::tie(group, rank) < std::tie(other.group, other.rank); }
    };

    std::uint64_t version = 0;
    std::vector<Channel> channels;  // in order
    Report report;

    std::string encode() const {
        const std::uint64_t count = channels.size();
        std::string bytes(reinterpret_cast<const char*>(&count), sizeof(count));
        bytes.append(reinterpret_cast<const char*>(channels.data()), count * sizeof(Channel));
        return bytes + report.encode();
    }

    static OrderView decode(std::uint64_t version, const std::string& bytes) {
        OrderView view;
        view.version = version;
        std::uint64_t count = 0;
        std::memcpy(&count, bytes.data(), sizeof(count));
        view.channels.resize(count);
        if (count != 0) std::memcpy(view.channels.data(), bytes.data() + sizeof(count), count * sizeof(Channel));
        view.report = Report::decode(bytes.substr(sizeof(count) + count * sizeof(Channel)));
        return view;
    }
};

class OrderGroup;

// One collective that this rank has issued.
struct Ordered {
    enum class State { issued, proposed, placed, popped };
    struct Member {
        int place = 0;  // in the group
        std::uint64_t id = 0;
        std::int64_t send_bytes = -1;  // that this rank has for it
        std::int64_t recv_bytes = -1;
        bool joined = false;
        bool proposed = false;
    };

    std::uint64_t id = 0;
    std::uint64_t key = 0;
    Signature signature;
    std::shared_ptr<OrderGroup> group;
    std::vector<Member> members;
    std::size_t me = 0;
    // For a receive from any rank whose sender is not known yet: the places it may be at, and the keys.
    std::vector<std::pair<int, std::uint64_t>> choices;
    std::int64_t wanted_bytes = -1;  // by such a receive
    std::size_t num_joined = 1;
    std::size_t num_proposed = 0;
    std::uint64_t clock = 0;  // own proposal, or later the largest
    State state = State::issued;
    Code code = Code::none;
    std::string error;
    std::vector<int> culprits;  // ranks
    Nanoseconds issued = 0;
    Nanoseconds deadline = 0;
    Nanoseconds waited_since = 0;  // by some thread; 0 for none yet
    Nanoseconds finished_at = 0;   // launched or failed
    bool has_future = false;       // what is chained to it may issue calls
    void* work = nullptr;         // the caller's; given back by `pop`

    bool done() const { return finished_at != 0; }
};
using OrderedPtr = std::shared_ptr<Ordered>;

class OrderGroup {
public:
    // A call that a peer has issued and this rank has not.
    struct Arrived {
        Signature signature;
        std::uint64_t id = 0;
        std::int64_t send_bytes = -1;
        std::int64_t recv_bytes = -1;
        Code code = Code::none;  // the peer has given up on it
        std::string error;
        std::vector<int> culprits;
    };
    struct Queue {
        std::deque<OrderedPtr> posted;  // own calls that not every member has joined
        std::map<int, std::deque<Arrived>> arrived;
    };

    std::uint64_t id = 0;   // of this process
    std::uint64_t uid = 0;  // of all members
    std::vector<int> ranks;  // as the user counts them
    int me = 0;
    std::vector<std::unique_ptr<Link>> links;  // by place; none to itself
    std::vector<std::uint32_t> sent;      // records that bear on calls, by place
    std::vector<std::uint32_t> received;  // likewise
    std::vector<Code> lost;
    std::shared_ptr<Arena> arena;
    Peers liveness;
    bool closed = false;
    std::unordered_map<std::uint64_t, Queue> queues;
};
using OrderGroupPtr = std::shared_ptr<OrderGroup>;

}  // namespace torchext::collectives
