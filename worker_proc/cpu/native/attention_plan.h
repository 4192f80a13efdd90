// Which blocks of which decode rows are computed before the rows themselves, as laid out in the plan's numbers:
// a header, then `num_runs` runs, then per row an entry, then lists.
#pragma once

#include <cstdint>

namespace rhizome {

// One block of the context, the same pages in all of `num_rows` decode rows.
struct PlanRun {
  int32_t block;
  int32_t num_rows;
  int32_t rows;           // where in the plan the list of rows is
  int32_t first_partial;  // partial results have numbers: first_partial + i is of the i-th row of the list
};

// The blocks [0, num_partials) of a row have partial results, whose numbers are a list; the row computes the rest.
struct PlanRow {
  int32_t num_partials;
  int32_t partials;  // where in the plan the list is
};

struct Plan {
  int32_t num_runs;
  int32_t num_partials;
  // PlanRun[num_runs], PlanRow[rows of the batch], lists

  const int32_t* numbers() const { return reinterpret_cast<const int32_t*>(this); }
  const PlanRun* runs() const { return reinterpret_cast<const PlanRun*>(this + 1); }
  const PlanRow* rows() const { return reinterpret_cast<const PlanRow*>(runs() + num_runs); }
};

}  // namespace rhizome
