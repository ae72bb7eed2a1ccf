// The shared memory of one world: who is there and what it waits for, one ring for each ordered pair of ranks, one
// staging pool for each rank.
//
// It is a memfd: it has no name in any file system, so whatever dies, nothing stays. Peers open it as
// /proc/<pid>/fd/<fd> of the rank that made it. Pages come into being when they are first touched.
#pragma once

#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

#include "board.hpp"
#include "futex.hpp"

namespace torchext::collectives {

inline constexpr std::size_t kLine = 64;

inline constexpr std::size_t round_up(std::size_t bytes, std::size_t to) { return (bytes + to - 1) / to * to; }

enum class Presence : std::uint32_t { absent = 0, present = 1, left = 2 };

// What one rank tells all others. Only `doorbell` is written by others.
struct alignas(2 * kLine) RankCell {
    std::atomic<std::uint32_t> presence;  // a Presence; written by its rank with release after all it has to say
    std::atomic<std::uint32_t> pid;
    alignas(kLine) std::atomic<std::uint32_t> sleeping;  // 1 while the rank's driver waits, or is about to wait
    std::atomic<std::uint32_t> doorbell;                 // the futex; raised by whoever wants that driver to look
};

struct RingControl {
    alignas(kLine) std::atomic<std::uint64_t> tail;  // bytes ever written; by the sender
    std::atomic<std::uint32_t> room_wanted;          // 1 once the sender has found no room, till the receiver takes note
    alignas(kLine) std::atomic<std::uint64_t> head;  // bytes ever read; by the receiver
};

struct ArenaHeader {
    std::uint64_t magic;
    std::uint64_t nonce;
    std::uint64_t world_size;
    std::uint64_t ring_bytes;
    std::uint64_t pool_bytes;
    std::uint64_t chunk_bytes;
    std::uint64_t total_bytes;
};

// Which cores some rank may run on: those of all ranks together.
struct CoreSet {
    static constexpr std::size_t kCores = CPU_SETSIZE;
    std::atomic<std::uint64_t> words[kCores / 64];

    // Adds those of the calling thread. relaxed: whoever counts them has met the ranks by other means.
    void add_own() {
        cpu_set_t own;
        if (sched_getaffinity(0, sizeof(own), &own) != 0) {  // more cores than fit
            CPU_ZERO(&own);
            const long online = std::min(sysconf(_SC_NPROCESSORS_ONLN), static_cast<long>(kCores));
            for (long i = 0; i < online; ++i) CPU_SET(static_cast<std::size_t>(i), &own);
        }
        for (std::size_t i = 0; i < kCores; ++i) {
            if (CPU_ISSET(i, &own)) words[i / 64].fetch_or(std::uint64_t{1} << i % 64, std::memory_order_relaxed);
        }
    }
    int size() const {
        int count = 0;
        for (const auto& word : words) count += std::popcount(word.load(std::memory_order_relaxed));
        return count;
    }
};

class Arena {
public:
    static constexpr std::uint64_t kMagic = 0x3330'4c43'4346'4454;  // changes with the layout

    // Makes the arena; the caller is rank 0. The descriptor stays open until `close_descriptor`.
    static std::shared_ptr<Arena> create(int world_size, std::size_t ring_bytes, std::size_t pool_bytes,
                                         std::size_t chunk_bytes, std::uint64_t nonce) {
        ArenaHeader header{kMagic, nonce, static_cast<std::uint64_t>(world_size), ring_bytes, pool_bytes, chunk_bytes, 0};
        header.total_bytes = pools_offset(header) + static_cast<std::size_t>(world_size) * pool_bytes;
        const int fd = static_cast<int>(syscall(SYS_memfd_create, "torchext-dfccl", 1U /* MFD_CLOEXEC */));
        if (fd < 0) throw std::system_error(errno, std::generic_category(), "memfd_create");
        if (ftruncate(fd, static_cast<off_t>(header.total_bytes)) != 0) {
            const int error = errno;
            ::close(fd);
            throw std::system_error(error, std::generic_category(), "ftruncate of the shared memory");
        }
        auto arena = std::shared_ptr<Arena>(new Arena(fd, header.total_bytes));
        // New pages are zero, which is the initial value of every atomic in them.
        std::memcpy(arena->base_, &header, sizeof(header));
        arena->cores().add_own();
        return arena;
    }

    // Maps the arena that process `pid` has open as `fd`.
    static std::shared_ptr<Arena> attach(int pid, int fd, std::uint64_t nonce) {
        const std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(fd);
        const int own = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
        if (own < 0) throw std::system_error(errno, std::generic_category(), "cannot open " + path);
        struct stat status {};
        ArenaHeader header{};
        if (fstat(own, &status) != 0 || pread(own, &header, sizeof(header), 0) != sizeof(header) ||
            header.magic != kMagic || header.nonce != nonce ||
            static_cast<std::uint64_t>(status.st_size) != header.total_bytes) {
            ::close(own);
            throw std::runtime_error(path + " is not the arena of this world, or of another version of torchext");
        }
        auto arena = std::shared_ptr<Arena>(new Arena(own, header.total_bytes));
        arena->cores().add_own();
        return arena;
    }

    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;
    ~Arena() {
        close_descriptor();
        munmap(base_, bytes_);
    }

    int descriptor() const { return fd_; }
    void close_descriptor() {
        if (fd_ >= 0) ::close(std::exchange(fd_, -1));
    }

    int world_size() const { return static_cast<int>(header().world_size); }
    std::size_t ring_bytes() const { return header().ring_bytes; }
    std::size_t pool_bytes() const { return header().pool_bytes; }
    std::size_t chunk_bytes() const { return header().chunk_bytes; }  // the largest

    // Whether each rank can have a core to itself, as far as the ranks that have mapped the arena tell: they may each be
    // bound to some. Then an answer is likely to be on its way, and else the core is needed to make it.
    bool has_core_for_each() const { return world_size() <= cores().size(); }

    RankCell& cell(int rank) const {
        return *reinterpret_cast<RankCell*>(base_ + cells_offset() + static_cast<std::size_t>(rank) * sizeof(RankCell));
    }
    Board& board(int rank) const {
        return *reinterpret_cast<Board*>(base_ + boards_offset(header()) + static_cast<std::size_t>(rank) * sizeof(Board));
    }
    RingControl& ring_control(int from, int to) const { return *reinterpret_cast<RingControl*>(ring(from, to)); }
    std::byte* ring_data(int from, int to) const { return ring(from, to) + sizeof(RingControl); }
    std::byte* pool(int rank) const {
        return base_ + pools_offset(header()) + static_cast<std::size_t>(rank) * pool_bytes();
    }

private:
    Arena(int fd, std::size_t bytes) : fd_(fd), bytes_(bytes) {
        void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
        if (base == MAP_FAILED) {
            const int error = errno;
            ::close(std::exchange(fd_, -1));
            throw std::system_error(error, std::generic_category(), "mmap of the shared memory");
        }
        base_ = static_cast<std::byte*>(base);
    }

    const ArenaHeader& header() const { return *reinterpret_cast<const ArenaHeader*>(base_); }
    CoreSet& cores() const {
        static_assert(sizeof(ArenaHeader) + kLine + sizeof(CoreSet) <= 4096, "they lie before the cells");
        return *reinterpret_cast<CoreSet*>(base_ + round_up(sizeof(ArenaHeader), kLine));
    }
    static std::size_t cells_offset() { return 4096; }
    static std::size_t boards_offset(const ArenaHeader& h) {
        return round_up(cells_offset() + h.world_size * sizeof(RankCell), 4096);
    }
    static std::size_t rings_offset(const ArenaHeader& h) { return boards_offset(h) + h.world_size * sizeof(Board); }
    static std::size_t ring_stride(const ArenaHeader& h) { return round_up(sizeof(RingControl) + h.ring_bytes, 4096); }
    static std::size_t pools_offset(const ArenaHeader& h) {
        return round_up(rings_offset(h) + h.world_size * h.world_size * ring_stride(h), 1 << 21);
    }
    std::byte* ring(int from, int to) const {
        const auto& h = header();
        return base_ + rings_offset(h) +
               (static_cast<std::size_t>(from) * h.world_size + static_cast<std::size_t>(to)) * ring_stride(h);
    }

    int fd_;
    std::size_t bytes_;
    std::byte* base_ = nullptr;
};

}  // namespace torchext::collectives
