// Where the time of a step goes: for the profile, off otherwise.
#pragma once

#include <time.h>

#include <cstdint>

namespace rhizome {

// Adds the nanoseconds of its own life to sums[place]; with no sums it does nothing.
class Stopwatch {
 public:
  Stopwatch(int64_t* sums, int place) : sum_(sums != nullptr ? sums + place : nullptr) {
    if (sum_ != nullptr) *sum_ -= now();
  }
  ~Stopwatch() {
    if (sum_ != nullptr) *sum_ += now();
  }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

 private:
  static int64_t now() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
  }

  int64_t* const sum_;
};

}  // namespace rhizome
