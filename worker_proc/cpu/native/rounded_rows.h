// Rows of x rounded to int8 for kInt8Both.
#pragma once

#include <algorithm>
#include <vector>

#include "bf16.h"
#include "fixed_point.h"
#include "room.h"
#include "rows.h"

namespace rhizome {

inline void put_whole(float number, int8_t& to) { to = static_cast<int8_t>(number); }
inline void put_whole(float number, bf16& to) { to = to_bf16(number); }  // exactly

// As numbers of type `Number`, int8 or bfloat16. Until the next ones of the same thread.
template <class Number>
class RoundedRows {
 public:
  // Rows [rows, inputs] become rows of `size` numbers, the last of which are zeros, `stride` apart.
  RoundedRows(const bf16* x, int64_t x_stride, int64_t rows, int64_t inputs, int64_t size, int64_t stride) : stride_(stride) {
    static thread_local std::vector<Number> memory;
    static thread_local std::vector<float> units;
    static thread_local std::vector<int32_t> sums;
    data_ = room_in(memory, rows * stride);
    units_ = room_in(units, rows);
    sums_ = room_in(sums, rows);
    for_rows(rows, inputs, [&](int64_t row) { round(x + row * x_stride, row, inputs, size); });
  }

  const Number* data() const { return data_; }
  const float* units() const { return units_; }   // that the numbers of a row count
  const int32_t* sums() const { return sums_; }   // of the numbers of a row

 private:
  void round(const bf16* from, int64_t row, int64_t inputs, int64_t size) {
    int largest = 0;
    for (int64_t i = 0; i < inputs; ++i) largest = std::max(largest, from[i] & 0x7fff);
    const FixedPoint point(largest, true);
    units_[row] = point.unit;
    Number* const to = data_ + row * stride_;
    const float factor = largest < 0x7f80 ? point.factor : 0.0f;
    int32_t sum = 0;
    for (int64_t i = 0; i < inputs; ++i) {
      const float whole = __builtin_nearbyintf(to_float(from[i]) * factor);
      put_whole(whole == whole ? whole : 0.0f, to[i]);
      sum += static_cast<int32_t>(whole == whole ? whole : 0.0f);
    }
    sums_[row] = sum;
    std::fill(to + inputs, to + size, Number{0});
  }

  Number* data_;
  float* units_;
  int32_t* sums_;
  int64_t stride_;
};

}  // namespace rhizome
