// Memory that unrelated processes share, with one lock and a table of who uses it; what channels are built on.
//
// It is a memfd: it has no name in any file system, so whatever dies, nothing stays, and a small /dev/shm does not matter.
// It is mapped whole and sparsely: pages come into being when they are first touched, so a region may be far larger than
// what is ever put in it.
//
// A process may be killed at any instruction. Three things make that harmless:
// - The lock is a robust mutex: the kernel passes it on when its owner dies, and the next owner repairs what it guards.
// - What is guarded has one source of truth, words that change by single stores; all else is rebuilt from them.
// - Each process watches the others by pidfd, and takes back what the dead ones held.
#pragma once

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "../collectives/futex.hpp"

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif
#ifndef P_PIDFD
#define P_PIDFD 3
#endif

namespace torchext::transport {

using collectives::cpu_relax;
using collectives::futex_wait;
using collectives::futex_wake_all;
using collectives::kMillisecond;
using collectives::kSecond;
using collectives::Nanoseconds;
using collectives::now;

inline constexpr std::size_t kLine = 64;
inline constexpr std::uint32_t kMaxPeers = 256;
inline constexpr Nanoseconds kScanEvery = 100 * kMillisecond;  // how often the other processes are looked at

inline constexpr std::size_t round_up(std::size_t bytes, std::size_t to) { return (bytes + to - 1) / to * to; }

inline void futex_wake_one(std::atomic<std::uint32_t>& word) {
    syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), 1 /* FUTEX_WAKE */, 1, nullptr, nullptr, 0);
}

// How often this process has been forked from one that had loaded this module: what a fork copies belongs to its parent.
inline std::atomic<std::uint32_t>& fork_count() {
    static std::atomic<std::uint32_t> count{0};
    static const int registered = pthread_atfork(nullptr, nullptr, [] { count.fetch_add(1, std::memory_order_relaxed); });
    (void)registered;
    return count;
}

// When a process started, in ticks since boot; with its number, its identity. 0 if there is none.
inline std::uint64_t process_start(int pid, int* exit_status = nullptr) {
    char path[64], text[1024];
    std::snprintf(path, sizeof(path), "/proc/%d/stat", pid);
    std::FILE* file = std::fopen(path, "re");
    if (file == nullptr) return 0;
    const std::size_t n = std::fread(text, 1, sizeof(text) - 1, file);
    std::fclose(file);
    text[n] = 0;
    const char* at = std::strrchr(text, ')');  // the name before it may hold anything
    if (at == nullptr) return 0;
    std::uint64_t start = 0;
    int field = 2;
    for (const char* p = at; *p != 0; ++p) {
        if (*p != ' ') continue;
        ++field;
        if (field == 22) start = std::strtoull(p + 1, nullptr, 10);
        if (field == 52 && exit_status != nullptr) *exit_status = static_cast<int>(std::strtol(p + 1, nullptr, 10));
    }
    return start;
}

inline constexpr int kUnknownStatus = -1;

// The wait status of a process that has ended, without reaping it; kUnknownStatus where the kernel does not tell.
inline int exit_status(int pidfd, int pid, std::uint64_t start) {
    siginfo_t info{};
    if (pidfd >= 0 && waitid(static_cast<idtype_t>(P_PIDFD), static_cast<id_t>(pidfd), &info,
                             WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid != 0) {  // a child of ours
        return info.si_code == CLD_EXITED ? info.si_status << 8 : info.si_status;
    }
    int status = 0;
    if (process_start(pid, &status) == start) return status;  // not waited for yet by its parent
    struct {  // struct pidfd_info; the kernel tells from Linux 6.15 on
        std::uint64_t mask, cgroup;
        std::uint32_t ids[11];
        std::int32_t exit_code;
    } tells{};
    static_assert(sizeof(tells) == 64);
    constexpr std::uint64_t kTellExit = 8;
    tells.mask = kTellExit;
    if (pidfd >= 0 && ioctl(pidfd, _IOC(_IOC_READ | _IOC_WRITE, 0xFF, 11, sizeof(tells)), &tells) == 0 &&
        (tells.mask & kTellExit) != 0) {
        return tells.exit_code;
    }
    return kUnknownStatus;
}

// A carrier brings what senders on other machines have sent; those are in the table as senders, too.
enum class Role : std::uint32_t { creator = 0, receiver = 1, sender = 2, carrier = 3 };
inline constexpr std::size_t kRoles = 4;

// Whether a sender is told of the death of such a peer; receivers are told of all.
inline bool concerns_senders(Role role) { return role == Role::creator || role == Role::receiver; }

enum class Presence : std::uint32_t { absent = 0, present = 1, left = 2, dead = 3 };

// One user of the segment. Guarded by the segment's lock.
struct alignas(2 * kLine) PeerCell {
    std::atomic<std::uint32_t> presence;  // stored last
    std::uint32_t role;
    std::int32_t pid;
    std::int32_t status;         // wait status, once dead
    std::uint64_t start;         // process_start
    std::uint64_t generation;    // of this cell: told apart from earlier users of it
    Nanoseconds changed;         // when it last joined, left or died
    std::uint32_t waiting[2];    // its threads that wait, on each side
    std::uint32_t pinned;        // what it reads, in segments that have pins; plus one
    char name[68];
};

struct SegmentHeader {
    std::uint64_t magic;
    std::uint64_t nonce;
    std::uint64_t total_bytes;
    std::uint64_t pid_namespace;
    alignas(kLine) pthread_mutex_t lock;
    std::atomic<std::uint32_t> closed;
    std::uint32_t num_present[kRoles];  // rebuilt by repair
    std::uint64_t num_joined[kRoles];   // ever
    PeerCell peers[kMaxPeers];
};

inline std::uint64_t pid_namespace() {
    struct stat status {};
    return stat("/proc/self/ns/pid", &status) == 0 ? status.st_ino : 0;
}

// A memfd and its mapping in this process.
class Mapping {
public:
    Mapping(int fd, std::size_t bytes) : fd_(fd), bytes_(bytes) {
        void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
        if (base == MAP_FAILED) {
            const int error = errno;
            ::close(std::exchange(fd_, -1));
            throw std::system_error(error, std::generic_category(),
                                    "cannot map " + std::to_string(bytes >> 20) + " MiB of address space (ulimit -v?)");
        }
        madvise(base, bytes, MADV_DONTDUMP);  // best effort
        base_ = static_cast<std::byte*>(base);
    }
    Mapping(const Mapping&) = delete;
    Mapping& operator=(const Mapping&) = delete;
    Mapping(Mapping&& other) noexcept
        : fd_(std::exchange(other.fd_, -1)), bytes_(other.bytes_), base_(std::exchange(other.base_, nullptr)) {}
    ~Mapping() {
        if (base_ != nullptr) munmap(base_, bytes_);
        if (fd_ >= 0) ::close(fd_);
    }

    static Mapping create(const char* name, std::size_t bytes) {
        const int fd = static_cast<int>(syscall(SYS_memfd_create, name, 1U /* MFD_CLOEXEC */));
        if (fd < 0) throw std::system_error(errno, std::generic_category(), "memfd_create");
        if (ftruncate(fd, static_cast<off_t>(bytes)) != 0) {
            const int error = errno;
            ::close(fd);
            throw std::system_error(error, std::generic_category(), "ftruncate of the shared memory");
        }
        return Mapping(fd, bytes);
    }

    // Takes the descriptor over.
    static Mapping adopt(int fd, std::uint64_t magic) {
        struct stat status {};
        std::uint64_t words[4];  // the first of the header
        if (fstat(fd, &status) != 0 || pread(fd, words, sizeof(words), 0) != sizeof(words) || words[0] != magic ||
            words[2] != static_cast<std::uint64_t>(status.st_size)) {
            ::close(fd);
            throw std::runtime_error("the descriptor is not of this kind of shared memory, or of another version of torchext");
        }
        if (words[3] != pid_namespace()) {
            ::close(fd);
            throw std::runtime_error(
                "the process that made this shared memory is in another PID namespace (another container?), where neither "
                "could see the other end; join the machines by a broker instead");
        }
        return Mapping(fd, words[2]);
    }

    std::byte* base() const { return base_; }
    std::size_t bytes() const { return bytes_; }
    int descriptor() const { return fd_; }

private:
    int fd_;
    std::size_t bytes_;
    std::byte* base_ = nullptr;
};

struct Death {
    std::string name;
    int pid;
    Role role;
    int status;
};

enum class Status : int { ok = 0, dropped = 1, timeout = 2, closed = 3, full = 4, interrupted = 5, peer_died = 6, forked = 7 };

// A shared memory as one process holds it. Subclasses add what lies behind the header. Thread-safe.
class Segment {
public:
    Segment(const Segment&) = delete;
    Segment& operator=(const Segment&) = delete;
    virtual ~Segment() {
        for (auto& w : watched_) {
            if (w.pidfd >= 0) ::close(w.pidfd);
        }
    }

    int descriptor() const { return mapping_.descriptor(); }
    std::uint64_t nonce() const { return header().nonce; }
    bool forked() const { return fork_count().load(std::memory_order_relaxed) != forks_; }
    bool closed() const { return header().closed.load(std::memory_order_acquire) != 0; }

    // Ends the segment for all.
    void close() {
        {
            Locked lock(*this);
            header().closed.store(1, std::memory_order_release);
        }
        wake_everyone();
    }

    // Enters the table; returns the place in it.
    std::uint32_t join(const std::string& name, Role role) {
        Locked lock(*this);
        // A cell that was never used, else the one that changed longest ago: others may still read what became of the rest.
        std::uint32_t best = kMaxPeers;
        for (std::uint32_t i = 0; i < kMaxPeers; ++i) {
            const auto& cell = header().peers[i];
            const auto presence = static_cast<Presence>(cell.presence.load(std::memory_order_relaxed));
            if (presence == Presence::present) continue;
            if (presence == Presence::absent) {
                best = i;
                break;  // nor were those behind it
            }
            if (best == kMaxPeers || cell.changed < header().peers[best].changed) best = i;
        }
        if (best == kMaxPeers) {
            throw std::runtime_error(std::to_string(kMaxPeers) + " senders and receivers are there already");
        }
        auto& cell = header().peers[best];
        cell.role = static_cast<std::uint32_t>(role);
        cell.pid = getpid();
        cell.start = process_start(cell.pid);
        ++cell.generation;
        cell.status = kUnknownStatus;
        cell.changed = now();
        cell.waiting[0] = cell.waiting[1] = 0;
        cell.pinned = 0;
        std::snprintf(cell.name, sizeof(cell.name), "%s", name.c_str());
        ++header().num_joined[static_cast<std::size_t>(role)];
        cell.presence.store(static_cast<std::uint32_t>(Presence::present), std::memory_order_release);
        ++header().num_present[static_cast<std::size_t>(role)];
        return best;
    }

    // Leaves; what it was writing is taken back. Nothing in a forked child, whose parent is the member.
    void leave(std::uint32_t peer) {
        if (forked()) return;
        {
            Locked lock(*this);
            retire(peer, Presence::left, kUnknownStatus);
        }
        wake_everyone();
    }

    // Tells the others that this peer has died, on another machine, where it is process `pid`.
    void declare_dead(std::uint32_t peer, int pid, int status) {
        if (forked()) return;
        {
            Locked lock(*this);
            retire(peer, Presence::dead, status);
            header().peers[peer].pid = pid;
        }
        next_scan_.store(0, std::memory_order_relaxed);
        wake_everyone();
    }

    // Looks at the other processes if that is due, and returns how many deaths this process has learnt of so far that
    // concern that role: receivers hear of all, senders of creators and receivers.
    std::size_t deaths(Role role, bool at_once = false) {
        const auto t = now();
        if (at_once || t >= next_scan_.load(std::memory_order_relaxed)) {
            next_scan_.store(t + kScanEvery, std::memory_order_relaxed);
            scan();
        }
        return known_deaths(role);
    }

    // Those that this process has learnt of, without another look.
    std::size_t known_deaths(Role role) const {
        return num_deaths_[role == Role::sender ? 1 : 0].load(std::memory_order_acquire);
    }

    std::vector<Death> deaths_since(std::size_t first, Role role) {
        const std::lock_guard guard(watch_);
        std::vector<Death> found;
        for (const auto& death : deaths_) {
            if (role == Role::sender && !concerns_senders(death.role)) continue;
            if (first != 0) {
                --first;
            } else {
                found.push_back(death);
            }
        }
        return found;
    }

    struct Peer {
        std::string name;
        int pid;
        Role role;
        Presence presence;
        std::uint32_t place;
        std::uint64_t generation;
        int status;  // wait status, once dead
    };
    std::vector<Peer> peers() {
        std::vector<Peer> found;
        Locked lock(*this);
        for (std::uint32_t i = 0; i < kMaxPeers; ++i) {
            const auto& cell = header().peers[i];
            const auto presence = static_cast<Presence>(cell.presence.load(std::memory_order_relaxed));
            if (presence == Presence::absent) continue;
            found.push_back({cell.name, cell.pid, static_cast<Role>(cell.role), presence, i, cell.generation, cell.status});
        }
        return found;
    }

protected:
    explicit Segment(Mapping mapping) : mapping_(std::move(mapping)), forks_(fork_count().load(std::memory_order_relaxed)) {
        watched_.resize(kMaxPeers);
        start_ = now();
    }

    // Of new memory, which is zero.
    static void initialize(SegmentHeader& header, std::uint64_t magic, std::uint64_t nonce, std::size_t total_bytes) {
        pthread_mutexattr_t attributes;
        pthread_mutexattr_init(&attributes);
        pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
        pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
        const int error = pthread_mutex_init(&header.lock, &attributes);
        pthread_mutexattr_destroy(&attributes);
        if (error != 0) throw std::system_error(error, std::generic_category(), "pthread_mutex_init");
        header.nonce = nonce;
        header.total_bytes = total_bytes;
        header.pid_namespace = pid_namespace();
        header.magic = magic;
    }

    // The lock, held. If its last owner died, what it guards is repaired first.
    class Locked {
    public:
        explicit Locked(Segment& segment) : segment_(segment) {
            auto* lock = &segment.header().lock;
            int error = pthread_mutex_trylock(lock);
            // It is held for less than it takes to fall asleep and be woken, unless its owner was put to sleep.
            for (int turn = 0; error == EBUSY && turn < kLockTurns; ++turn) {
                cpu_relax();
                error = pthread_mutex_trylock(lock);
            }
            if (error == EBUSY) error = pthread_mutex_lock(lock);
            if (error == EOWNERDEAD) {
                segment.repair_all();
                pthread_mutex_consistent(&segment.header().lock);
            } else if (error != 0) {
                throw std::system_error(error, std::generic_category(), "the lock of the shared memory");
            }
        }
        ~Locked() { pthread_mutex_unlock(&segment_.header().lock); }
        Locked(const Locked&) = delete;
        Locked& operator=(const Locked&) = delete;

    private:
        static constexpr int kLockTurns = 50;
        Segment& segment_;
    };

    SegmentHeader& header() const { return *reinterpret_cast<SegmentHeader*>(mapping_.base()); }
    std::byte* base() const { return mapping_.base(); }

    // With the lock: rebuild all that can be derived. May run any number of times.
    virtual void repair() = 0;
    // With the lock: take back what this peer held.
    virtual void reclaim(std::uint32_t peer) = 0;
    // Without the lock.
    virtual void wake_everyone() = 0;

private:
    struct Watched {
        std::uint64_t generation = 0;
        int pidfd = -1;
        std::uint64_t reported = 0;  // the generation whose death is among deaths_
    };

    void repair_all() {
        for (auto& n : header().num_present) n = 0;
        for (const auto& cell : header().peers) {
            if (cell.presence.load(std::memory_order_relaxed) == static_cast<std::uint32_t>(Presence::present)) {
                ++header().num_present[cell.role];
            }
        }
        repair();
    }

    void retire(std::uint32_t peer, Presence presence, int status) {
        auto& cell = header().peers[peer];
        if (cell.presence.load(std::memory_order_relaxed) != static_cast<std::uint32_t>(Presence::present)) return;
        reclaim(peer);
        cell.status = status;
        cell.changed = now();
        cell.waiting[0] = cell.waiting[1] = 0;
        cell.presence.store(static_cast<std::uint32_t>(presence), std::memory_order_release);
        --header().num_present[cell.role];
    }

    void scan() {
        if (forked()) return;
        const std::unique_lock guard(watch_, std::try_to_lock);
        if (!guard.owns_lock()) return;  // another thread is at it
        struct Seen {
            std::uint32_t peer;
            std::uint64_t generation, start;
            int pid;
        };
        std::vector<Seen> others;
        const int own = getpid();
        {
            Locked lock(*this);
            for (std::uint32_t i = 0; i < kMaxPeers; ++i) {
                const auto& cell = header().peers[i];
                const auto presence = static_cast<Presence>(cell.presence.load(std::memory_order_relaxed));
                if (presence == Presence::absent) break;
                auto& w = watched_[i];
                // Not what happened before we came, unless it is why nobody is at the other end of a sender.
                const bool concerns = cell.changed >= start_ || (concerns_senders(static_cast<Role>(cell.role)) &&
                                                                header().num_present[cell.role] == 0);
                if (presence == Presence::dead && w.reported != cell.generation && concerns) report(i, cell);
                if ((presence != Presence::present || w.generation != cell.generation) && w.pidfd >= 0) {
                    ::close(std::exchange(w.pidfd, -1));
                }
                if (presence == Presence::present && cell.pid != own) others.push_back({i, cell.generation, cell.start, cell.pid});
            }
        }
        struct Ended {
            Seen who;
            int status;
        };
        std::vector<Ended> ended;
        for (const auto& o : others) {
            auto& w = watched_[o.peer];
            if (w.generation != o.generation || w.pidfd < 0) {
                w.generation = o.generation;
                w.pidfd = static_cast<int>(syscall(SYS_pidfd_open, o.pid, 0));
                if (w.pidfd < 0 && errno != ESRCH) continue;  // out of descriptors: try again at the next scan
                // Opened, but is it still the same process? Its number may have been given to another.
                if (w.pidfd < 0 || process_start(o.pid) != o.start) {
                    ended.push_back({o, kUnknownStatus});
                    continue;
                }
            }
            pollfd p{w.pidfd, POLLIN, 0};
            if (poll(&p, 1, 0) > 0 && p.revents != 0) ended.push_back({o, exit_status(w.pidfd, o.pid, o.start)});
        }
        if (ended.empty()) return;
        {
            Locked lock(*this);
            for (const auto& [who, status] : ended) {
                auto& cell = header().peers[who.peer];
                if (cell.generation != who.generation) continue;
                // A process that ended with status 0 has left, though without a word.
                retire(who.peer, status == 0 ? Presence::left : Presence::dead, status);
                if (static_cast<Presence>(cell.presence.load(std::memory_order_relaxed)) == Presence::dead &&
                    watched_[who.peer].reported != cell.generation) {
                    report(who.peer, cell);
                }
            }
        }
        wake_everyone();
    }

    void report(std::uint32_t peer, const PeerCell& cell) {
        watched_[peer].reported = cell.generation;
        deaths_.push_back({cell.name, cell.pid, static_cast<Role>(cell.role), cell.status});
        num_deaths_[0].fetch_add(1, std::memory_order_release);
        if (concerns_senders(deaths_.back().role)) num_deaths_[1].fetch_add(1, std::memory_order_release);
    }

    Mapping mapping_;
    std::uint32_t forks_;
    Nanoseconds start_;
    std::atomic<Nanoseconds> next_scan_{0};
    std::atomic<std::size_t> num_deaths_[2] = {0, 0};  // that concern receivers, senders
    std::mutex watch_;  // guards watched_ and deaths_
    std::vector<Watched> watched_;
    std::vector<Death> deaths_;
};

}  // namespace torchext::transport
