// What a rank tells about its blocked threads, where all others can read it: the edges of the wait-for graph.
//
// A board has one writer and many readers, who never wait: its version is odd while the writer writes, and changes with
// each report. A report that was read under one version at two times was true all the time in between.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <utility>

namespace torchext::collectives {

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
