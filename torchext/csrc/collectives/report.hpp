// What a rank tells about its blocked threads, the edges of the wait-for graph, and what follows from the reports of all.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <iterator>
#include <map>
#include <string>
#include <vector>

#include "futex.hpp"
#include "op.hpp"

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

// A report and the version under which it was read.
struct Seen {
    std::uint64_t version;
    Report report;
};

// Of ranks that are stuck, takes away those that can go on, until all that are left wait for each other.
inline void keep_deadlocked(std::map<int, Seen>& stuck) {
    for (bool changed = true; changed;) {
        changed = false;
        for (auto it = stuck.begin(); it != stuck.end();) {
            const auto& blocked = it->second.report.blocked;
            const bool alive = std::any_of(blocked.begin(), blocked.end(), [&](const Blocked& b) {
                const auto is_stuck = [&](int p) { return stuck.count(p) != 0; };
                return b.any ? !std::all_of(b.waits_for.begin(), b.waits_for.end(), is_stuck)
                             : std::none_of(b.waits_for.begin(), b.waits_for.end(), is_stuck);
            });
            it = alive ? stuck.erase(it) : std::next(it);
            changed |= alive;
        }
    }
}

// A deadlock in words.
struct Circle {
    std::vector<int> members;
    Code code = Code::deadlock;  // mismatch if all wait on one group under one tag
    bool deferrable = false;     // some wait can be put off
    std::string text;
};

// `name`: of a rank, as messages give it. `advice`: what else the program may do.
inline Circle describe(const std::map<int, Seen>& stuck, const std::function<std::string(int)>& name, std::size_t max_text,
                       const std::string& advice) {
    Circle circle;
    bool one_group = true;
    const Blocked& first = stuck.begin()->second.report.blocked.front();
    const Nanoseconds t = now();
    for (const auto& [p, seen] : stuck) {
        circle.members.push_back(p);
        for (const auto& b : seen.report.blocked) {
            if (b.future) continue;
            circle.deferrable |= b.deferrable;
            one_group = one_group && b.group == first.group && b.tag == first.tag;
            std::string whom;
            for (const int q : b.waits_for) whom += (whom.empty() ? "" : ", ") + name(q);
            char seconds[32];
            std::snprintf(seconds, sizeof(seconds), "%.1f s", static_cast<double>(t - b.since) * 1e-9);
            circle.text += "\n  " + name(p) + " has waited " + seconds + " for " + whom + " in " + b.text;
        }
    }
    if (circle.text.size() > max_text) circle.text = circle.text.substr(0, max_text) + " ...";
    if (one_group) {
        circle.code = Code::mismatch;
        circle.text = "the ranks of one group wait in calls that differ:" + circle.text +
                      "\nIf they are meant as one call, make them equal. If each rank makes all of them in an order of its "
                      "own, name them with torchext.tag and make them with async_op=True.";
    } else {
        circle.text = "these ranks wait for each other, and none can go on:" + circle.text +
                      "\nMake such calls with async_op=True and wait for them later" + advice + ".";
    }
    return circle;
}

}  // namespace torchext::collectives
