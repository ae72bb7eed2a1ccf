// Counters that only grow, and predicates over them that are looked at only when a changed counter can move them.
//
// A predicate is a nest of order statistics, so its value is always that of one of its counters. Raising a counter from
// a to b can change the value r only if a <= r < b: above r it was no obstacle before, and up to r it is none now. Where
// it is one order statistic of distinct counters, such a raise leaves r as it is or moves it to the next larger value.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace torchext::replication {

// The k-th smallest of n values, k from 1; may reorder them.
inline std::uint64_t kth_smallest(std::uint64_t* values, std::size_t n, std::size_t k) {
    if (k == 1) {
        std::uint64_t least = values[0];
        for (std::size_t i = 1; i < n; ++i) least = std::min(least, values[i]);
        return least;
    }
    if (k == n) {
        std::uint64_t most = values[0];
        for (std::size_t i = 1; i < n; ++i) most = std::max(most, values[i]);
        return most;
    }
    std::nth_element(values, values + (k - 1), values + n);
    return values[k - 1];
}

class Counters {
public:
    // Postfix: a number >= 0 pushes that counter; -n, k replaces the top n values by their k-th smallest.
    using Code = std::vector<std::int64_t>;

    std::size_t add_counter() {
        values_.push_back(0);
        users_.emplace_back();
        return values_.size() - 1;
    }

    std::uint64_t counter(std::size_t index) const { return values_.at(index); }

    std::size_t add(const Code& code) {
        Predicate predicate;
        std::size_t depth = 0, deepest = 0;
        for (std::size_t i = 0; i < code.size(); ++i) {
            if (code[i] >= 0) {
                if (static_cast<std::size_t>(code[i]) >= values_.size()) throw std::out_of_range("no such counter");
                deepest = std::max(deepest, ++depth);
                continue;
            }
            const auto n = static_cast<std::size_t>(-code[i]);
            if (++i == code.size() || code[i] < 1 || static_cast<std::size_t>(code[i]) > n || n > depth) {
                throw std::invalid_argument("not a predicate: an order statistic without its values");
            }
            depth -= n - 1;
        }
        if (depth != 1) throw std::invalid_argument("not a predicate: it must leave one value");
        predicate.code = code;
        predicate.live = true;
        if (stack_.size() < deepest) stack_.resize(deepest);
        const auto free = std::find_if(predicates_.begin(), predicates_.end(), [](const auto& p) { return !p.live; });
        const auto id = static_cast<std::size_t>(free - predicates_.begin());
        if (free == predicates_.end()) predicates_.emplace_back();
        predicates_[id] = std::move(predicate);
        const std::vector<std::size_t> counters = counters_of(id);
        for (const std::size_t counter : counters) users_[counter].push_back(static_cast<std::uint32_t>(id));
        if (counters.size() + 2 == code.size()) {
            predicates_[id].flat.assign(counters.begin(), counters.end());
            predicates_[id].k = static_cast<std::size_t>(code.back());
        }
        predicates_[id].value = evaluate(id);
        return id;
    }

    void remove(std::size_t id) {
        for (const std::size_t counter : counters_of(id)) {
            std::erase(users_[counter], static_cast<std::uint32_t>(id));
        }
        predicates_.at(id) = {};
    }

    // The value as of the last change of a counter.
    std::uint64_t value(std::size_t id) const { return predicates_.at(id).value; }

    // The value worked out anew, from all counters.
    std::uint64_t evaluate(std::size_t id) {
        const Code& code = predicates_.at(id).code;
        std::uint64_t* top = stack_.data();
        const std::size_t size = code.size();
        for (std::size_t i = 0; i < size; ++i) {
            if (code[i] >= 0) {
                *top++ = values_[static_cast<std::size_t>(code[i])];
            } else {
                const auto n = static_cast<std::size_t>(-code[i]);
                top -= n;
                *top = kth_smallest(top, n, static_cast<std::size_t>(code[++i]));
                ++top;
            }
        }
        return stack_[0];
    }

    // Raises a counter; calls moved(id) for each predicate whose value changed. A lower value than before is ignored.
    template <typename Moved>
    void raise(std::size_t index, std::uint64_t to, Moved&& moved) {
        const std::uint64_t from = values_.at(index);
        if (to <= from) return;
        values_[index] = to;
        for (const std::uint32_t id : users_[index]) {
            Predicate& predicate = predicates_[id];
            if (predicate.value < from || predicate.value >= to) continue;
            const std::uint64_t value = predicate.flat.empty() ? evaluate(id) : next_value(predicate);
            if (value != predicate.value) {
                predicate.value = value;
                moved(id);
            }
        }
    }

    // Takes back what a site has lost; values of predicates may fall.
    void lower(std::size_t index, std::uint64_t to) {
        if (to >= values_.at(index)) return;
        values_[index] = to;
        for (const std::uint32_t id : users_[index]) predicates_[id].value = evaluate(id);
    }

private:
    struct Predicate {
        Code code;
        std::uint64_t value = 0;
        bool live = false;
        std::vector<std::uint32_t> flat;  // the counters, if it is one order statistic of distinct ones
        std::size_t k = 0;                // ... the k-th smallest
    };

    // After one of the counters went from at most the value to above it.
    std::uint64_t next_value(const Predicate& predicate) const {
        const std::uint64_t* values = values_.data();
        const std::uint64_t before = predicate.value;
        std::uint64_t next = ~std::uint64_t{0};
        std::size_t left = 0;  // up to the value
        for (const std::uint32_t counter : predicate.flat) {
            const std::uint64_t value = values[counter];
            left += value <= before;
            next = std::min(next, value > before ? value : ~std::uint64_t{0});
        }
        return left >= predicate.k ? before : next;
    }

    std::vector<std::size_t> counters_of(std::size_t id) const {
        std::vector<std::size_t> found;
        const Code& code = predicates_.at(id).code;
        for (std::size_t i = 0; i < code.size(); ++i) {
            if (code[i] >= 0) {
                found.push_back(static_cast<std::size_t>(code[i]));
            } else {
                ++i;
            }
        }
        std::sort(found.begin(), found.end());
        found.erase(std::unique(found.begin(), found.end()), found.end());
        return found;
    }

    std::vector<std::uint64_t> values_;
    std::vector<std::vector<std::uint32_t>> users_;  // of each counter: the predicates that read it
    std::vector<Predicate> predicates_;
    std::vector<std::uint64_t> stack_;
};

}  // namespace torchext::replication
