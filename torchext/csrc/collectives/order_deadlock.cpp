// Deadlocks among ordered groups: ranks that wait for each other in calls, each of which another would make only later.
//
// What makes a deadlock is said in deadlock.cpp, and is found in the same way (report.hpp). How it is known differs, for
// these ranks need not share memory. A rank that has waited for some time sends its view to all ranks that it shares a
// group with, and those pass it on to such as it does not: what each of its threads waits for, and how many records have
// gone to and come from each member of each group. If of every two ranks in a set one has received what the other has
// sent, their views show one instant at which nothing was under way between them. A rank that was stuck in it, and that
// only others in the set could free, is stuck for good: views need not be taken back to be right.
//
// The first to know, usually the lowest rank of the set, tells the others, by the versions of their views. Failures that
// follow from it may come first, so a rank may have gone on with other calls: those of that view that still wait fail.
#if defined(__linux__)

#include <algorithm>
#include <set>

#include "order.hpp"

namespace torchext::collectives {

void Orderer::consider(std::unique_lock<std::mutex>& lock, Waiter& waiter, const Caller& caller) {
    if (!quiet_.holds(activity_) || waiter.where.empty()) {
        if (!quiet_.look(lock, caller, waiter, waiter.op->group->id, waiters_, issuers_, activity_)) return;
        if (waiter.op->done()) return;
    }
    publish(view(quiet_.holds(activity_)));
    look_for_deadlock();
    place();
    wake_peers();
}

OrderView Orderer::view(bool quiet) const {
    OrderView view;
    view.report.stuck = quiet;
    for (const auto* waiter : waiters_) {
        view.report.stuck = view.report.stuck && !waiter->where.empty();  // each thread describes itself
        Blocked b = blocked(*waiter->op);
        b.text += waiter->where;
        view.report.blocked.push_back(std::move(b));
    }
    for (const auto& op : in_flight(nullptr)) {
        if (!op->has_future) continue;
        view.report.blocked.push_back(blocked(*op));
        view.report.blocked.back().future = true;
    }
    for (const auto& group : groups_) {
        for (std::size_t p = 0; p < group->ranks.size(); ++p) {
            if (group->links[p] == nullptr || group->lost[p] != Code::none) continue;
            view.channels.push_back({group->uid, group->ranks[p], group->sent[p], group->received[p], 0});
        }
    }
    std::sort(view.channels.begin(), view.channels.end());
    return view;
}

Blocked Orderer::blocked(const Ordered& op) const {
    Blocked b;
    b.since = op.waited_since != 0 ? op.waited_since : op.issued;
    b.group = op.group->uid;
    if (op.signature.kind == OpKind::send) {  // between these two
        b.group ^= static_cast<std::uint64_t>(op.signature.root + 1) << 32 | static_cast<std::uint32_t>(op.signature.peer + 1);
    }
    b.tag = std::hash<std::string>{}(op.signature.tag);
    b.any = !op.choices.empty();
    b.waits_for = missing(op);
    b.text = op.signature.describe();
    return b;
}

std::map<int, std::pair<OrderGroup*, int>> Orderer::neighbours() const {
    std::map<int, std::pair<OrderGroup*, int>> links;
    for (const auto& group : groups_) {
        for (std::size_t p = 0; p < group->ranks.size(); ++p) {
            if (group->links[p] == nullptr || group->lost[p] != Code::none) continue;
            links.emplace(group->ranks[p], std::make_pair(group.get(), static_cast<int>(p)));
        }
    }
    return links;
}

void Orderer::publish(OrderView view) {
    const std::string bytes = view.encode();
    if (groups_.empty() || bytes == published_) return;
    const int own = own_rank();
    const bool waits = !view.report.blocked.empty();
    // Versions grow also from one orderer of a process to its next.
    view.version = std::max(views_[own].version + 1, static_cast<std::uint64_t>(now()));
    published_ = waits ? bytes : std::string();
    OrderReport record{};
    record.version = view.version;
    record.rank = own;
    record.bytes = static_cast<std::uint32_t>(bytes.size());
    for (const auto& [rank, link] : neighbours()) {
        send_record(*link.first, link.second, OrderRecord::report, record, bytes);
    }
    if (view.report.stuck) {
        std::vector<OrderedPtr> ops;
        for (const auto* waiter : waiters_) ops.push_back(waiter->op);
        claims_.emplace_back(view.version, std::move(ops));
        if (claims_.size() > kMaxClaims) claims_.pop_front();
    }
    views_[own] = std::move(view);
}

void Orderer::on_report(const OrderReport& record) {
    const std::string bytes = text_after(record, record.bytes);
    OrderView& known = views_[record.rank];
    if (record.rank == own_rank() || known.version >= record.version) return;
    known = OrderView::decode(record.version, bytes);
    std::set<int> told{record.rank};
    for (const auto& channel : known.channels) told.insert(channel.rank);
    for (const auto& [rank, link] : neighbours()) {
        if (told.count(rank) == 0) send_record(*link.first, link.second, OrderRecord::report, record, bytes);
    }
}

void Orderer::look_for_deadlock() {
    std::map<int, Seen> stuck;
    for (const auto& [rank, view] : views_) {
        if (view.report.stuck) stuck.emplace(rank, Seen{view.version, view.report});
    }
    keep_deadlocked(stuck);
    if (groups_.empty() || stuck.count(own_rank()) == 0) {
        num_sightings_ = 0;
        return;
    }
    // Of each two, by group: what one has sent and received the other has received and sent.
    const auto between = [&](int from, int to, bool turned) {
        std::vector<std::tuple<std::uint64_t, std::uint32_t, std::uint32_t>> counts;
        for (const auto& c : views_.at(from).channels) {
            if (c.rank == to) counts.emplace_back(c.group, turned ? c.received : c.sent, turned ? c.sent : c.received);
        }
        return counts;
    };
    std::map<int, std::uint64_t> versions;
    for (const auto& [rank, seen] : stuck) {
        versions.emplace(rank, seen.version);
        for (const auto& [other, unused] : stuck) {
            if (other < rank && between(rank, other, false) != between(other, rank, true)) return;
        }
    }
    // One is enough to tell all; should it not, because it is stopped, the others do.
    if (stuck.begin()->first != own_rank() && ++num_sightings_ <= 4) return;
    const Circle circle = describe(
        stuck, [](int rank) { return "rank " + std::to_string(rank); }, kMaxText - 500, "");
    spread_verdict(circle.code, circle.text, versions);
}

void Orderer::on_verdict(const OrderVerdict& record) {
    const char* bytes = reinterpret_cast<const char*>(&record + 1) + record.text_bytes;
    std::map<int, std::uint64_t> versions;
    for (std::size_t i = 0; i < record.num_members; ++i) {
        std::uint64_t pair[2];
        std::memcpy(pair, bytes + i * sizeof(pair), sizeof(pair));
        versions.emplace(static_cast<int>(pair[0]), pair[1]);
    }
    spread_verdict(static_cast<Code>(record.code), text_after(record, record.text_bytes), versions);
}

void Orderer::spread_verdict(Code code, const std::string& text, const std::map<int, std::uint64_t>& versions) {
    // Several ranks may tell of one deadlock, by different versions, and each goes around by all links: passed on is only
    // what tells of a later view of some rank.
    bool news = false;
    for (const auto& [rank, version] : versions) {
        news |= version > judged_[rank];
        judged_[rank] = std::max(judged_[rank], version);
    }
    if (!news) return;
    std::string rest = text;
    std::vector<int> members;
    for (const auto& [rank, version] : versions) {
        const std::uint64_t pair[2] = {static_cast<std::uint64_t>(rank), version};
        rest.append(reinterpret_cast<const char*>(pair), sizeof(pair));
        members.push_back(rank);
    }
    OrderVerdict record{};
    record.code = static_cast<std::uint32_t>(code);
    record.text_bytes = static_cast<std::uint32_t>(text.size());
    record.num_members = versions.size();
    for (const auto& [rank, link] : neighbours()) {
        if (versions.count(rank) != 0) send_record(*link.first, link.second, OrderRecord::verdict, record, rest);
    }
    const auto own = versions.find(own_rank());
    if (own == versions.end()) return;
    const auto claim = std::find_if(claims_.begin(), claims_.end(),
                                    [&](const auto& known) { return known.first == own->second; });
    if (claim == claims_.end()) return;
    ++num_deadlocks_;
    const auto ops = claim->second;
    std::erase_if(claims_, [&](const auto& known) { return known.second == ops; });
    for (const auto& op : ops) {
        // Who was told sooner may have joined it since; then a place may be known to others, who will launch it.
        if (!missing(*op).empty()) fail(op, code, text, members, true);
    }
}

std::map<int, std::pair<bool, Report>> Orderer::reports() {
    std::lock_guard lock(mutex_);
    pass();  // nobody else may look while nothing is in flight
    std::map<int, std::pair<bool, Report>> all;
    const auto reached = neighbours();
    for (const auto& group : groups_) {
        for (const int rank : group->ranks) all[rank].first = rank != own_rank() && reached.count(rank) == 0;
    }
    for (auto& [rank, entry] : all) {
        const auto known = views_.find(rank);
        if (known != views_.end()) entry.second = known->second.report;
    }
    return all;
}

std::vector<Blocked> Orderer::pending() {
    std::lock_guard lock(mutex_);
    std::vector<Blocked> calls;
    for (const auto& op : in_flight(nullptr)) calls.push_back(blocked(*op));
    return calls;
}

}  // namespace torchext::collectives

#endif
