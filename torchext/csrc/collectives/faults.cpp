// What goes wrong: dead and absent ranks, timeouts, mismatches. See engine.hpp.
#if defined(__linux__)

#include "engine.hpp"

namespace torchext::collectives {

void Engine::check(Nanoseconds t) {
    for (const int p : liveness_.newly_dead()) {
        if (peers_[at(p)].lost == Code::none) lose(p, Code::peer_died);
    }
    for (int p = 0; p < world_size_; ++p) {
        // acquire: what it said before it left is in its ring
        if (p != rank_ && peers_[at(p)].lost == Code::none &&
            arena_->cell(p).presence.load(std::memory_order_acquire) == static_cast<std::uint32_t>(Presence::left)) {
            lose(p, Code::peer_left);
        }
    }
    for (const auto& op : in_flight()) {
        if (t > op->deadline) fail(op, Code::timeout, absence(*op), missing(*op), true);
    }
    wake_touched();
}

void Engine::lose(int p, Code code) {
    // First what was said before it went, by others too: it may have gone for a verdict that is for this rank as well.
    for (int q = 0; q < world_size_; ++q) {
        if (q != rank_) drain(q);
    }
    if (arena_->cell(p).presence.load(std::memory_order_acquire) == static_cast<std::uint32_t>(Presence::left)) {
        code = Code::peer_left;  // it had said goodbye before it ended
    }
    peers_[at(p)].lost = code;
    peers_[at(p)].backlog.clear();
    for (const auto& op : in_flight()) {
        const int member = op->members->index(p);
        if (member >= 0) fail_if_needed(op, member, code);
    }
    // Failed calls that only the lost were still to join: nothing comes for them any more.
    std::vector<OpPtr> over;
    for (const auto& [id, op] : ops_) {
        if (op->done && !op->all_joined() && all_come(*op)) over.push_back(op);
    }
    for (const auto& op : over) {
        forget_key(op);
        ops_.erase(op->id);
    }
}

void Engine::fail_if_needed(const OpPtr& op, int member, Code code) {
    if (!op->choices.empty() && !all_come(*op)) return;  // another may still send
    const auto& state = op->peers[at(member)];
    const bool by_stage =
        op->staged && !(op->granted && StageLayout::finished(op->block, member).load(std::memory_order_acquire) != 0);
    if (!state.joined || !state.have || !state.sent || by_stage) {
        const int p = op->world_rank(member);
        if (const Unexpected* other = given_up(*op, p); other != nullptr && code == Code::peer_left) {
            fail(op, Code::mismatch,
                 name(p) + " made another call on this group, " + other->signature.describe() +
                     ", and has left after that had timed out: " + other->error,
                 {p}, true);
            return;
        }
        fail(op, code,
             name(p) +
                 (code == Code::peer_died ? " died" : " has left (it destroyed or aborted its process group)") +
                 (state.joined ? " in the middle of it" : " without joining it" + instead(*op, p)),
             {p}, true);
    }
}

void Engine::fail(const OpPtr& op, Code code, const std::string& text, std::vector<int> culprits, bool tell) {
    if (op->done) return;
    op->code = code;
    op->error = text;
    op->culprits = std::move(culprits);
    if (tell) {
        for (int m = 0; m < op->n; ++m) {
            if (m != op->me) send_fail(*op, m);
        }
    }
    finish(op);
}

void Engine::send_fail(const Op& op, int member) {
    const int p = op.world_rank(member);
    if (peers_[at(p)].lost != Code::none) return;
    FailRecord record{};
    record.header.kind = static_cast<std::uint8_t>(RecordKind::fail);
    record.id = op.id;
    // A timeout or an abort here is, over there, a peer that failed; a death or a mismatch is what it is.
    const bool own = op.code == Code::timeout || op.code == Code::aborted || op.code == Code::peer_failed;
    record.code = static_cast<std::uint32_t>(own ? Code::peer_failed : op.code);
    std::vector<int> culprits = own || op.culprits.empty() ? std::vector<int>{rank_} : op.culprits;
    if (culprits.size() > kMaxCulprits) culprits.resize(kMaxCulprits);
    std::string text = own && op.code != Code::peer_failed
                           ? name(rank_) + " gave up on it: " + op.error
                           : op.error;
    if (text.size() > kMaxText) text.resize(kMaxText);
    record.cause = static_cast<std::uint32_t>(op.code);
    record.text_bytes = static_cast<std::uint32_t>(text.size());
    record.num_culprits = static_cast<std::uint32_t>(culprits.size());
    send_record(p, record, tail(text, culprits));
}

// A call on the op's group that a peer made in vain, until its timeout.
const Engine::Unexpected* Engine::given_up(const Op& op, int p) const {
    for (const auto& [key, queue] : keys_) {
        const auto found = queue.arrived.find(p);
        if (found == queue.arrived.end()) continue;
        for (const auto& call : found->second) {
            if (call.signature.group == op.signature.group && call.cause == Code::timeout) return &call;
        }
    }
    return nullptr;
}

std::vector<int> Engine::missing(const Op& op) const {
    std::vector<int> ranks;
    for (int m = 0; m < op.n; ++m) {
        if (m != op.me && !op.peers[at(m)].joined) ranks.push_back(op.world_rank(m));
    }
    return ranks;
}

std::string Engine::absence(const Op& op) const {
    std::string text;
    for (const int p : missing(op)) {
        text += (text.empty() ? "" : "; ") + name(p) + " has not joined it" + instead(op, p);
        if (const auto read = arena_->board(p).read()) {
            for (const auto& b : Report::decode(read->second).blocked) {
                if (!b.future) text += "; a thread of it waits in " + b.text;
            }
        }
    }
    return text.empty() ? "all members have joined it, but some do not go on (stopped?)" : text;
}

std::string Engine::instead(const Op& op, int p) const {
    std::string text;
    int count = 0;
    for (const auto& [key, queue] : keys_) {
        const auto found = queue.arrived.find(p);
        if (found == queue.arrived.end()) continue;
        for (const auto& call : found->second) {
            if (call.signature.group != op.signature.group || ++count > 3) continue;
            text += (text.empty() ? "" : ", ") + call.signature.describe();
        }
    }
    if (count > 3) text += " and " + std::to_string(count - 3) + " more";
    return text.empty() ? " and has called nothing else on this group that this rank has not"
                        : ", it has called instead " + text;
}

std::vector<Blocked> Engine::pending() {
    std::vector<Blocked> calls;
    Entry entry(*this);
    for (const auto& op : in_flight()) calls.push_back(blocked(*op));
    return calls;
}

std::vector<std::pair<int, std::string>> Engine::unanswered() {
    std::vector<std::pair<int, std::string>> calls;
    Entry entry(*this);
    for (int p = 0; p < world_size_; ++p) {
        if (p != rank_) drain(p);  // nobody drives while nothing is in flight
    }
    wake_touched();
    for (const auto& [key, queue] : keys_) {
        for (const auto& [p, arrived] : queue.arrived) {
            for (const auto& call : arrived) {
                if (call.code == Code::none) calls.emplace_back(p, call.signature.describe());
            }
        }
    }
    return calls;
}

}  // namespace torchext::collectives

#endif
