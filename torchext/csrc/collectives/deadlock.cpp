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

#include <cstdio>
#include <iterator>

#include "engine.hpp"

namespace torchext::collectives {

namespace {

std::string seconds(Nanoseconds time) {
    char text[32];
    std::snprintf(text, sizeof(text), "%.1f s", static_cast<double>(time) * 1e-9);
    return text;
}

}  // namespace

void Engine::note_issuer() {
    static std::atomic<std::uint64_t> engines{0};
    thread_local std::uint64_t noted = 0;  // the engine that knows this thread; a thread seldom uses two in turn
    if (serial_ == 0) serial_ = engines.fetch_add(1, std::memory_order_relaxed) + 1;
    if (noted == serial_) return;
    noted = serial_;
    const auto self = static_cast<std::uint64_t>(pthread_self());
    for (const auto& issuer : issuers_) {
        if (issuer.thread == self) return;
    }
    issuers_.push_back({self, static_cast<int>(syscall(SYS_gettid))});
}

void Engine::withdraw() {
    published_ = 0;
    published_stuck_ = false;
    num_sightings_ = 0;
    arena_->board(rank_).clear();
}

void Engine::consider(std::unique_lock<std::mutex>& lock, Waiter& waiter, const Caller& caller) {
    if (!published_stuck_ || waiter.where.empty()) {
        const std::uint64_t seen = activity_;
        std::vector<std::uint64_t> threads;
        for (const auto* other : waiters_) threads.push_back(other->thread);
        const std::vector<Issuer> issuers = issuers_;
        const std::uint64_t group = waiter.op->group_uid;
        lock.unlock();
        Caller::Sight sight = caller.look(group, threads, issuers);
        lock.lock();
        waiter.where = std::move(sight.where);
        // A thread that was about to run when it looked has run by the next time.
        num_quiet_ = sight.quiet && activity_ == quiet_at_ ? num_quiet_ + 1 : sight.quiet ? 1 : 0;
        quiet_at_ = activity_;
        // Something has happened while it looked; the next round looks again.
        if (activity_ != seen || waiter.op->done || waiter.deferred) return;
        const std::string bytes = report(num_quiet_ > 1).encode();
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
    std::map<int, std::pair<std::uint64_t, Report>> stuck;  // by rank: version and report
    for (int p = 0; p < world_size_; ++p) {
        const auto read = arena_->board(p).read();
        if (!read.has_value() || peers_[at(p)].lost != Code::none) continue;
        Report report = Report::decode(read->second);
        if (report.stuck) stuck.emplace(p, std::make_pair(read->first, std::move(report)));
    }
    // Takes away those that can go on, until all that are left wait for each other.
    for (bool changed = true; changed;) {
        changed = false;
        for (auto it = stuck.begin(); it != stuck.end();) {
            const auto& blocked = it->second.second.blocked;
            const bool alive = std::any_of(blocked.begin(), blocked.end(), [&](const Blocked& b) {
                const auto is_stuck = [&](int p) { return stuck.count(p) != 0; };
                return b.any ? !std::all_of(b.waits_for.begin(), b.waits_for.end(), is_stuck)
                             : std::none_of(b.waits_for.begin(), b.waits_for.end(), is_stuck);
            });
            it = alive ? stuck.erase(it) : std::next(it);
            changed |= alive;
        }
    }
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
    for (const auto& [p, report] : stuck) {
        if (arena_->board(p).version() != report.first) return;
    }
    // One is enough to tell all; should it not, because it is stopped, the others do.
    if (stuck.begin()->first == rank_ || ++num_sightings_ > 4) pass_verdict(stuck);
}

void Engine::pass_verdict(const std::map<int, std::pair<std::uint64_t, Report>>& stuck) {
    bool deferrable = false;
    bool one_group = true;
    const Blocked& first = stuck.begin()->second.second.blocked.front();
    std::vector<int> members;
    std::string text;
    const Nanoseconds t = now();
    for (const auto& [p, report] : stuck) {
        members.push_back(p);
        for (const auto& b : report.second.blocked) {
            if (b.future) continue;
            deferrable |= b.deferrable;
            one_group = one_group && b.group == first.group && b.tag == first.tag;
            std::string whom;
            for (const int q : b.waits_for) whom += (whom.empty() ? "" : ", ") + name(q);
            text += "\n  " + name(p) + " has waited " + seconds(t - b.since) + " for " + whom + " in " + b.text;
        }
    }
    if (text.size() > kMaxText - 500) text = text.substr(0, kMaxText - 500) + " ...";
    Code code = Code::none;
    if (!settings_.defer || !deferrable) code = one_group ? Code::mismatch : Code::deadlock;
    if (code == Code::mismatch) {
        text = "the ranks of one group wait in calls that differ:" + text +
               "\nIf they are meant as one call, make them equal. If each rank makes all of them in an order of its own, "
               "name them with torchext.tag and make them with async_op=True.";
    } else {
        text = "these ranks wait for each other, and none can go on:" + text +
               "\nMake such calls with async_op=True and wait for them later, or set on_deadlock=\"defer\".";
    }
    for (const auto& [p, report] : stuck) {
        if (p == rank_) continue;
        VerdictRecord record{};
        record.header.kind = static_cast<std::uint8_t>(RecordKind::verdict);
        record.version = report.first;
        record.members = members.size();
        record.code = static_cast<std::uint32_t>(code);
        record.text_bytes = static_cast<std::uint32_t>(text.size());
        std::string rest = text;
        for (const int member : members) {
            const auto number = static_cast<std::int32_t>(member);
            rest.append(reinterpret_cast<const char*>(&number), sizeof(number));
        }
        send_record(p, record, rest);
    }
    apply_verdict(code, text, members);
    wake_touched();
}

void Engine::on_verdict(const VerdictRecord& record) {
    if (published_ == 0 || record.version != published_) return;
    const char* bytes = reinterpret_cast<const char*>(&record + 1);
    std::vector<int> members;
    for (std::size_t i = 0; i < record.members; ++i) {
        std::int32_t number = 0;
        std::memcpy(&number, bytes + record.text_bytes + i * sizeof(number), sizeof(number));
        members.push_back(number);
    }
    apply_verdict(static_cast<Code>(record.code), std::string(bytes, record.text_bytes), members);
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
