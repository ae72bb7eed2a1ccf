// What a rank tells about its blocked threads, where all others can read it: the edges of the wait-for graph.
//
// A board has one writer and many readers, who never wait: its version is odd while the writer writes, and changes with
// each report. A report that was read under one version at two times was true all the time in between.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace torchext::collectives {

// One call that a thread waits for.
struct Blocked {
    std::int64_t since = 0;  // CLOCK_MONOTONIC, ns
    std::uint64_t group = 0;
    std::uint64_t tag = 0;     // its hash
    bool deferrable = false;   // the thread may go on, and its tensor wait
    bool any = false;          // one of them is enough
    bool future = false;       // no thread waits; what is chained to its future may issue calls when it is done
    std::vector<int> waits_for;  // world ranks that must make the call and have not
    std::string text;            // the call and where it is, in words
};

struct Report {
    bool stuck = false;  // no thread of the rank can issue a call before one of these is done
    std::vector<Blocked> blocked;

    std::string encode() const {
        std::string out;
        auto number = [&out](std::uint64_t value) { out.append(reinterpret_cast<const char*>(&value), sizeof(value)); };
        number(stuck);
        number(blocked.size());
        for (const auto& b : blocked) {
            number(static_cast<std::uint64_t>(b.since));
            number(b.group);
            number(b.tag);
            number(static_cast<std::uint64_t>(b.deferrable) | static_cast<std::uint64_t>(b.future) << 1 |
                   static_cast<std::uint64_t>(b.any) << 2);
            number(b.waits_for.size());
            for (const int p : b.waits_for) number(static_cast<std::uint64_t>(p));
            number(b.text.size());
            out += b.text;
        }
        return out;
    }

    static Report decode(const std::string& bytes) {
        Report report;
        std::size_t position = 0;
        auto number = [&] {
            std::uint64_t value = 0;
            std::memcpy(&value, bytes.data() + position, sizeof(value));
            position += sizeof(value);
            return value;
        };
        report.stuck = number() != 0;
        report.blocked.resize(number());
        for (auto& b : report.blocked) {
            b.since = static_cast<std::int64_t>(number());
            b.group = number();
            b.tag = number();
            const std::uint64_t flags = number();
            b.deferrable = (flags & 1) != 0;
            b.future = (flags & 2) != 0;
            b.any = (flags & 4) != 0;
            b.waits_for.resize(number());
            for (int& p : b.waits_for) p = static_cast<int>(number());
            b.text.resize(number());
            b.text.assign(bytes, position, b.text.size());
            position += b.text.size();
        }
        return report;
    }
};

// Lies in shared memory. Each word is stored with release and loaded with acquire, so that a reader who sees a word of
// a report also sees the odd version that came before it, and finds that the version has changed.
class Board {
public:
    static constexpr std::size_t kBytes = 8192;
    static constexpr std::size_t kCapacity = kBytes - 2 * sizeof(std::uint64_t);

    // Its writer only. Returns the version under which the bytes, at most kCapacity, can be read.
    std::uint64_t write(const std::string& bytes) {
        const std::uint64_t version = version_.load(std::memory_order_relaxed) + 2;
        version_.store(version - 1, std::memory_order_relaxed);
        size_.store(bytes.size(), std::memory_order_release);
        for (std::size_t i = 0; i * sizeof(std::uint64_t) < bytes.size(); ++i) {
            std::uint64_t word = 0;
            const std::size_t begin = i * sizeof(word);
            std::memcpy(&word, bytes.data() + begin, std::min(sizeof(word), bytes.size() - begin));
            words_[i].store(word, std::memory_order_release);
        }
        version_.store(version, std::memory_order_release);
        return version;
    }

    // Its writer only: there is no report from now on. What the writer stores with release later is seen later.
    void clear() { write({}); }

    // acquire: what is read after it is not older
    std::uint64_t version() const { return version_.load(std::memory_order_acquire); }

    // The bytes and their version; nothing if there are none, or they are just being written.
    std::optional<std::pair<std::uint64_t, std::string>> read() const {
        const std::uint64_t before = version();
        const std::uint64_t size = size_.load(std::memory_order_acquire);
        if (before % 2 != 0 || size == 0 || size > kCapacity) return std::nullopt;
        std::string bytes((size + 7) / 8 * 8, '\0');
        for (std::size_t i = 0; i < bytes.size() / 8; ++i) {
            const std::uint64_t word = words_[i].load(std::memory_order_acquire);
            std::memcpy(bytes.data() + i * 8, &word, sizeof(word));
        }
        if (version() != before) return std::nullopt;
        bytes.resize(size);
        return std::make_pair(before, std::move(bytes));
    }

private:
    std::atomic<std::uint64_t> version_;
    std::atomic<std::uint64_t> size_;
    std::atomic<std::uint64_t> words_[kCapacity / sizeof(std::uint64_t)];
};
static_assert(sizeof(Board) == Board::kBytes);

}  // namespace torchext::collectives
