// Parts of sequences that recurrent layers compute together, some tokens of each at a time.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "parallel.h"

namespace rhizome {

inline constexpr int64_t kPieceTokens = 64;  // of a segment that are computed before the next ones: bounds scratch memory

// Some tokens of a segment, and where their numbers are in the scratch memory.
struct Piece {
  int64_t row, token, count, place;
};

// Calls round(pieces, tokens) for the first kPieceTokens tokens of every segment, then for the next ones, until there are
// no more. `segments` [count, 3]: row of the states, first token, tokens.
template <typename Round>
inline void in_rounds(const int64_t* segments, int64_t count, const Round& round) {
  std::vector<Piece> pieces;
  for (int64_t begin = 0;; begin += kPieceTokens) {
    pieces.clear();
    int64_t tokens = 0;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t* segment = segments + 3 * i;
      const int64_t some = std::min(kPieceTokens, segment[2] - begin);
      if (some <= 0) continue;
      pieces.push_back({segment[0], segment[1] + begin, some, tokens});
      tokens += some;
    }
    if (pieces.empty()) return;
    round(pieces, tokens);
  }
}

// Calls body(segment, part) for every segment and each of its `parts`. Tasks are several parts of a segment, side by side in
// memory, where there are so many that each thread has some tasks nevertheless.
template <typename Body>
inline void for_parts(const int64_t* segments, int64_t count, int64_t parts, const Body& body) {
  constexpr int64_t kTasksEach = 8;  // at least, of a thread
  const int64_t all = count * parts, at_once = std::clamp<int64_t>(all / (kTasksEach * num_threads()), 1, parts);
  parallel_for((all + at_once - 1) / at_once, [&](int64_t task, int) {
    for (int64_t at = task * at_once; at < std::min(all, (task + 1) * at_once); ++at)
      body(segments + 3 * (at / parts), at % parts);
  });
}

// The same for each `block`-th of the channels.
template <typename Body>
inline void for_channels(const int64_t* segments, int64_t count, int64_t channels, int64_t block, const Body& body) {
  for_parts(segments, count, (channels + block - 1) / block,
            [&](const int64_t* segment, int64_t part) { body(segment, part * block); });
}

}  // namespace rhizome
