// Rows of x rounded to int8 for kInt8Both, where products are those of bfloat16, which holds the whole numbers exactly.
#pragma once

#include <algorithm>
#include <vector>

#include "bf16.h"
#include "fixed_point.h"
#include "room.h"
#include "rows.h"

namespace rhizome {

// Until the next ones of the same thread.
class RoundedRows {
 public:
  // x [rows, inputs], the last ones perhaps zeros behind a row.
  RoundedRows(const bf16* x, int64_t x_stride, int64_t rows, int64_t inputs) : stride_(row_stride(inputs)) {
    static thread_local std::vector<bf16> memory;
    static thread_local std::vector<float> units;
    data_ = room_in(memory, rows * stride_);
    units_ = room_in(units, rows);
    for_rows(rows, inputs, [&](int64_t row) {
      const bf16* const from = x + row * x_stride;
      const FixedPoint point(largest_bits(from, inputs), true);
      for (int64_t i = 0; i < inputs; ++i) data_[row * stride_ + i] = to_bf16(__builtin_nearbyintf(to_float(from[i]) * point.factor));
      units_[row] = point.unit;
    });
  }

  const bf16* data() const { return data_; }
  int64_t stride() const { return stride_; }
  const float* units() const { return units_; }  // that the numbers of a row count

 private:
  bf16* data_;
  float* units_;
  const int64_t stride_;
};

}  // namespace rhizome
