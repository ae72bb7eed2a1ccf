// A two-way stream of records between this rank and one other member of a group: rings in shared memory on one host, a
// socket between hosts. Neither blocks: what finds no room is kept and sent later.
#pragma once

#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstring>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "arena.hpp"
#include "ring.hpp"

namespace torchext::collectives {

class Link {
public:
    Link() = default;
    Link(const Link&) = delete;
    Link& operator=(const Link&) = delete;
    virtual ~Link() = default;

    // Takes a whole record, whose header tells its length.
    virtual void send(const std::byte* record) = 0;
    // The longest record that it can ever send.
    virtual std::size_t limit() const { return std::size_t{1} << 20; }
    // Sends what was kept; true if something still is.
    virtual bool flush() = 0;
    // Has the peer look, if it sleeps and there may be news for it. After a fence that orders it behind the news.
    virtual void wake() {}
    // The next record, or nullptr. It stays valid until `pop`.
    virtual const RecordHeader* front() = 0;
    virtual void pop() = 0;
    // Whether the peer can be heard no more.
    virtual bool broken() const { return false; }
    // What to poll for more, or -1.
    virtual int descriptor() const { return -1; }
    // In a forked child: the link is its parent's.
    virtual void forget() {}
};

class RingLink final : public Link {
public:
    // `doorbell`: the peer's, to write to; becomes this object's own.
    RingLink(std::shared_ptr<Arena> arena, int rank, int peer, int doorbell)
        : arena_(std::move(arena)),
          peer_(arena_->cell(peer)),
          doorbell_(doorbell),
          out_(arena_->ring_control(rank, peer), arena_->ring_data(rank, peer), arena_->ring_bytes()),
          in_(arena_->ring_control(peer, rank), arena_->ring_data(peer, rank), arena_->ring_bytes()) {}
    ~RingLink() override { ::close(doorbell_); }

    void send(const std::byte* record) override {
        news_ = true;
        if (!kept_.empty() || !put(record)) kept_.emplace_back(record, record + bytes_of(record));
    }

    std::size_t limit() const override { return arena_->ring_bytes() / 2; }

    bool flush() override {
        while (!kept_.empty() && put(kept_.front().data())) {
            kept_.pop_front();
            news_ = true;
        }
        return !kept_.empty();
    }

    void wake() override {
        if (!std::exchange(news_, false)) return;
        // relaxed: the caller's fence orders this behind the news, as the sleeper's orders its look behind the flag
        if (peer_.sleeping.load(std::memory_order_relaxed) != 0) {
            const char byte = 0;
            // A full pipe wakes as well; a closed one belongs to a peer that has ended.
            [[maybe_unused]] const auto written = ::write(doorbell_, &byte, 1);
        }
    }

    const RecordHeader* front() override { return in_.front(); }
    void pop() override { in_.pop(in_.front()->bytes); }

private:
    static std::size_t bytes_of(const std::byte* record) { return reinterpret_cast<const RecordHeader*>(record)->bytes; }

    bool put(const std::byte* record) {
        std::byte* room = out_.reserve(bytes_of(record));
        if (room == nullptr) return false;
        std::memcpy(room, record, bytes_of(record));
        out_.publish();
        return true;
    }

    std::shared_ptr<Arena> arena_;
    RankCell& peer_;
    int doorbell_;
    bool news_ = false;
    RingWriter out_;
    RingReader in_;
    std::deque<std::vector<std::byte>> kept_;
};

class SocketLink final : public Link {
public:
    // A connected stream socket, which becomes this object's own.
    explicit SocketLink(int descriptor) : descriptor_(descriptor) {
        fcntl(descriptor_, F_SETFL, fcntl(descriptor_, F_GETFL) | O_NONBLOCK);
    }
    ~SocketLink() override { forget(); }

    void send(const std::byte* record) override {
        const std::size_t bytes = reinterpret_cast<const RecordHeader*>(record)->bytes;
        std::size_t sent = 0;
        if (kept_.empty()) sent = write(record, bytes);
        kept_.insert(kept_.end(), record + sent, record + bytes);
    }

    bool flush() override {
        if (kept_.empty()) return false;
        const std::size_t sent = write(kept_.data(), kept_.size());
        kept_.erase(kept_.begin(), kept_.begin() + static_cast<std::ptrdiff_t>(sent));
        return !kept_.empty();
    }

    const RecordHeader* front() override {
        if (const auto* record = whole()) return record;
        if (broken_) return nullptr;
        if (begin_ != 0) {
            read_.erase(read_.begin(), read_.begin() + static_cast<std::ptrdiff_t>(begin_));
            begin_ = 0;
        }
        constexpr std::size_t kMore = 4096;
        const std::size_t have = read_.size();
        read_.resize(have + kMore);
        const ssize_t got = ::recv(descriptor_, read_.data() + have, kMore, 0);
        read_.resize(have + (got > 0 ? static_cast<std::size_t>(got) : 0));
        if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR)) broken_ = true;
        return whole();
    }

    void pop() override { begin_ += whole()->bytes; }
    bool broken() const override { return broken_; }
    int descriptor() const override { return descriptor_; }
    void forget() override {
        if (descriptor_ >= 0) ::close(std::exchange(descriptor_, -1));
    }

private:
    const RecordHeader* whole() {
        if (read_.size() - begin_ < sizeof(RecordHeader)) return nullptr;
        const auto* record = reinterpret_cast<const RecordHeader*>(read_.data() + begin_);
        if (record->bytes < sizeof(RecordHeader) || record->bytes % 16 != 0) {
            broken_ = true;  // not one of ours: nothing after it can be made sense of
            return nullptr;
        }
        return read_.size() - begin_ < record->bytes ? nullptr : record;
    }

    std::size_t write(const std::byte* data, std::size_t bytes) {
        if (broken_) return bytes;  // nobody is there to read it
        const ssize_t sent = ::send(descriptor_, data, bytes, MSG_NOSIGNAL);
        if (sent >= 0) return static_cast<std::size_t>(sent);
        if (errno == EAGAIN || errno == EINTR) return 0;
        return bytes;  // the reader will find out why
    }

    int descriptor_;
    bool broken_ = false;
    std::vector<std::byte> kept_;
    std::vector<std::byte> read_;  // records are multiples of 16 bytes, so they stay aligned
    std::size_t begin_ = 0;
};

}  // namespace torchext::collectives
