// Deadlocks: ranks that wait for each other in calls, each of which another of them would make only later.
//
// What is known. A rank is stuck if each of its threads that could issue a call waits for one. It can go on once all
// members that such a call needs have made it, and those that have not must be able to: so a rank is alive if it is not
// stuck, or if one of its waits needs members only that are alive or have joined. What remains is a deadlock: no rank in
// it can go on before another in it does. It is a fact that stays true until somebody acts on it.
//
// How it is known. A rank that has waited for some time publishes what it waits for; it withdraws the report before
// anything that bears on it is seen by others: a call that it issues, a record that it takes out of a ring. Who reads
// the reports of a set of ranks, finds the rings between them empty and then the reports unchanged, has seen all of it
// at one instant. A rank that is merely slow, or stopped, is not stuck or has something in its rings: no false alarm.
//
// What happens then. The first to know, usually the lowest rank of the set, tells each other member through its ring,
// naming the report that it is about; a rank whose report has changed since takes no notice.
#if defined(__linux__)

#include "engine.hpp"

namespace torchext::collectives {

void Engine::withdraw() {
    published_ = 0;
    published_stuck_ = false;
    num_sightings_ = 0;
    arena_->board(rank_).clear();
}

void Engine::consider(std::unique_lock<std::mutex>& lock, Waiter& waiter, const Caller& caller) {
    if (!published_stuck_ || waiter.where.empty()) {
        if (!quiet_.look(lock, caller, waiter, waiter.op->group_uid, waiters_, issuers_, activity_)) return;
        if (waiter.op->done || waiter.deferred) return;
        const std::string bytes = report(quiet_.holds(activity_)).encode();
        if (bytes.size() > Board::kCapacity) return;  // hundreds of threads: nothing is known, so nothing is claimed
        Board& board = arena_->board(rank_);
        const auto current = board.read();
        if (published_ == 0 || !current.has_value() || current->second != bytes) published_ = board.write(bytes);
        published_stuck_ = Report::decode(bytes).stuck;
    }
    if (published_stuck_) look_for_deadlock();
}

Report Engine::report(bool quiet) const {
    Report report;
    report.stuck = quiet && !in_transit();
    for (const auto* waiter : waiters_) {
        report.stuck = report.stuck && !waiter->where.empty();  // each thread describes itself, one after the other
        Blocked b = blocked(*waiter->op);
        b.since = waiter->since;
        b.deferrable = waiter->deferrable;
        b.text += waiter->where;
        report.blocked.push_back(std::move(b));
    }
    for (const auto& op : in_flight()) {
        if (!op->notify) continue;
        report.blocked.push_back(blocked(*op));
        report.blocked.back().future = true;
    }
    return report;
}

Blocked Engine::blocked(const Op& op) const {
    Blocked b;
    b.since = op.issued;
    b.group = op.signature.group;  // for point-to-point calls, the two of them
    b.tag = std::hash<std::string>{}(op.signature.tag);
    for (int m = 0; m < op.n; ++m) {
        if (m != op.me && op.needs(m)) b.waits_for.push_back(op.world_rank(m));
    }
    b.any = !op.choices.empty();
    b.text = op.signature.describe();
    return b;
}

// Whether something is under way that may change what this rank waits for, or what its callbacks may do.
bool Engine::in_transit() const {
    for (const auto& peer : peers_) {
        if (!peer.backlog.empty()) return true;
    }
    for (const auto& op : sends_) {
        for (int m = 0; m < op->n && !op->done; ++m) {
            if (m != op->me && op->peers[at(m)].joined && !op->peers[at(m)].sent) return true;
        }
    }
    return any_watched_ && (!listening_ || !notices_.empty());
}

void Engine::look_for_deadlock() {
    std::map<int, Seen> stuck;
    for (int p = 0; p < world_size_; ++p) {
        const auto read = arena_->board(p).read();
        if (!read.has_value() || peers_[at(p)].lost != Code::none) continue;
        Report report = Report::decode(read->second);
        if (report.stuck) stuck.emplace(p, Seen{read->first, std::move(report)});
    }
    keep_deadlocked(stuck);
    if (stuck.count(rank_) == 0) {
        num_sightings_ = 0;
        return;
    }
    for (const auto& [from, report] : stuck) {
        for (const auto& [to, other] : stuck) {
            if (from == to) continue;
            // acquire: a head that has caught up comes after the withdrawal that what was read has led to
            const auto& ring = arena_->ring_control(from, to);
            if (ring.head.load(std::memory_order_acquire) != ring.tail.load(std::memory_order_acquire)) return;
        }
    }
    for (const auto& [p, seen] : stuck) {
        if (arena_->board(p).version() != seen.version) return;
    }
    // One is enough to tell all; should it not, because it is stopped, the others do.
    if (stuck.begin()->first == rank_ || ++num_sightings_ > 4) pass_verdict(stuck);
}

void Engine::pass_verdict(const std::map<int, Seen>& stuck) {
    const Circle circle = describe(
        stuck, [this](int p) { return name(p); }, kMaxText - 500, ", or set on_deadlock=\"defer\"");
    const Code code = settings_.defer && circle.deferrable ? Code::none : circle.code;
    for (const auto& [p, seen] : stuck) {
        if (p == rank_) continue;
        VerdictRecord record{};
        record.header.kind = static_cast<std::uint8_t>(RecordKind::verdict);
        record.version = seen.version;
        record.num_members = circle.members.size();
        record.code = static_cast<std::uint32_t>(code);
        record.text_bytes = static_cast<std::uint32_t>(circle.text.size());
        send_record(p, record, tail(circle.text, circle.members));
    }
    apply_verdict(code, circle.text, circle.members);
    wake_touched();
}

void Engine::on_verdict(const VerdictRecord& record) {
    if (published_ == 0 || record.version != published_) return;
    apply_verdict(static_cast<Code>(record.code), text_after(record, record.text_bytes),
                  numbers_after(record, record.text_bytes, record.num_members));
}

void Engine::apply_verdict(Code code, const std::string& text, const std::vector<int>& members) {
    ++stats_.deadlocks;
    stir();
    const std::vector<Waiter*> waiters = waiters_;
    for (auto* waiter : waiters) {
        if (tracing_) note(*waiter->op, "deadlock", waiter->since, now());
        if (code != Code::none) {
            fail(waiter->op, code, text, members, true);
        } else if (waiter->deferrable) {
            waiter->deferred = true;
            ++stats_.deferred;
        }
    }
    changed_.notify_all();
}

std::vector<std::pair<std::optional<Report>, bool>> Engine::reports() {
    std::vector<std::pair<std::optional<Report>, bool>> all;
    Entry entry(*this);
    for (int p = 0; p < world_size_; ++p) {
        const auto read = arena_->board(p).read();
        all.emplace_back(std::nullopt, peers_[at(p)].lost != Code::none);
        if (read.has_value()) all.back().first = Report::decode(read->second);
    }
    return all;
}

}  // namespace torchext::collectives

#endif
