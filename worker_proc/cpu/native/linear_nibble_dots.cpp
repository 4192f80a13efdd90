#include "linear_nibble_dots.h"

#include <type_traits>

namespace rhizome {

#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
namespace {

template <Format kFormat, CodeZeros kZeros, ScaleForm kForm = ScaleForm::kFloat32>
void dots_of_format(const NibblePlace& place, int count, const DotRows& rows, LinesAhead& ahead, bf16* plain, bool keep, bool kept) {
  const auto run = [&]<class Blocks>(const Blocks& from) {
    dots(count, NibbleDots<kFormat, kZeros, kForm, Blocks>{place, from}, rows, place.now, ahead);
  };
  const uint8_t* const codes = codes_at(place.weights, place.panel, place.step);
  if constexpr (kForm == ScaleForm::kFloat32) {  // which others have become where there are several passes
    if (kept) return run(PlainBlocks(plain));
    if (keep) return run(NibbleBlocks<kFormat, true>(codes, plain));
  }
  run(NibbleBlocks<kFormat, false>(codes, plain));
}

}  // namespace

void nibble_dots(const NibblePlace& place, int count, const DotRows& rows, LinesAhead& ahead, bf16* plain, bool keep, bool kept) {
  const auto run = [&](auto of) { of(place, count, rows, ahead, plain, keep, kept); };
  const PackedMatrix& weights = place.weights;
  if (is_float4(weights.format)) return run(dots_of_format<Format::kFloat4, CodeZeros::kMiddle>);
  switch (weights.scale_form) {
    case ScaleForm::kFloat32:
      if (weights.zeros == nullptr) return run(dots_of_format<Format::kInt4, CodeZeros::kMiddle>);
      return run(dots_of_format<Format::kInt4, CodeZeros::kZeros>);
    case ScaleForm::kFloat16: return run(dots_of_format<Format::kInt4, CodeZeros::kMiddle, ScaleForm::kFloat16>);
    case ScaleForm::kFactors: return run(dots_of_format<Format::kInt4, CodeZeros::kBelow, ScaleForm::kFactors>);
    case ScaleForm::kLess: return run(dots_of_format<Format::kInt4, CodeZeros::kBelow>);
  }
}
#endif

}  // namespace rhizome
