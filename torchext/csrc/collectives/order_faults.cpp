// What goes wrong: dead and absent members, timeouts, mismatches. See order.hpp.
#if defined(__linux__)

#include "order.hpp"

#include <algorithm>
#include <cstring>

namespace torchext::collectives {

std::vector<std::pair<OrderGroupPtr, int>> Orderer::fallen() {
    std::lock_guard lock(mutex_);
    return std::exchange(fallen_, {});
}

void Orderer::cancel(const OrderedPtr& op, const std::string& text) {
    std::lock_guard lock(mutex_);
    if (!op->done()) fail(op, Code::timeout, text + "; " + absence(*op), missing(*op), true);
    place();
    wake_peers();
}

void Orderer::leave(const OrderGroupPtr& group, const std::string& text, bool aborted) {
    std::lock_guard lock(mutex_);
    if (group->closed) return;
    group->closed = true;
    for (const auto& op : in_flight(group.get())) fail(op, Code::aborted, text, {}, true);
    OrderLeave record{};
    record.header = {sizeof(record), static_cast<std::uint8_t>(OrderRecord::leave), {}};
    record.aborted = aborted;
    for (std::size_t p = 0; p < group->links.size(); ++p) {
        if (group->links[p] != nullptr) send(*group, static_cast<int>(p), &record);
    }
    const Nanoseconds end = now() + kSecond;  // for what finds no room at once; tiny records only
    while (flush(*group) && now() < end) {
        wake_peers();
        sched_yield();
    }
    if (group->arena != nullptr) {
        // release: all that this rank had to say lies in its rings before others see that it has left
        group->arena->cell(group->me).presence.store(
            static_cast<std::uint32_t>(aborted ? kAborted : static_cast<std::uint32_t>(Presence::left)),
            std::memory_order_release);
    }
    wake_peers();
    group->links.clear();
    group->queues.clear();  // calls that not all have joined, which hold the group
    group->arena.reset();
    groups_.erase(std::find(groups_.begin(), groups_.end(), group));
    place();
    ring_self();
}

void Orderer::check() {
    const Nanoseconds t = checked_ = now();
    for (std::size_t g = 0; g < groups_.size(); ++g) {
        OrderGroup& group = *groups_[g];
        if (group.arena == nullptr) continue;
        for (std::size_t p = 0; p < group.links.size(); ++p) {
            // acquire: what it said before it left is in its ring
            const auto presence = group.arena->cell(static_cast<int>(p)).presence.load(std::memory_order_acquire);
            if (static_cast<int>(p) == group.me || presence <= 1 || group.lost[p] != Code::none) continue;
            drain(group, static_cast<int>(p));
            lose(group, static_cast<int>(p), Code::peer_left, presence == kAborted);
        }
        for (const int p : group.liveness.newly_dead()) {
            drain(group, p);
            lose(group, p, Code::peer_died, true);
        }
    }
    for (const auto& op : in_flight(nullptr)) {
        if (t > op->deadline) fail(op, Code::timeout, absence(*op), missing(*op), true);
    }
    place();
    wake_peers();
}

void Orderer::lose(OrderGroup& group, int p, Code code, bool aborted) {
    if (group.lost[at(p)] != Code::none) return;
    group.lost[at(p)] = code;
    if (neighbours().count(group.ranks[at(p)]) == 0) {
        views_.erase(group.ranks[at(p)]);
        judged_.erase(group.ranks[at(p)]);
    }
    for (const auto& op : in_flight(&group)) {
        for (const auto& member : op->members) {
            if (member.place == p) fail_if_needed(op, member, code);
        }
        if (op->choices.empty()) continue;
        std::erase_if(op->choices, [p](const auto& choice) { return choice.first == p; });
        if (op->choices.empty()) {
            fail(op, code, "the last rank that could send, rank " + std::to_string(group.ranks[at(p)]) + ", is gone",
                 {group.ranks[at(p)]}, false);
        }
    }
    if (aborted) {
        for (const auto& known : groups_) {
            if (known.get() == &group) fallen_.emplace_back(known, p);
        }
        background_.notify_one();
        if (num_sleeping_ != 0) ring_self();
    }
}

void Orderer::fail_if_needed(const OrderedPtr& op, const Ordered::Member& member, Code code) {
    if (op->done() || (member.joined && member.proposed)) return;
    const int rank = rank_of(*op, member);
    fail(op, code,
         "rank " + std::to_string(rank) +
             (code == Code::peer_died ? " died" : " has left (it destroyed or aborted its process group)") +
             (member.joined ? " in the middle of it" : " without joining it" + instead(*op, member.place)),
         {rank}, true);
}

void Orderer::fail(const OrderedPtr& op, Code code, const std::string& text, std::vector<int> culprits, bool tell) {
    if (op->done()) return;
    op->code = code;
    op->error = text;
    op->culprits = std::move(culprits);
    if (tell) {
        for (const auto& member : op->members) {
            if (member.place != op->group->me) send_fail(*op, member);
        }
    }
    std::erase(any_, op);
    if (const auto found = places_.find(op->id); found != places_.end()) {
        waiting_.erase(found->second);
        places_.erase(found);
    }
    finish(op);
}

void Orderer::send_fail(const Ordered& op, const Ordered::Member& member) {
    auto& group = *op.group;
    if (group.lost[at(member.place)] != Code::none) return;
    // A timeout or an abort here is, over there, a peer that failed; a death or a mismatch is what it is.
    const bool own = op.code == Code::timeout || op.code == Code::aborted || op.code == Code::peer_failed;
    std::string text = own && op.code != Code::peer_failed
                           ? "rank " + std::to_string(group.ranks[at(group.me)]) + " gave up on it: " + op.error
                           : op.error;
    if (text.size() > kMaxText) text.resize(kMaxText);
    std::vector<int> culprits = own || op.culprits.empty() ? std::vector<int>{group.ranks[at(group.me)]} : op.culprits;
    if (culprits.size() > kMaxRanks) culprits.resize(kMaxRanks);
    OrderFail record{};
    record.id = op.id;
    record.code = static_cast<std::uint32_t>(own ? Code::peer_failed : op.code);
    record.text_bytes = static_cast<std::uint32_t>(text.size());
    record.num_culprits = static_cast<std::uint32_t>(culprits.size());
    send_record(group, member.place, OrderRecord::fail, record, tail(text, culprits));
}

void Orderer::on_fail(OrderGroup& group, int p, const OrderFail& record) {
    const auto code = static_cast<Code>(record.code);
    const std::string text = text_after(record, record.text_bytes);
    const std::vector<int> culprits = numbers_after(record, record.text_bytes, record.num_culprits);
    for (const auto& op : in_flight(&group)) {
        for (const auto& member : op->members) {
            if (member.place == p && member.joined && member.id == record.id) {
                fail(op, code, text, culprits, false);
                return;
            }
        }
    }
    for (auto& [key, queue] : group.queues) {
        const auto found = queue.arrived.find(p);
        if (found == queue.arrived.end()) continue;
        for (auto& call : found->second) {
            if (call.id != record.id) continue;
            call.code = code;
            call.error = text;
            call.culprits = culprits;
            return;
        }
    }
}

std::vector<int> Orderer::missing(const Ordered& op) {
    std::vector<int> ranks;
    for (const auto& member : op.members) {
        if (!member.joined) ranks.push_back(rank_of(op, member));
    }
    for (const auto& [place, key] : op.choices) ranks.push_back(op.group->ranks[at(place)]);
    return ranks;
}

std::string Orderer::absence(const Ordered& op) {
    std::string text;
    for (const auto& member : op.members) {
        if (member.joined) continue;
        text += (text.empty() ? "rank " : "; rank ") + std::to_string(rank_of(op, member)) +
                " has not joined it" + instead(op, member.place);
    }
    for (const auto& [place, key] : op.choices) {
        text += (text.empty() ? "rank " : "; rank ") + std::to_string(op.group->ranks[at(place)]) + " has not sent" +
                instead(op, place);
    }
    return text.empty() ? "all members have joined it, but some do not go on (stopped?)" : text;
}

std::string Orderer::instead(const Ordered& op, int p) {
    std::string text;
    int count = 0;
    for (const auto& [key, queue] : op.group->queues) {
        const auto found = queue.arrived.find(p);
        if (found == queue.arrived.end()) continue;
        for (const auto& call : found->second) {
            if (++count > 3) continue;
            text += (text.empty() ? "" : ", ") + call.signature.describe();
        }
    }
    if (count > 3) text += " and " + std::to_string(count - 3) + " more";
    return text.empty() ? " and has called nothing else on this group that this rank has not"
                        : ", it has called instead " + text;
}

}  // namespace torchext::collectives

#endif
