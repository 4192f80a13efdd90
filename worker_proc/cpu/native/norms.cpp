#include "norms.h"

#include "norm.h"
#include "rows.h"

void rhizome_rms_norm(const rhizome::bf16* x, int64_t rows, int64_t size, const float* weight, float eps,
                      rhizome::bf16* out) {
  rhizome::for_rows(rows, size, [&](int64_t row) { rhizome::rms_norm(x + row * size, weight, size, eps, out + row * size); });
}
