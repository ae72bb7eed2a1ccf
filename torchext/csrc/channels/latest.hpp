// The latest of a series of versions of one block of memory, for many readers.
//
// A writer fills a slab that nobody reads, then makes it the latest by one store; a reader pins the latest slab while it
// reads. So a writer never waits for readers, and a reader is never overtaken: unlike under a sequence lock, it need not
// start again, what it copies is never torn, even for a moment, and there is no data race for the memory model to forbid.
// With R readers reading at once at most R + 2 slabs come into use, most often two. What a dead reader had pinned, or a dead
// writer was filling, is free again once its process is seen to have ended.
#pragma once

#include "queue.hpp"

namespace torchext::channels {

struct LatestHeader {
    SegmentHeader segment;
    std::uint64_t slab_bytes, data_offset;
    std::uint64_t meta_bytes;  // of a description that lies before the slabs
    // The futex: raised with each version.
    alignas(kLine) std::atomic<std::uint32_t> published;
    // Of the latest: version * 1024 + slab; one word, so that both change at once. 0: none yet.
    alignas(kLine) std::atomic<std::uint64_t> latest;
    std::uint32_t writer[kMaxPeers + 2];  // who fills each slab, plus one
};

class Latest final : public Segment {
public:
    static constexpr std::uint64_t kMagic = 0x3230'5453'4c54'5854;
    static constexpr std::uint64_t kSlabs = 1024;
    static constexpr std::uint32_t kUsable = kMaxPeers + 2;
    static_assert(kUsable <= kSlabs);

    static std::shared_ptr<Latest> create(std::uint64_t slab_bytes, const std::string& meta, std::uint64_t nonce) {
        const auto stride = round_up(std::max<std::uint64_t>(slab_bytes, 1), 4096);
        const auto offset = round_up(meta_offset() + meta.size(), 4096);
        const auto total = offset + kUsable * stride;
        auto latest = std::shared_ptr<Latest>(new Latest(Mapping::create("torchext-weights", total)));
        auto& h = latest->h();
        h.slab_bytes = stride;
        h.data_offset = offset;
        h.meta_bytes = meta.size();
        std::memcpy(latest->base() + meta_offset(), meta.data(), meta.size());
        initialize(h.segment, kMagic, nonce, total);
        return latest;
    }

    static std::shared_ptr<Latest> attach(int fd) {
        return std::shared_ptr<Latest>(new Latest(Mapping::adopt(fd, kMagic)));
    }

    std::string meta() const {
        return {reinterpret_cast<const char*>(base()) + meta_offset(), static_cast<std::size_t>(h().meta_bytes)};
    }
    std::byte* data(std::uint32_t slab) const { return base() + h().data_offset + slab * h().slab_bytes; }
    std::uint64_t slab_bytes() const { return h().slab_bytes; }
    // acquire: pairs with commit, so that whoever sees a version finds it there
    std::uint64_t version() const { return h().latest.load(std::memory_order_acquire) / kSlabs; }

    // A slab to fill; it is the caller's until `commit` or `abandon`.
    std::uint32_t begin(std::uint32_t peer) {
        deaths(Role::creator);  // what the dead have pinned becomes free
        Locked lock(*this);
        const auto word = h().latest.load(std::memory_order_relaxed);
        for (std::uint32_t i = 0; i < kUsable; ++i) {
            if ((word != 0 && word % kSlabs == i) || h().writer[i] != 0 || pinned(i)) continue;
            h().writer[i] = peer + 1;
            return i;
        }
        throw std::logic_error("no free slab among more slabs than peers");
    }

    // Makes it the latest, under the next number, or that given where it is newer; returns the number.
    std::uint64_t commit(std::uint32_t slab, std::uint64_t given = 0) {
        std::uint64_t version = 0;
        {
            Locked lock(*this);
            version = std::max(given, h().latest.load(std::memory_order_relaxed) / kSlabs + 1);
            h().latest.store(version * kSlabs + slab, std::memory_order_release);
            h().writer[slab] = 0;
        }
        h().published.fetch_add(1, std::memory_order_release);
        futex_wake_all(h().published);
        return version;
    }

    void abandon(std::uint32_t slab) {
        Locked lock(*this);
        h().writer[slab] = 0;
    }

    // The latest version and its slab, which stays as it is until `unpin`. One at a time for each peer.
    std::pair<std::uint64_t, std::uint32_t> pin(std::uint32_t peer) {
        Locked lock(*this);
        const auto word = h().latest.load(std::memory_order_relaxed);
        if (word != 0) h().segment.peers[peer].pinned = static_cast<std::uint32_t>(word % kSlabs) + 1;
        return {word / kSlabs, static_cast<std::uint32_t>(word % kSlabs)};
    }

    void unpin(std::uint32_t peer) {
        Locked lock(*this);
        h().segment.peers[peer].pinned = 0;
    }

    // Until there is a version newer than that.
    Status wait(std::uint64_t newer_than, Nanoseconds deadline, Sleeper& sleeper, std::size_t deaths) {
        if (forked()) return Status::forked;
        bool asleep = false;
        while (true) {
            const auto seen = h().published.load(std::memory_order_acquire);  // before the version, which changes first
            if (version() > newer_than) return Status::ok;
            const bool ended = closed();
            if (this->deaths(Role::sender, ended) != deaths) return Status::peer_died;  // why it has ended
            if (ended) return Status::closed;
            const auto left = deadline - now();
            if (left <= 0) return Status::timeout;
            if (!std::exchange(asleep, true)) sleeper.before_sleep();
            futex_wait(h().published, seen, std::min(left, kScanEvery));
            if (sleeper.interrupted()) return Status::interrupted;
        }
    }

private:
    explicit Latest(Mapping mapping) : Segment(std::move(mapping)) {}

    static std::uint64_t meta_offset() { return round_up(sizeof(LatestHeader), 4096); }
    LatestHeader& h() const { return *reinterpret_cast<LatestHeader*>(base()); }

    bool pinned(std::uint32_t slab) const {
        for (const auto& cell : h().segment.peers) {
            const auto presence = static_cast<Presence>(cell.presence.load(std::memory_order_relaxed));
            if (presence == Presence::absent) break;
            if (presence == Presence::present && cell.pinned == slab + 1) return true;
        }
        return false;
    }

    void repair() override {
        // A slab that became the latest is no longer being written.
        const auto word = h().latest.load(std::memory_order_relaxed);
        if (word != 0) h().writer[word % kSlabs] = 0;
    }
    void reclaim(std::uint32_t peer) override {
        for (auto& writer : h().writer) {
            if (writer == peer + 1) writer = 0;
        }
    }
    void wake_everyone() override {
        h().published.fetch_add(1, std::memory_order_release);
        futex_wake_all(h().published);
    }
};

}  // namespace torchext::channels
