// Calls, their partners on other ranks, and their place in the order; see order.hpp.
#if defined(__linux__)

#include "order.hpp"

#include <algorithm>
#include <cstring>

namespace torchext::collectives {

Orderer::Place Orderer::place_of(const Ordered& op) {
    return {op.clock, op.group->ranks[at(op.members.front().place)], op.members.front().id};
}

OrderedPtr Orderer::make(const OrderGroupPtr& group, const Issue& request) {
    issuers_.note();
    ++activity_;
    auto op = std::make_shared<Ordered>();
    op->id = ++last_id_;
    op->signature = request.signature;
    op->group = group;
    op->issued = now();
    op->deadline = op->issued + request.timeout;
    op->work = request.work;
    ++num_active_;
    active_.emplace(op->id, op);
    if (group->closed) fail(op, Code::aborted, "the process group was destroyed or aborted", {}, false);
    return op;
}

OrderedPtr Orderer::issue(const OrderGroupPtr& group, const Issue& request) {
    std::unique_lock lock(mutex_);
    const OrderedPtr op = make(group, request);
    if (op->done()) return op;
    op->key = request.signature.key(request.dims_hash);
    for (std::size_t i = 0; i < request.members.size(); ++i) {
        Ordered::Member member;
        member.place = request.members[i];
        if (!request.send_bytes.empty()) member.send_bytes = request.send_bytes[i];
        if (!request.recv_bytes.empty()) member.recv_bytes = request.recv_bytes[i];
        if (member.place == group->me) {
            op->me = i;
            member.joined = true;
            member.id = op->id;
        }
        op->members.push_back(member);
    }
    for (const auto& member : op->members) {
        if (member.place != group->me) send_join(*op, member);
    }
    wake_peers();  // before anything else: it is what they wait for
    match(op);
    if (!op->done()) {
        for (const auto& member : op->members) {
            if (member.place != group->me && group->lost[at(member.place)] != Code::none) {
                fail_if_needed(op, member, group->lost[at(member.place)]);
            }
        }
    }
    set_off(op, request.will_wait);
    return op;
}

void Orderer::set_off(const OrderedPtr& op, bool will_wait) {
    settle(op);
    place();
    wake_peers();
    if (!will_wait && waiters_.empty() && busy()) background_.notify_one();
}

OrderedPtr Orderer::issue_any(const OrderGroupPtr& group, const Issue& request) {
    std::unique_lock lock(mutex_);
    const OrderedPtr op = make(group, request);
    if (op->done()) return op;
    op->wanted_bytes = request.recv_bytes.front();
    for (const int source : request.members) {
        if (group->lost[at(source)] != Code::none) continue;
        Signature signature = request.signature;
        signature.root = source;
        op->choices.emplace_back(source, signature.key(request.dims_hash));
    }
    if (op->choices.empty()) {
        fail(op, Code::peer_left, "there is no rank left that could send", {}, false);
        return op;
    }
    const auto sent = std::find_if(op->choices.begin(), op->choices.end(), [&](const auto& choice) {
        const auto queue = group->queues.find(choice.second);
        return queue != group->queues.end() && queue->second.arrived.count(choice.first) != 0;
    });
    if (sent == op->choices.end()) {
        any_.push_back(op);
    } else {
        choose(op, sent->first, sent->second);
        match(op);
    }
    set_off(op, request.will_wait);
    return op;
}

void Orderer::choose(const OrderedPtr& op, int place, std::uint64_t key) {
    ++activity_;
    op->choices.clear();
    op->signature.root = place;
    op->key = key;
    op->members.resize(2);  // of the two, the sender first
    op->members[0].place = place;
    op->members[0].recv_bytes = op->wanted_bytes;
    op->members[1].place = op->group->me;
    op->members[1].joined = true;
    op->members[1].id = op->id;
    op->me = 1;
    send_join(*op, op->members[0]);
}

OrderedPtr Orderer::pop() {
    std::lock_guard lock(mutex_);
    if (ready_.empty()) return nullptr;
    auto op = std::move(ready_.front());
    ready_.pop_front();
    op->state = Ordered::State::popped;
    return op;
}

void Orderer::watch(const OrderedPtr& op) {
    std::lock_guard lock(mutex_);
    op->has_future = true;
    ++activity_;
}

std::tuple<std::uint64_t, std::size_t, std::uint64_t> Orderer::counts() {
    std::lock_guard lock(mutex_);
    return {last_id_, num_active_, num_deadlocks_};
}

void Orderer::send_join(const Ordered& op, const Ordered::Member& member) {
    alignas(16) std::byte room[sizeof(OrderJoin) + kMaxTag + 16]{};
    const std::size_t tag = std::min(op.signature.tag.size(), kMaxTag);
    auto* join = new (room) OrderJoin{};
    join->header = {static_cast<std::uint32_t>(round_up(sizeof(OrderJoin) + tag, 16)),
                    static_cast<std::uint8_t>(OrderRecord::join),
                    {}};
    put_signature(*join, op.signature);
    join->tag_bytes = static_cast<std::uint32_t>(tag);
    join->key = op.key;
    join->id = op.id;
    join->send_bytes = member.send_bytes;
    join->recv_bytes = member.recv_bytes;
    std::memcpy(room + sizeof(OrderJoin), op.signature.tag.data(), tag);
    send(*op.group, member.place, room);
}

void Orderer::send(OrderGroup& group, int p, const void* record) {
    const auto kind = static_cast<OrderRecord>(static_cast<const RecordHeader*>(record)->kind);
    group.sent[at(p)] += kind != OrderRecord::report && kind != OrderRecord::verdict;
    group.links[at(p)]->send(static_cast<const std::byte*>(record));
    sent_ = true;
}

void Orderer::match(const OrderedPtr& op) {
    if (op->members.size() == 1) return;
    auto& queue = op->group->queues[op->key];
    queue.posted.push_back(op);
    for (auto& member : op->members) {
        const auto found = queue.arrived.find(member.place);
        if (found == queue.arrived.end()) continue;
        const auto call = std::move(found->second.front());
        found->second.pop_front();
        if (found->second.empty()) queue.arrived.erase(found);
        join(op, member, call);
    }
    tidy(op->group.get(), op->key, op);
}

void Orderer::on_join(OrderGroup& group, int p, const OrderJoin& record) {
    OrderGroup::Arrived call;
    call.signature = signature_of(record);
    call.id = record.id;
    call.send_bytes = record.send_bytes;
    call.recv_bytes = record.recv_bytes;
    auto& queue = group.queues[record.key];
    if (queue.arrived.find(p) == queue.arrived.end()) {
        for (const auto& posted : queue.posted) {
            const auto member = std::find_if(posted->members.begin(), posted->members.end(),
                                             [&](const auto& m) { return m.place == p; });
            if (member == posted->members.end() || member->joined) continue;
            const OrderedPtr op = posted;
            join(op, *member, call);
            settle(op);
            tidy(&group, record.key, op);
            return;
        }
    }
    for (std::size_t i = 0; i < any_.size(); ++i) {
        const OrderedPtr op = any_[i];
        const auto choice = std::make_pair(p, record.key);
        if (op->group.get() != &group ||
            std::find(op->choices.begin(), op->choices.end(), choice) == op->choices.end()) {
            continue;
        }
        any_.erase(any_.begin() + static_cast<std::ptrdiff_t>(i));
        choose(op, p, record.key);
        join(op, op->members[0], call);
        settle(op);
        return;
    }
    queue.arrived[p].push_back(std::move(call));
}

void Orderer::join(const OrderedPtr& op, Ordered::Member& member, const OrderGroup::Arrived& call) {
    ++activity_;
    member.joined = true;
    member.id = call.id;
    ++op->num_joined;
    if (op->done()) return;  // failed, of which the peer has been told
    if (call.code != Code::none) {
        fail(op, call.code, call.error, call.culprits, true);
    } else if (!op->signature.same_call(call.signature)) {
        fail(op, Code::mismatch,
             "rank " + std::to_string(rank_of(*op, member)) + " called " + call.signature.describe() +
                 ", which does not go together with it",
             {rank_of(*op, member)}, true);
    } else if ((member.send_bytes >= 0 && call.recv_bytes >= 0 && member.send_bytes != call.recv_bytes) ||
               (member.recv_bytes >= 0 && call.send_bytes >= 0 && member.recv_bytes != call.send_bytes)) {
        fail(op, Code::mismatch,
             "rank " + std::to_string(rank_of(*op, member)) + " called " + call.signature.describe() +
                 ", which sends this rank " + std::to_string(call.send_bytes) + " bytes where it expects " +
                 std::to_string(member.recv_bytes) + ", and expects " + std::to_string(call.recv_bytes) +
                 " where it sends " + std::to_string(member.send_bytes),
             {rank_of(*op, member)}, true);
    }
}

void Orderer::tidy(OrderGroup* group, std::uint64_t key, const OrderedPtr& op) {
    if (op->num_joined < op->members.size()) return;
    const auto found = group->queues.find(key);
    if (found == group->queues.end()) return;
    auto& posted = found->second.posted;
    const auto it = std::find(posted.begin(), posted.end(), op);
    if (it != posted.end()) posted.erase(it);
    if (posted.empty() && found->second.arrived.empty()) group->queues.erase(found);
}

void Orderer::settle(const OrderedPtr& op) {
    if (op->done() || !op->choices.empty() || op->num_joined < op->members.size()) return;
    if (op->state == Ordered::State::issued) {
        op->state = Ordered::State::proposed;
        ++clock_;
        op->clock = std::max(op->clock, clock_);
        OrderPropose record{};
        record.header = {sizeof(record), static_cast<std::uint8_t>(OrderRecord::propose), {}};
        record.clock = clock_;
        for (const auto& member : op->members) {
            if (member.place == op->group->me) continue;
            record.id = member.id;
            send(*op->group, member.place, &record);
        }
        ++op->num_proposed;
        // Under its own proposal, which is no later than its place will be; `waiting_` is ordered by that.
        waiting_.emplace(Place{clock_, rank_of(*op, op->members.front()), op->members.front().id}, op);
        places_[op->id] = Place{clock_, rank_of(*op, op->members.front()), op->members.front().id};
    }
    if (op->state == Ordered::State::proposed && op->num_proposed == op->members.size()) {
        op->state = Ordered::State::placed;
        waiting_.erase(places_[op->id]);
        places_[op->id] = place_of(*op);
        waiting_.emplace(place_of(*op), op);
    }
}

void Orderer::on_propose(OrderGroup& group, int p, const OrderPropose& record) {
    clock_ = std::max(clock_, record.clock);
    const auto found = active_.find(record.id);
    if (found == active_.end()) return;  // failed here, of which the peer has been told
    const OrderedPtr op = found->second;
    for (auto& member : op->members) {
        if (member.place != p || member.proposed || op->group.get() != &group) continue;
        member.proposed = true;
        ++op->num_proposed;
        op->clock = std::max(op->clock, record.clock);
        settle(op);
    }
}

void Orderer::place() {
    while (!waiting_.empty() && waiting_.begin()->second->state == Ordered::State::placed) {
        const OrderedPtr op = waiting_.begin()->second;
        waiting_.erase(waiting_.begin());
        places_.erase(op->id);
        finish(op);
    }
}

void Orderer::finish(const OrderedPtr& op) {
    ++activity_;
    op->finished_at = now();
    --num_active_;
    active_.erase(op->id);
    ready_.push_back(op);
    if (num_sleeping_ != 0) ring_self();
}

std::vector<OrderedPtr> Orderer::in_flight(const OrderGroup* group) const {
    std::vector<OrderedPtr> ops;
    for (const auto& [id, op] : active_) {
        if (group == nullptr || op->group.get() == group) ops.push_back(op);
    }
    return ops;
}

}  // namespace torchext::collectives

#endif
