// What an engine asks of the threads of the program, and which of them have issued calls.
#pragma once

#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace torchext::collectives {

// A thread that has issued a call: as pthread_self() and as gettid() name it.
struct Issuer {
    std::uint64_t thread;
    int tid;
};

// What the engine asks of whoever waits; called now and then, in the waiting thread and without the lock.
struct Caller {
    struct Sight {
        std::string where;   // the place in the program that waits, and the group, in words
        bool quiet = false;  // no thread but those given can issue a call before one of these goes on
    };
    std::function<bool()> interrupted;
    // Empty: of this rank's threads nothing is known, so that no deadlock is found that it takes part in.
    std::function<Sight(std::uint64_t group, const std::vector<std::uint64_t>& blocked, const std::vector<Issuer>&)> look;
};

// The threads that have issued calls through one engine, whose lock guards it.
class Issuers {
public:
    void note() {
        static std::atomic<std::uint64_t> engines{0};
        thread_local std::uint64_t noted = 0;  // the engine that knows this thread; a thread seldom uses two in turn
        if (serial_ == 0) serial_ = engines.fetch_add(1, std::memory_order_relaxed) + 1;
        if (noted == serial_) return;
        noted = serial_;
        const auto self = static_cast<std::uint64_t>(pthread_self());
        const auto known = [self](const Issuer& issuer) { return issuer.thread == self; };
        if (std::any_of(all_.begin(), all_.end(), known)) return;
        all_.push_back({self, static_cast<int>(syscall(SYS_gettid))});
    }

    const std::vector<Issuer>& all() const { return all_; }

private:
    std::uint64_t serial_ = 0;  // of this engine, among all of the process
    std::vector<Issuer> all_;
};

// Whether a rank is quiet: none of its threads can issue a call before one of those that wait in one goes on. An
// engine's lock guards it, and what is passed to `look`.
class Quiet {
public:
    // Two looks in a row, with nothing in between: a thread that was about to run at the first has run by the second.
    bool holds(std::uint64_t activity) const { return num_looks_ > 1 && seen_at_ == activity; }

    // Looks from the thread of `waiter`, without the lock meanwhile, and notes where that thread is. `activity` changes
    // with whatever bears on what threads wait for. Returns false if it has meanwhile; the next round is to look again.
    template <class Waiter>
    bool look(std::unique_lock<std::mutex>& lock, const Caller& caller, Waiter& waiter, std::uint64_t group,
              const std::vector<Waiter*>& waiters, const Issuers& issuers, const std::uint64_t& activity) {
        const std::uint64_t before = activity;
        std::vector<std::uint64_t> threads;
        for (const auto* other : waiters) threads.push_back(other->thread);
        const std::vector<Issuer> known = issuers.all();
        lock.unlock();
        Caller::Sight sight = caller.look(group, threads, known);
        lock.lock();
        waiter.where = std::move(sight.where);
        num_looks_ = !sight.quiet ? 0 : activity == seen_at_ ? num_looks_ + 1 : 1;
        seen_at_ = activity;
        return activity == before;
    }

private:
    int num_looks_ = 0;           // in a row that found it quiet,
    std::uint64_t seen_at_ = 0;   // all of them at this activity
};

}  // namespace torchext::collectives
